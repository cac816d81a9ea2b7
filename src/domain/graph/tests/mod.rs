use std::time::{Duration, Instant};

use proptest::prelude::*;

use std::collections::HashSet;

use chrono::TimeDelta;

use super::*;
use crate::domain::retry::failure::{FailureType, Trigger};
use crate::domain::sample::{self, at, failure, moment};
use crate::domain::task::Task;
use crate::domain::task::lifecycle::{Cause, Event, Report, Settled, Transition, decide};
use crate::domain::task::status::Status;

mod lives;
mod revive;

use Status::{Canceled, Failure, Paused, Pending, Success, Waiting};

fn id(n: usize) -> Uuid {
    Uuid::from_u128(100 + n as u128)
}

/// A required edge.
fn edge(parent: usize, child: usize) -> Edge {
    Edge { parent: id(parent), child: id(child), requires_success: true }
}

/// An edge that only requires the end of the parent.
fn optional(parent: usize, child: usize) -> Edge {
    Edge { requires_success: false, ..edge(parent, child) }
}

fn row(n: usize, status: Status, wait_count: usize) -> Task {
    Task { id: id(n), wait_count: i32::try_from(wait_count).unwrap(), ..sample::task(status) }
}

/// Ends a running task in this status.
fn settled(n: usize, status: Status) -> Settled {
    let event = match status {
        Success => Event::Reported(Report { run: None, result: Ok(()) }),
        Failure => {
            let invalid = failure(Trigger::Explicit, FailureType::ValidationError);
            Event::Reported(Report { run: None, result: Err(invalid) })
        }
        Canceled => Event::Canceled { reason: "canceled by ada".into() },
        other => panic!("{other:?} settles nothing"),
    };
    let running = Task { id: id(n), ..sample::task(Status::Running) };
    decide(&running, &event, moment(0)).unwrap().unwrap().settled().unwrap()
}

/// Returns the tasks that change, ordered by number: new status and open parents.
fn moved(settled: &[Settled], edges: &[Edge], rows: &[Task]) -> Vec<(usize, Status, i32)> {
    let mut found: Vec<(usize, Status, i32)> = propagate(settled, edges, rows, moment(0))
        .iter()
        .map(|t| {
            let n = usize::try_from(t.task().id.as_u128() - 100).unwrap();
            (n, t.task().status, t.task().wait_count)
        })
        .collect();
    found.sort_unstable_by_key(|(n, ..)| *n);
    found
}

#[test]
fn a_diamond_joins_when_both_sides_have_ended() {
    let edges = [edge(0, 1), edge(0, 2), edge(1, 3), edge(2, 3)];
    let rows = [row(1, Waiting, 1), row(2, Waiting, 1), row(3, Waiting, 2)];
    assert_eq!(moved(&[settled(0, Success)], &edges, &rows), [(1, Pending, 0), (2, Pending, 0)]);
    assert_eq!(moved(&[settled(1, Success)], &edges[2..3], &rows[2..]), [(3, Waiting, 1)]);
    assert_eq!(moved(&[settled(2, Success)], &edges[3..], &[row(3, Waiting, 1)]), [(3, Pending, 0)]);
    let both = [settled(1, Success), settled(2, Success)];
    assert_eq!(moved(&both, &edges[2..], &rows[2..]), [(3, Pending, 0)], "both in one call");
    for bad in [Failure, Canceled] {
        assert_eq!(moved(&[settled(0, bad)], &edges, &rows), [(1, Failure, 0), (2, Failure, 0), (3, Failure, 0)]);
    }
}

#[test]
fn a_child_that_requires_no_success_does_not_fail() {
    for bad in [Failure, Canceled] {
        let edges = [optional(0, 1), edge(0, 2), optional(2, 3), edge(2, 4), optional(4, 3)];
        let rows = [row(1, Waiting, 1), row(2, Waiting, 1), row(3, Waiting, 2), row(4, Waiting, 1)];
        let expected = [(1, Pending, 0), (2, Failure, 0), (3, Pending, 0), (4, Failure, 0)];
        assert_eq!(moved(&[settled(0, bad)], &edges, &rows), expected, "also below a failed parent");
    }
}

