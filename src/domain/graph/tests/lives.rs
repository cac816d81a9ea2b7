//! Random histories of graphs: tasks succeed, fail, are canceled, paused and retried manually, in any order.

use std::cell::Cell;

use proptest::test_runner::TestRunner;

use super::*;

use Status::RetryPending;

struct Life {
    rows: Vec<Task>,
    edges: Vec<Edge>,
    clock: i64,
}

/// One step: what happens, to which task, and a choice.
type Step = (u8, usize, bool);

impl Life {
    fn new(size: usize, edges: Vec<Edge>) -> Life {
        let parents = |n: usize| edges.iter().filter(|edge| edge.child == id(n)).count();
        let begin = |n: usize| {
            let status = if parents(n) > 0 { Waiting } else { Pending };
            Task { run: 0, attempt: 0, deferrals: 0, claimed_run: None, ..row(n, status, parents(n)) }
        };
        Life { rows: (0..size).map(begin).collect(), edges, clock: 0 }
    }

    fn position(&self, wanted: Uuid) -> usize {
        self.rows.iter().position(|task| task.id == wanted).unwrap()
    }

    fn of(&self, wanted: Uuid) -> &Task {
        &self.rows[self.position(wanted)]
    }

    fn parents(&self, child: Uuid) -> impl Iterator<Item = (&Task, bool)> {
        let entering = self.edges.iter().filter(move |edge| edge.child == child);
        entering.map(|edge| (self.of(edge.parent), edge.requires_success))
    }

    fn open_parents(&self, child: Uuid) -> usize {
        self.parents(child).filter(|(parent, _)| !parent.status.is_terminal()).count()
    }

    fn write(&mut self, transitions: &[Transition]) {
        for transition in transitions {
            let at_row = self.position(transition.task().id);
            let before = &self.rows[at_row];
            assert_eq!((before.status, before.run), (transition.from(), transition.from_run()));
            self.rows[at_row] = Task { last_updated: at(self.clock), ..transition.task().clone() };
        }
    }

    fn happen(&mut self, n: usize, event: &Event) {
        let Ok(Some(transition)) = decide(&self.rows[n], event, moment(self.clock)) else { return };
        let settled = transition.settled();
        self.write(&[transition]);
        if let Some(settled) = settled {
            let following = propagate(&[settled], &self.edges, &self.rows, moment(self.clock));
            self.write(&following);
        }
    }

    fn claim(&mut self, n: usize) {
        self.happen(n, &Event::Claimed { by: sample::INSTANCE, lease: TimeDelta::seconds(1_000_000) });
    }

    fn execute(&mut self, n: usize, result: Result<(), FailureType>) {
        self.claim(n);
        let result = result.map_err(|failure_type| failure(Trigger::Explicit, failure_type));
        self.happen(n, &Event::Reported(Report { run: None, result }));
    }

    /// Returns what the store loads for a retry of `targets`: every edge that touches a target or a task that can be
    /// reached from one over required edges, and the rows at both ends.
    fn seen(&self, targets: &[Uuid]) -> (Vec<Edge>, Vec<Task>) {
        let mut reached: HashSet<Uuid> = targets.iter().copied().collect();
        // Edges are sorted by parent, and a parent comes before its children.
        for edge in self.edges.iter().filter(|edge| edge.requires_success) {
            if reached.contains(&edge.parent) {
                reached.insert(edge.child);
            }
        }
        let touches = |edge: &&Edge| reached.contains(&edge.parent) || reached.contains(&edge.child);
        let edges: Vec<Edge> = self.edges.iter().filter(touches).copied().collect();
        let near = |task: &&Task| {
            targets.contains(&task.id) || edges.iter().any(|edge| edge.parent == task.id || edge.child == task.id)
        };
        let rows = self.rows.iter().filter(near).cloned().collect();
        (edges, rows)
    }

    /// Retries tasks manually, checks the result, and returns the number of revived tasks.
    fn retry(&mut self, targets: &[Uuid], cascade: bool) -> usize {
        let before = self.rows.clone();
        let (edges, rows) = self.seen(targets);
        let revival = match revive(targets, cascade, &edges, &rows, TimeDelta::seconds(5000), moment(self.clock)) {
            Ok(revival) => revival,
            Err(NoRevival::Refused(task)) => {
                let status = self.of(task).status;
                assert!(!matches!(status, Failure | Canceled | RetryPending), "{status:?} can be retried");
                return 0;
            }
            Err(NoRevival::Blocked { task, parent }) => {
                assert!(targets.contains(&task) && !targets.contains(&parent));
                assert!(is_bad(self.of(parent)));
                return 0;
            }
        };
        let ids = |of: &[Transition]| of.iter().map(|t| t.task().id).collect::<HashSet<Uuid>>();
        let (retried, revived) = (ids(&revival.retried), ids(&revival.revived));
        for transitions in [&revival.retried, &revival.revived, &revival.waiting] {
            self.write(transitions);
        }

        assert!(retried.iter().all(|id| targets.contains(id)));
        assert!(cascade || revived.is_empty());
        for (before, after) in before.iter().zip(&self.rows) {
            let needed = || self.parents(before.id).filter(|(_, required)| *required).map(|(parent, _)| parent);
            let failed_by_dependency = before.status == Failure && before.failure_type == Some(FailureType::Dependency);
            let is_blocked = needed().any(is_bad);
            let is_freed = needed().any(|parent| targets.contains(&parent.id) || revived.contains(&parent.id));
            if retried.contains(&before.id) {
                assert!(!is_blocked && !after.status.is_terminal());
            } else if revived.contains(&before.id) {
                assert!(failed_by_dependency && is_freed && !is_blocked);
                assert_eq!((after.status, after.run), (Waiting, before.run + 1));
            } else {
                assert!(
                    !cascade || !failed_by_dependency || !is_freed || is_blocked,
                    "it should have been revived: {before:?}"
                );
                let (wait_count, last_updated) = (after.wait_count, after.last_updated);
                assert_eq!(*after, Task { wait_count, last_updated, ..before.clone() }, "nothing else changes");
                assert!(wait_count == before.wait_count || matches!(before.status, Waiting | Pending | Paused));
            }
        }
        revived.len()
    }

