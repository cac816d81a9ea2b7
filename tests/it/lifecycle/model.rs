//! Random graphs and random events against a small model in memory. The service and the model agree on every status, run
//! and attempt, and the counters are right.

use std::collections::HashMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};

use crate::support::{Fixture, text};

#[derive(Clone, Debug)]
struct Node {
    /// Distance back to each parent, and whether its success is required.
    parents: Vec<(usize, bool)>,
    max_retries: u8,
    /// Starts only while fewer than this are running.
    limit: Option<u8>,
    /// Dead ends stop at it.
    barrier: bool,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Claim,
    Succeed(usize),
    Fail(usize),
    Cancel(usize),
    Pause(usize),
    Resume(usize),
    /// The worker wants to be asked again later.
    Defer(usize),
    /// A manual retry, with or without the children that failed because of the task.
    Retry(usize, bool),
    RetryAll,
    /// Seconds pass, and the loops handle what is due.
    Time(u8),
    StopAll,
}

/// The parts of a node: links back, retries, whether it is a barrier, how many may run beside it.
type Drawn = (Vec<(usize, bool)>, u8, bool, Option<u8>);

fn graph() -> impl Strategy<Value = Vec<Node>> {
    let node = (
        prop::collection::vec((1usize..5, any::<bool>()), 0..4),
        0u8..3,
        prop::bool::weighted(0.2),
        prop::option::of(1u8..4),
    );
    prop::collection::vec(node, 1..14).prop_map(|nodes| {
        let build = |(i, (back, max_retries, barrier, limit)): (usize, Drawn)| {
            let mut parents: HashMap<usize, bool> = HashMap::new();
            for (distance, required) in back {
                if let Some(parent) = i.checked_sub(distance) {
                    parents.insert(parent, required);
                }
            }
            Node { parents: parents.into_iter().collect(), max_retries, limit, barrier }
        };
        nodes.into_iter().enumerate().map(build).collect()
    })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let at = 0usize..14;
    let step = prop_oneof![
        4 => Just(Step::Claim),
        6 => at.clone().prop_map(Step::Succeed),
        5 => at.clone().prop_map(Step::Fail),
        1 => at.clone().prop_map(Step::Cancel),
        1 => at.clone().prop_map(Step::Pause),
        2 => at.clone().prop_map(Step::Resume),
        2 => at.clone().prop_map(Step::Defer),
        3 => (at, any::<bool>()).prop_map(|(i, cascade)| Step::Retry(i, cascade)),
        1 => Just(Step::RetryAll),
        4 => (1u8..40).prop_map(Step::Time),
        1 => Just(Step::StopAll),
    ];
    prop::collection::vec(step, 1..40)
}

#[derive(Clone, Debug)]
struct Task {
    status: &'static str,
    attempt: i64,
    run: i64,
    due: Option<i64>,
    deadline: Option<i64>,
    /// It failed because a parent did.
    fallen: bool,
    /// It has been executed at its current run, or is about to be again by itself.
    begun: bool,
    /// It was retried manually and not claimed since.
    pressed: bool,
    /// The time of its last heartbeat.
    seen: i64,
}

/// The expected state, by the plainest rules.
struct Model {
    nodes: Vec<Node>,
    tasks: Vec<Task>,
    now: i64,
    /// Whether the batch wants its dead ends canceled.
    dead_ends: bool,
}

const TIMEOUT: i64 = 30;
const DELAY: i64 = 10;
const WAIT: i64 = 7;
const STUCK: i64 = 12;

impl Model {
    fn new(nodes: &[Node], dead_ends: bool) -> Model {
        let fresh = |node: &Node| Task {
            status: if node.parents.is_empty() { "Pending" } else { "Waiting" },
            attempt: 0,
            run: 0,
            due: None,
            deadline: None,
            fallen: false,
            begun: false,
            pressed: false,
            seen: 0,
        };
        Model { tasks: nodes.iter().map(fresh).collect(), nodes: nodes.to_vec(), now: 0, dead_ends }
    }

    fn ended(&self, i: usize) -> bool {
        matches!(self.tasks[i].status, "Success" | "Failure" | "Canceled")
    }

    fn end(&mut self, i: usize, status: &'static str) {
        let task = &mut self.tasks[i];
        (task.status, task.due, task.deadline) = (status, None, None);
    }

    fn schedule(&mut self, i: usize, after: i64) {
        let due = Some(self.now + after);
        let task = &mut self.tasks[i];
        (task.status, task.due, task.deadline) = ("RetryPending", due, None);
        task.run += 1;
    }

