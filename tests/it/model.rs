//! Random graphs and random events against a tiny model that holds everything in memory. Whatever happens, the
//! service and the model agree on every status, run and attempt, and the books balance.

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
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Claim,
    Succeed(usize),
    Fail(usize),
    Cancel(usize),
    Pause(usize),
    Resume(usize),
    /// Seconds go by, and the loops look what is due.
    Time(u8),
    StopAll,
}

fn graph() -> impl Strategy<Value = Vec<Node>> {
    let node = (prop::collection::vec((1usize..5, any::<bool>()), 0..4), 0u8..3);
    prop::collection::vec(node, 1..14).prop_map(|nodes| {
        let build = |(i, (back, max_retries)): (usize, (Vec<(usize, bool)>, u8))| {
            let mut parents: HashMap<usize, bool> = HashMap::new();
            for (distance, required) in back {
                if let Some(parent) = i.checked_sub(distance) {
                    parents.insert(parent, required);
                }
            }
            Node { parents: parents.into_iter().collect(), max_retries }
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
        2 => at.prop_map(Step::Resume),
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
}

/// What should be the case, by the plainest rules that say so.
struct Model {
    nodes: Vec<Node>,
    tasks: Vec<Task>,
    now: i64,
}

const TIMEOUT: i64 = 30;
const DELAY: i64 = 10;

impl Model {
    fn new(nodes: &[Node]) -> Model {
        let fresh = |node: &Node| Task {
            status: if node.parents.is_empty() { "Pending" } else { "Waiting" },
            attempt: 0,
            run: 0,
            due: None,
            deadline: None,
        };
        Model { tasks: nodes.iter().map(fresh).collect(), nodes: nodes.to_vec(), now: 0 }
    }

    fn ended(&self, i: usize) -> bool {
        matches!(self.tasks[i].status, "Success" | "Failure" | "Canceled")
    }

    fn end(&mut self, i: usize, status: &'static str) {
        let task = &mut self.tasks[i];
        (task.status, task.due, task.deadline) = (status, None, None);
    }

    fn fail(&mut self, i: usize) {
        let task = &mut self.tasks[i];
        if task.attempt < i64::from(self.nodes[i].max_retries) {
            task.status = "RetryPending";
            task.due = Some(self.now + DELAY);
            task.deadline = None;
            task.attempt += 1;
            task.run += 1;
        } else {
            self.end(i, "Failure");
        }
    }

    fn unmet(&self, i: usize) -> bool {
        self.nodes[i].parents.iter().any(|(parent, _)| !self.ended(*parent))
    }

    /// Looks at every child, again and again, until nothing moves: no cleverness.
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
                if self.tasks[i].run == 0 && self.nodes[i].parents.iter().any(bad) {
                    self.end(i, "Failure");
                } else if self.tasks[i].status == "Waiting" && !self.unmet(i) {
                    self.tasks[i].status = "Pending";
                }
            }
            if before == self.tasks.iter().map(|t| t.status).collect::<Vec<_>>() {
                return;
            }
        }
    }

    /// Whether the API should take it.
    fn step(&mut self, step: Step) -> bool {
        let taken = match step {
            Step::Claim => {
                for task in self.tasks.iter_mut().filter(|t| t.status == "Pending") {
                    task.status = "Running";
                    task.deadline = Some(self.now + TIMEOUT);
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
                    self.tasks[i].status = if self.unmet(i) {
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
        taken
    }
}

async fn play(nodes: &[Node], steps: &[Step]) -> Result<(), TestCaseError> {
    let f = Fixture::new().await;
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
            json!({"id": i.to_string(), "name": i.to_string(), "kind": "k", "timeout": TIMEOUT, "dependencies": needs, "retry": retry})
        })
        .collect();
    let answer = f.api.post("/task", &json!(tasks)).await;
    prop_assert_eq!(answer.status.as_u16(), 201, "{}", answer.body);
    let batch = answer.headers["x-batch-id"].to_str().unwrap().to_owned();
    let ids: Vec<String> = answer.body.as_array().unwrap().iter().map(|t| text(&t["id"])).collect();
    let mut model = Model::new(nodes);
    for step in steps {
        let at = |i: usize| &ids[i % ids.len()];
        let inside = match *step {
            Step::Succeed(i) => Step::Succeed(i % ids.len()),
            Step::Fail(i) => Step::Fail(i % ids.len()),
            Step::Cancel(i) => Step::Cancel(i % ids.len()),
            Step::Pause(i) => Step::Pause(i % ids.len()),
            Step::Resume(i) => Step::Resume(i % ids.len()),
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
            Step::Cancel(i) => Some(f.api.delete(&format!("/task/{}", at(i))).await.status),
            Step::Pause(i) => Some(f.api.patch(&format!("/task/pause/{}", at(i)), &json!({})).await.status),
            Step::Resume(i) => Some(f.api.patch(&format!("/task/resume/{}", at(i)), &json!({})).await.status),
        };
        if let Some(status) = status {
            let repeats = matches!(inside, Step::Fail(i) if before[i].run > 0);
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
    f.db.assert_books_balance().await;
    Ok(())
}

#[test]
fn the_service_does_what_the_model_says() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let config = Config { cases: 40, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&(graph(), steps()), |(nodes, steps)| runtime.block_on(play(&nodes, &steps)))
        .unwrap_or_else(|error| panic!("{error}"));
}