#[test]
fn a_failure_cascades_through_every_level() {
    let edges = [edge(0, 1), edge(1, 2), edge(2, 3), edge(3, 4)];
    let rows: Vec<Task> = (1..=4).map(|n| row(n, Waiting, 1)).collect();
    let failed = propagate(&[settled(0, Failure)], &edges, &rows, moment(0));
    assert_eq!(failed.len(), 4);
    for transition in failed {
        let task = transition.task();
        assert_eq!((task.status, task.ended_at, transition.cause()), (Failure, Some(at(0)), Cause::Dependency));
        assert_eq!(task.failure_type, Some(FailureType::Dependency));
        assert!(transition.settled().is_some());
    }
}

#[test]
fn a_success_releases_only_direct_children() {
    let edges = [edge(0, 1), edge(1, 2)];
    let rows = [row(1, Waiting, 1), row(2, Waiting, 1)];
    assert_eq!(moved(&[settled(0, Success)], &edges, &rows), [(1, Pending, 0)]);
}

#[test]
fn paused_children_count_parents_and_fail_with_them() {
    let edges = [edge(0, 1), edge(1, 2)];
    let rows = [row(1, Paused, 1), row(2, Paused, 2)];
    assert_eq!(moved(&[settled(0, Success)], &edges, &rows), [(1, Paused, 0)]);
    assert_eq!(moved(&[settled(0, Failure)], &edges, &rows), [(1, Failure, 0), (2, Failure, 1)]);
}

#[test]
fn a_terminal_child_does_not_change_or_propagate() {
    for over in [Success, Failure, Canceled] {
        let edges = [edge(0, 1), edge(1, 2)];
        let rows = [row(1, over, 1), row(2, Waiting, 1)];
        for now in [Success, Failure, Canceled] {
            assert_eq!(moved(&[settled(0, now)], &edges, &rows), [], "{over:?} below {now:?}");
        }
    }
}

#[test]
fn tasks_that_end_together_do_not_propagate_to_each_other() {
    // All tasks of a batch are canceled directly, so the rows of the children are already Canceled.
    let edges = [edge(0, 1), edge(1, 2)];
    let rows = [row(1, Canceled, 1), row(2, Canceled, 1)];
    let all = [settled(0, Canceled), settled(1, Canceled), settled(2, Canceled)];
    assert_eq!(moved(&all, &edges, &rows), []);
}

#[test]
fn one_failed_parent_fails_the_child() {
    let edges = [edge(0, 3), edge(1, 3), edge(2, 3), edge(3, 4), edge(2, 4)];
    let rows = [row(3, Waiting, 3), row(4, Waiting, 2)];
    let expected = [(3, Failure, 1), (4, Failure, 1)];
    assert_eq!(moved(&[settled(0, Success), settled(1, Failure)], &edges, &rows), expected);
    // The other parent ends later, after its child.
    assert_eq!(moved(&[settled(2, Success)], &edges, &[row(3, Failure, 1), row(4, Failure, 1)]), []);
}

#[test]
fn children_without_a_locked_row_do_not_change() {
    assert_eq!(moved(&[settled(0, Failure)], &[edge(0, 1)], &[]), []);
    assert_eq!(moved(&[], &[edge(0, 1)], &[row(1, Waiting, 1)]), []);
}

/// Far more time than work linear in the edges takes, and far less than quadratic work would take.
const QUICK: Duration = Duration::from_secs(5);

#[test]
fn a_chain_of_10_000_tasks_fails_quickly() {
    let edges: Vec<Edge> = (0..10_000).map(|n| edge(n, n + 1)).collect();
    let rows: Vec<Task> = (1..=10_000).map(|n| row(n, Waiting, 1)).collect();
    let began = Instant::now();
    let failed = propagate(&[settled(0, Failure)], &edges, &rows, moment(0));
    assert!(began.elapsed() < QUICK, "{:?}", began.elapsed());
    assert_eq!(failed.iter().filter(|t| t.task().status == Failure).count(), 10_000);
}