    fn bad(&self, i: usize) -> bool {
        matches!(self.tasks[i].status, "Failure" | "Canceled")
    }

    fn lost(&self, i: usize) -> bool {
        self.nodes[i].parents.iter().any(|(parent, required)| *required && self.bad(*parent))
    }

    /// In line again as if it was new; its status is settled afterwards.
    fn anew(&mut self, i: usize, run: i64) {
        let task = &mut self.tasks[i];
        *task = Task {
            status: "Waiting",
            attempt: 0,
            run,
            due: None,
            deadline: None,
            fallen: false,
            begun: false,
            pressed: true,
            seen: task.seen,
        };
        if !self.unmet(i) {
            self.tasks[i].status = "Pending";
        }
    }

    /// Children in the order of the batch: their parents have had their turn.
    fn revive(&mut self, back: &mut Vec<usize>) {
        for i in 0..self.tasks.len() {
            let of_one = self.nodes[i].parents.iter().any(|(parent, required)| *required && back.contains(parent));
            if self.tasks[i].status == "Failure" && self.tasks[i].fallen && of_one && !self.lost(i) {
                let run = self.tasks[i].run + 1;
                self.anew(i, run);
                back.push(i);
            }
        }
    }

    fn retry_all(&mut self) {
        let mut back: Vec<usize> = Vec::new();
        for i in 0..self.tasks.len() {
            if self.tasks[i].status == "Failure" && !self.tasks[i].fallen {
                let run = self.tasks[i].run + 1;
                self.anew(i, run);
                back.push(i);
            }
        }
        self.revive(&mut back);
        // All of them come back together: one waits for another that was not there yet when it was its turn here.
        for i in back {
            if self.unmet(i) {
                self.tasks[i].status = "Waiting";
            }
        }
    }

    fn retry(&mut self, i: usize, cascade: bool) -> bool {
        let task = self.tasks[i].clone();
        let run = match task.status {
            "Failure" | "Canceled" => task.run + 1,
            "RetryPending" => task.run,
            "Running" if task.seen + STUCK <= self.now => task.run + 1,
            "Pending" | "Waiting" if task.pressed => {
                if cascade {
                    self.revive(&mut vec![i]);
                }
                return true;
            }
            _ => return false,
        };
        if self.lost(i) {
            return false;
        }
        self.anew(i, run);
        if cascade {
            self.revive(&mut vec![i]);
        }
        true
    }

    fn fail(&mut self, i: usize) {
        let task = &mut self.tasks[i];
        if task.attempt < i64::from(self.nodes[i].max_retries) {
            task.attempt += 1;
            self.schedule(i, DELAY);
        } else {
            self.end(i, "Failure");
        }
    }

    fn unmet(&self, i: usize) -> bool {
        self.nodes[i].parents.iter().any(|(parent, _)| !self.ended(*parent))
    }

    /// Looks at every child, repeatedly, until nothing moves.
    fn settle(&mut self) {
        loop {
            let before: Vec<&str> = self.tasks.iter().map(|t| t.status).collect();
            for i in 0..self.tasks.len() {
                let bad = |(parent, required): &(usize, bool)| {
                    *required && matches!(self.tasks[*parent].status, "Failure" | "Canceled")
                };
                if !matches!(self.tasks[i].status, "Waiting" | "Paused") || self.nodes[i].parents.is_empty() {
                    continue;
                }
                if !self.tasks[i].begun && self.nodes[i].parents.iter().any(bad) {
                    self.end(i, "Failure");
                    self.tasks[i].fallen = true;
                } else if self.tasks[i].status == "Waiting" && !self.unmet(i) {
                    self.tasks[i].status = "Pending";
                }
            }
            if before == self.tasks.iter().map(|t| t.status).collect::<Vec<_>>() {
                return;
            }
        }
    }

    /// Cancels, repeatedly, each alive task that has no alive child and one that has ended badly since `before`.
    fn cancel_dead_ends(&mut self, before: &[bool]) {
        let dead = |model: &Model, i: usize| {
            let children = || (0..model.nodes.len()).filter(|c| model.nodes[*c].parents.iter().any(|(p, _)| *p == i));
            let told = |c: usize| model.bad(c) && !before[c] && !model.nodes[c].barrier;
            !model.ended(i) && children().all(|c| model.ended(c)) && children().any(told)
        };
        while let Some(i) = (0..self.tasks.len()).find(|i| dead(self, *i)) {
            self.end(i, "Canceled");
        }
    }