    fn step(&mut self, (what, n, choice): Step) -> usize {
        let n = n % self.rows.len();
        match what % 13 {
            0 | 1 => self.execute(n, Ok(())),
            2..5 => self.execute(n, Err(FailureType::ValidationError)),
            5 => self.execute(n, Err(FailureType::Unknown)),
            6 => self.claim(n),
            7 if choice => self.happen(n, &Event::Canceled { reason: "canceled by ada".into() }),
            7 => self.happen(n, &Event::RetryDue),
            8 => self.happen(n, &Event::Paused),
            9 => self.happen(n, &Event::Resumed),
            10 => return self.retry(&[id(n)], choice),
            11 => return self.retry(&[id(n), id((n + usize::from(what) / 13) % self.rows.len())], choice),
            12 => {
                let by_itself =
                    |task: &&Task| task.status == Failure && task.failure_type != Some(FailureType::Dependency);
                let failed: Vec<Uuid> = self.rows.iter().filter(by_itself).map(|task| task.id).collect();
                return self.retry(&failed, choice);
            }
            _ => {}
        }
        0
    }

    /// Checks the invariants that hold at every moment.
    fn check(&self) {
        for task in &self.rows {
            let waits = task.status == Waiting || task.status == Paused && !task.has_begun();
            let needed: Vec<&Task> = self.parents(task.id).filter(|(_, required)| *required).map(|(p, _)| p).collect();
            if waits {
                assert_eq!(usize::try_from(task.wait_count), Ok(self.open_parents(task.id)), "{task:?}");
                assert!(!needed.iter().any(|parent| is_bad(parent)), "it waits in vain: {task:?}");
                assert!(task.status == Paused || task.wait_count > 0, "nothing will release it: {task:?}");
            } else if !task.status.is_terminal() {
                assert!(
                    needed.iter().all(|parent| parent.status == Success),
                    "it began before its parents succeeded: {task:?}"
                );
            }
        }
    }

    /// Lets every task succeed from now on. Every alive task must end.
    fn finish(&mut self) {
        // In each round at least the first alive task ends.
        for _ in 0..self.rows.len() {
            for n in 0..self.rows.len() {
                self.clock += 100_000;
                self.happen(n, &Event::Resumed);
                self.happen(n, &Event::RetryDue);
                self.execute(n, Ok(()));
                self.check();
            }
        }
        assert!(self.rows.iter().all(|task| task.status.is_terminal()), "{:?}", self.rows);
    }
}

fn is_bad(task: &Task) -> bool {
    matches!(task.status, Failure | Canceled)
}

fn graph() -> impl Strategy<Value = (usize, Vec<Edge>)> {
    let edges = prop::collection::btree_map((any::<usize>(), any::<usize>()), prop::bool::weighted(0.7), 0..24);
    (2usize..10, edges).prop_map(|(size, edges)| {
        let ends = |((a, b), required): ((usize, usize), bool)| {
            let (a, b) = (a % size, b % size);
            Edge { requires_success: required, ..edge(a.min(b), a.max(b)) }
        };
        let mut edges: Vec<Edge> = edges.into_iter().map(ends).filter(|edge| edge.parent != edge.child).collect();
        edges.sort_unstable_by_key(|edge| (edge.parent, edge.child));
        edges.dedup_by_key(|edge| (edge.parent, edge.child));
        (size, edges)
    })
}

#[test]
fn any_history_of_a_graph_keeps_the_invariants_and_can_end() {
    let steps = prop::collection::vec((any::<u8>(), any::<usize>(), any::<bool>()), 0..80);
    let (revived, ended_well) = (Cell::new(0), Cell::new(0));
    let mut runner = TestRunner::new(ProptestConfig::with_cases(1500));
    let outcome = runner.run(&(graph(), steps), |((size, edges), steps)| {
        let mut life = Life::new(size, edges);
        for step in steps {
            life.clock += 1000;
            revived.set(revived.get() + life.step(step));
            life.check();
        }
        life.clock += 1000;
        // Retry everything that failed by itself or was canceled, with the tasks that failed because of it.
        let bad = |task: &&Task| is_bad(task) && task.failure_type != Some(FailureType::Dependency);
        let targets: Vec<Uuid> = life.rows.iter().filter(bad).map(|task| task.id).collect();
        revived.set(revived.get() + life.retry(&targets, true));
        life.check();
        life.finish();
        ended_well.set(ended_well.get() + life.rows.iter().filter(|task| task.status == Success).count());
        Ok(())
    });
    outcome.unwrap();
    assert!(revived.get() > 500, "only {revived:?} tasks were revived");
    assert!(ended_well.get() > 5000, "only {ended_well:?} tasks ended well");
}