#[test]
fn ten_thousand_parents_of_one_child_are_counted_quickly() {
    let edges: Vec<Edge> = (0..10_000).map(|n| edge(n, 10_000)).collect();
    let parents: Vec<Settled> = (0..10_000).map(|n| settled(n, Success)).collect();
    let rows = [row(10_000, Waiting, 10_000)];
    let began = Instant::now();
    assert_eq!(moved(&parents[1..], &edges, &rows), [(10_000, Waiting, 1)]);
    assert_eq!(moved(&parents, &edges, &rows), [(10_000, Pending, 0)]);
    assert!(began.elapsed() < QUICK, "{:?}", began.elapsed());
}

/// A graph whose tasks end now, wait, or had ended before.
#[derive(Debug)]
struct World {
    /// The status and, if it is terminal, whether the task ends only now.
    tasks: Vec<(Status, bool)>,
    edges: Vec<(usize, usize, bool)>,
}

impl World {
    fn settles(&self, n: usize) -> bool {
        let (status, now) = self.tasks[n];
        status.is_terminal() && now
    }

    fn parents(&self, n: usize) -> impl Iterator<Item = (usize, bool)> + '_ {
        self.edges.iter().filter(move |(_, child, _)| *child == n).map(|(parent, _, required)| (*parent, *required))
    }

    fn open_parents(&self, n: usize) -> usize {
        self.parents(n).filter(|(p, _)| !self.tasks[*p].0.is_terminal() || self.settles(*p)).count()
    }

    /// Whether the task waits and a required parent ends badly now.
    fn fails(&self, n: usize) -> bool {
        let bad = |p: usize| self.fails(p) || self.settles(p) && self.tasks[p].0 != Success;
        matches!(self.tasks[n].0, Waiting | Paused) && self.parents(n).any(|(p, required)| required && bad(p))
    }

    fn expected(&self) -> Vec<(usize, Status, i32)> {
        let change = |n: usize| {
            let ended = self.parents(n).filter(|(p, _)| self.settles(*p) || self.fails(*p)).count();
            let open = i32::try_from(self.open_parents(n) - ended).unwrap();
            match self.tasks[n].0 {
                Waiting | Paused if ended == 0 => None,
                Waiting | Paused if self.fails(n) => Some((n, Failure, open)),
                Waiting if open == 0 => Some((n, Pending, 0)),
                alive @ (Waiting | Paused) => Some((n, alive, open)),
                _ => None,
            }
        };
        (0..self.tasks.len()).filter_map(change).collect()
    }
}

fn world() -> impl Strategy<Value = World> {
    let status =
        prop_oneof![3 => Just(Waiting), 1 => Just(Paused), 2 => Just(Success), 2 => Just(Failure), 1 => Just(Canceled)];
    let tasks = prop::collection::vec((status, prop::bool::weighted(0.7)), 2..14);
    let edges = prop::collection::btree_map((any::<usize>(), any::<usize>()), prop::bool::weighted(0.7), 0..40);
    (tasks, edges).prop_map(|(tasks, edges)| {
        let size = tasks.len();
        let ends =
            |((a, b), required): ((usize, usize), bool)| ((a % size).min(b % size), (a % size).max(b % size), required);
        let mut edges: Vec<(usize, usize, bool)> = edges.into_iter().map(ends).filter(|(a, b, _)| a < b).collect();
        edges.sort_unstable();
        edges.dedup_by_key(|(a, b, _)| (*a, *b));
        World { tasks, edges }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_graph_propagates_as_the_definition_says(world in world()) {
        let edges: Vec<Edge> = world
            .edges
            .iter()
            .map(|(parent, child, requires_success)| Edge { requires_success: *requires_success, ..edge(*parent, *child) })
            .collect();
        let rows: Vec<Task> =
            (0..world.tasks.len()).map(|n| row(n, world.tasks[n].0, world.open_parents(n))).collect();
        let now: Vec<Settled> =
            (0..world.tasks.len()).filter(|n| world.settles(*n)).map(|n| settled(n, world.tasks[n].0)).collect();
        prop_assert_eq!(moved(&now, &edges, &rows), world.expected());
    }
}