    /// Whether the API should take it.
    #[allow(clippy::too_many_lines, reason = "one arm per step")]
    fn step(&mut self, step: Step) -> bool {
        let bad: Vec<bool> = (0..self.tasks.len()).map(|i| self.bad(i)).collect();
        let taken = match step {
            Step::Claim => {
                let mut running = self.tasks.iter().filter(|t| t.status == "Running").count();
                for (task, node) in self.tasks.iter_mut().zip(&self.nodes).filter(|(t, _)| t.status == "Pending") {
                    if node.limit.is_some_and(|limit| running >= usize::from(limit)) {
                        continue;
                    }
                    running += 1;
                    task.status = "Running";
                    task.deadline = Some(self.now + TIMEOUT);
                    (task.begun, task.pressed, task.seen) = (true, false, self.now);
                }
                true
            }
            Step::Succeed(i) => match self.tasks[i].status {
                "Running" => {
                    self.end(i, "Success");
                    true
                }
                status => status == "Success",
            },
            Step::Fail(i) => match self.tasks[i].status {
                "Running" => {
                    self.fail(i);
                    true
                }
                "Failure" => true,
                // Accepted exactly if it repeats what was reported for the run before: see the caller.
                _ => false,
            },
            Step::Defer(i) => match self.tasks[i].status {
                "Running" if self.nodes[i].max_retries > 0 => {
                    self.schedule(i, WAIT);
                    true
                }
                "Running" => {
                    self.end(i, "Failure");
                    true
                }
                status => status == "Failure",
            },
            Step::Retry(i, cascade) => self.retry(i, cascade),
            Step::RetryAll => {
                self.retry_all();
                true
            }
            Step::Cancel(i) => match self.tasks[i].status {
                "Success" | "Failure" => false,
                _ => {
                    self.end(i, "Canceled");
                    true
                }
            },
            Step::Pause(i) => match self.tasks[i].status {
                "Pending" | "Waiting" | "RetryPending" => {
                    self.tasks[i].status = "Paused";
                    true
                }
                status => status == "Paused",
            },
            Step::Resume(i) => {
                if self.tasks[i].status == "Paused" {
                    let later = self.tasks[i].due.is_some_and(|due| due > self.now);
                    self.tasks[i].status = if !self.tasks[i].begun && self.unmet(i) {
                        "Waiting"
                    } else if later {
                        "RetryPending"
                    } else {
                        "Pending"
                    };
                    if self.tasks[i].status == "Pending" {
                        self.tasks[i].due = None;
                    }
                }
                !self.ended(i)
            }
            Step::Time(secs) => {
                self.now += i64::from(secs);
                for i in 0..self.tasks.len() {
                    if self.tasks[i].deadline.is_some_and(|deadline| deadline <= self.now) {
                        self.fail(i);
                    }
                }
                for task in self.tasks.iter_mut().filter(|t| t.status == "RetryPending") {
                    if task.due.is_some_and(|due| due <= self.now) {
                        (task.status, task.due) = ("Pending", None);
                    }
                }
                true
            }
            Step::StopAll => {
                for i in 0..self.tasks.len() {
                    if !self.ended(i) {
                        self.end(i, "Canceled");
                    }
                }
                true
            }
        };
        self.settle();
        if self.dead_ends {
            self.cancel_dead_ends(&bad);
        }
        taken
    }
}

async fn play(nodes: &[Node], steps: &[Step], dead_ends: bool) -> Result<(), TestCaseError> {
    let f = Fixture::with(&["--stuck-after-secs", &STUCK.to_string()]).await;
    let result = play_on(&f, nodes, steps, dead_ends).await;
    f.store.close();
    f.db.pool.close().await;
    result
}

async fn play_on(f: &Fixture, nodes: &[Node], steps: &[Step], dead_ends: bool) -> Result<(), TestCaseError> {
    let tasks: Vec<Value> = nodes
        .iter()
        .enumerate()
        .map(|(i, node)| {
            let needs: Vec<Value> = node
                .parents
                .iter()
                .map(|(parent, required)| json!({"id": parent.to_string(), "requires_success": required}))
                .collect();
            let retry = (node.max_retries > 0).then(|| {
                json!({"max_retries": node.max_retries, "initial_delay_secs": DELAY, "backoff_multiplier": 1.0, "jitter_ms": 0})
            });
            let rules = node.limit.map(|max| json!([{"type": "Concurency", "max_concurency": max, "matcher": {}}]));
            json!({"id": i.to_string(), "name": i.to_string(), "kind": "k", "timeout": TIMEOUT, "dependencies": needs,
                   "retry": retry, "rules": rules, "dead_end_barrier": node.barrier})
        })
        .collect();
    let answer = f.api.post("/task", &json!({"tasks": tasks, "dead_end_cancel": dead_ends})).await;
    prop_assert_eq!(answer.status.as_u16(), 201, "{}", answer.body);
    let batch = answer.headers["x-batch-id"].to_str().unwrap().to_owned();
    let ids: Vec<String> = answer.body.as_array().unwrap().iter().map(|t| text(&t["id"])).collect();
    let mut model = Model::new(nodes, dead_ends);
    for step in steps {
        let at = |i: usize| &ids[i % ids.len()];
        let inside = match *step {
            Step::Succeed(i) => Step::Succeed(i % ids.len()),
            Step::Fail(i) => Step::Fail(i % ids.len()),
            Step::Cancel(i) => Step::Cancel(i % ids.len()),
            Step::Pause(i) => Step::Pause(i % ids.len()),
            Step::Resume(i) => Step::Resume(i % ids.len()),
            Step::Defer(i) => Step::Defer(i % ids.len()),
            Step::Retry(i, cascade) => Step::Retry(i % ids.len(), cascade),
            other => other,
        };
        let before = model.tasks.clone();
        let taken = model.step(inside);
        let status = match inside {
            Step::Claim => {
                f.claim().await;
                None
            }
            Step::Time(secs) => {
                f.advance(i64::from(secs));
                f.expire().await;
                f.release().await;
                None
            }
            Step::StopAll => Some(f.api.delete(&format!("/batch/{batch}")).await.status),
            Step::Succeed(i) => Some(f.api.succeed(at(i)).await.status),
            Step::Fail(i) => Some(f.api.fail(at(i)).await.status),
            Step::Defer(i) => {
                let body = json!({"status": "Failure", "failure_reason": "busy", "retry_after_secs": WAIT});
                Some(f.api.patch(&format!("/task/{}", at(i)), &body).await.status)
            }
            Step::Retry(i, cascade) => {
                Some(f.api.post(&format!("/task/{}/retry", at(i)), &json!({"cascade": cascade})).await.status)
            }
            Step::RetryAll => Some(f.api.post(&format!("/batch/{batch}/retry"), &json!({})).await.status),
            Step::Cancel(i) => Some(f.api.delete(&format!("/task/{}", at(i))).await.status),
            Step::Pause(i) => Some(f.api.patch(&format!("/task/pause/{}", at(i)), &json!({})).await.status),
            Step::Resume(i) => Some(f.api.patch(&format!("/task/resume/{}", at(i)), &json!({})).await.status),
        };
        if let Some(status) = status {
            let repeats = matches!(inside, Step::Fail(i) | Step::Defer(i) if before[i].run > 0);
            if taken || !repeats {
                prop_assert_eq!(status.as_u16(), if taken { 200 } else { 409 }, "{:?}", inside);
            }
        }
        let dag = f.api.get(&format!("/dag/{batch}")).await.body;
        for (i, (task, real)) in model.tasks.iter().zip(dag["tasks"].as_array().unwrap()).enumerate() {
            let found = (text(&real["status"]), real["attempt"].as_i64(), real["run"].as_i64());
            prop_assert_eq!(
                found,
                (task.status.to_owned(), Some(task.attempt), Some(task.run)),
                "task {} after {:?}",
                i,
                inside
            );
        }
    }
    f.db.assert_counters_match().await;
    Ok(())
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// A case that random graphs seldom contain.
#[test]
fn a_retried_task_waits_for_its_retried_optional_parent() {
    let node =
        |parents: &[(usize, bool)]| Node { parents: parents.to_vec(), max_retries: 0, limit: None, barrier: false };
    let nodes = [node(&[]), node(&[(0, true)]), node(&[(1, false)])];
    let steps = [Step::Claim, Step::Fail(0), Step::Claim, Step::Fail(2), Step::RetryAll, Step::Claim, Step::Succeed(0)];
    runtime().block_on(play(&nodes, &steps, false)).unwrap();
}

#[test]
fn the_service_agrees_with_the_model() {
    let runtime = runtime();
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(40);
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&(graph(), steps(), any::<bool>()), |(nodes, steps, on)| runtime.block_on(play(&nodes, &steps, on)))
        .unwrap_or_else(|error| panic!("{error}"));
}
