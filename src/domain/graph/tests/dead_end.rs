use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::domain::sample::{self, at, moment};
use crate::domain::task::lifecycle::Cause;
use crate::domain::task::status::Status;

use Status::{Canceled, Claimed, Failure, Paused, Pending, RetryPending, Running, Success, Waiting};

const NONE: [usize; 0] = [];

fn id(n: usize) -> Uuid {
    Uuid::from_u128(100 + n as u128)
}

fn row(n: usize, status: Status) -> Task {
    Task { id: id(n), ..sample::task(status) }
}

fn link(child: usize, parent: usize) -> Upward {
    Upward { child: id(child), parent: id(parent), tells: true }
}

/// A link from a barrier.
fn barrier_link(child: usize, parent: usize) -> Upward {
    Upward { tells: false, ..link(child, parent) }
}

/// Returns the canceled tasks. `others` are the alive children of each ancestor that are no ancestors.
fn canceled(ended: &[usize], links: &[Upward], ancestors: &[Task], others: &[(usize, i64)]) -> Vec<usize> {
    let ended: Vec<Uuid> = ended.iter().map(|n| id(*n)).collect();
    let mut alive = alive_among(links, ancestors);
    for (n, more) in others {
        *alive.get_mut(&id(*n)).unwrap() += more;
    }
    let found = dead_ends(&ended, links, ancestors, alive, moment(0));
    for transition in &found {
        let task = transition.task();
        assert_eq!((task.status, task.ended_at, transition.cause()), (Canceled, Some(at(0)), Cause::DeadEnd));
    }
    found.iter().map(|t| usize::try_from(t.task().id.as_u128() - 100).unwrap()).collect()
}

#[test]
fn a_task_is_canceled_when_its_last_alive_child_fails() {
    for alive in [Waiting, Pending, Claimed, Running, RetryPending, Paused] {
        assert_eq!(canceled(&[1], &[link(1, 0)], &[row(0, alive)], &[]), [0], "{alive:?}");
        assert_eq!(canceled(&[1], &[link(1, 0)], &[row(0, alive)], &[(0, 1)]), NONE, "{alive:?} with another child");
    }
    // The task ended while another transaction waited for its row.
    for over in [Success, Failure, Canceled] {
        assert_eq!(canceled(&[1], &[link(1, 0)], &[row(0, over)], &[]), NONE, "{over:?}");
    }
}

#[test]
fn dead_ends_go_up_until_a_task_has_another_alive_child() {
    // 4 → 3 → 2 → 1 → 0, and 2 has one more.
    let links = [link(4, 3), link(3, 2), link(2, 1), link(1, 0)];
    let rows: Vec<Task> = (0..4).map(|n| row(n, Waiting)).collect();
    assert_eq!(canceled(&[4], &links, &rows, &[]), [0, 1, 2, 3]);
    assert_eq!(canceled(&[4], &links, &rows, &[(2, 1)]), [3]);
    assert_eq!(canceled(&[4], &links, &rows, &[(0, 1)]), [1, 2, 3]);
    assert_eq!(canceled(&[4], &links, &rows, &[(3, 1)]), NONE);
}

#[test]
fn a_diamond_is_canceled_when_both_sides_are() {
    let links = [link(3, 1), link(3, 2), link(1, 0), link(2, 0)];
    let rows = [row(0, Running), row(1, Waiting), row(2, Waiting)];
    assert_eq!(canceled(&[3], &links, &rows, &[]), [0, 1, 2]);
    assert_eq!(canceled(&[3], &links, &rows, &[(2, 1)]), [1], "the other side is alive");
}

#[test]
fn a_barrier_is_canceled_without_telling_its_parents() {
    let links = [link(2, 1), barrier_link(1, 0)];
    let rows = [row(0, Running), row(1, Waiting)];
    assert_eq!(canceled(&[2], &links, &rows, &[]), [1]);
    // It still counts as ended for a parent that is told by another child.
    let links = [link(2, 1), barrier_link(1, 0), link(3, 0)];
    assert_eq!(canceled(&[2, 3], &links, &rows, &[]), [0, 1]);
    assert_eq!(canceled(&[3, 2], &links, &rows, &[]), [0, 1], "in whatever order");
    assert_eq!(canceled(&[3], &links, &rows, &[(1, 1)]), NONE, "the barrier is alive");
}

#[test]
fn ancestors_without_a_locked_row_do_not_change() {
    assert_eq!(canceled(&[1], &[link(1, 0)], &[], &[]), NONE);
    assert_eq!(dead_ends(&[id(1)], &[link(1, 0)], &[row(0, Running)], BTreeMap::new(), moment(0)).len(), 0);
}

#[test]
fn a_ladder_of_10_000_tasks_is_canceled_quickly() {
    let rungs = 10_000;
    let links: Vec<Upward> = (2..rungs).flat_map(|n| [link(n, n - 1), link(n, n - 2)]).chain([link(1, 0)]).collect();
    let rows: Vec<Task> = (0..rungs - 1).map(|n| row(n, Waiting)).collect();
    let began = Instant::now();
    assert_eq!(canceled(&[rungs - 1], &links, &rows, &[]).len(), rungs - 1);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

/// The ended tasks, the links above them, the ancestors, and the number of their alive children that are no ancestors.
type Seen = (Vec<usize>, Vec<Upward>, Vec<Task>, Vec<(usize, i64)>);

/// A graph in which some tasks end badly now.
#[derive(Debug)]
struct World {
    /// The status, and whether the task is a barrier. A task with status Failure ends now.
    tasks: Vec<(Status, bool)>,
    /// Child and parent.
    links: Vec<(usize, usize)>,
}

impl World {
    /// Applies the definition literally, again and again, until nothing changes.
    fn expected(&self) -> Vec<usize> {
        let mut over: Vec<bool> = self.tasks.iter().map(|(status, _)| status.is_terminal()).collect();
        let mut bad: Vec<bool> = self.tasks.iter().map(|(status, _)| *status == Failure).collect();
        loop {
            let dead = (0..self.tasks.len()).find(|n| {
                let children = || self.links.iter().filter(|(_, parent)| parent == n).map(|(child, _)| *child);
                !over[*n] && children().all(|c| over[c]) && children().any(|c| bad[c] && !self.tasks[c].1)
            });
            let Some(n) = dead else { break };
            (over[n], bad[n]) = (true, true);
        }
        (0..self.tasks.len()).filter(|n| bad[*n] && self.tasks[*n].0 != Failure).collect()
    }

    /// Returns what the store would load: the tasks that can be reached upward over tasks that tell their parents.
    fn seen(&self) -> Seen {
        let ended: Vec<usize> =
            (0..self.tasks.len()).filter(|n| self.tasks[*n].0 == Failure && !self.tasks[*n].1).collect();
        let alive = |n: usize| !self.tasks[n].0.is_terminal();
        let mut up: Vec<usize> = ended.clone();
        let mut at = 0;
        while let Some(n) = up.get(at).copied() {
            at += 1;
            for (_, parent) in self.links.iter().filter(|(child, parent)| *child == n && alive(*parent)) {
                if !self.tasks[n].1 && !up.contains(parent) {
                    up.push(*parent);
                }
            }
        }
        let reached = self.links.iter().filter(|(child, parent)| up.contains(child) && alive(*parent));
        let links =
            reached.map(
                |(child, parent)| {
                    if self.tasks[*child].1 { barrier_link(*child, *parent) } else { link(*child, *parent) }
                },
            );
        let ancestors: Vec<usize> = up.iter().copied().filter(|n| alive(*n)).collect();
        let other = |(child, parent): &&(usize, usize)| {
            alive(*child) && !ancestors.contains(child) && ancestors.contains(parent)
        };
        let others = self.links.iter().filter(other).map(|(_, parent)| (*parent, 1)).collect();
        (ended, links.collect(), ancestors.iter().map(|n| row(*n, self.tasks[*n].0)).collect(), others)
    }
}

fn world() -> impl Strategy<Value = World> {
    let status = prop_oneof![4 => Just(Waiting), 1 => Just(Running), 1 => Just(Success), 3 => Just(Failure)];
    let tasks = prop::collection::vec((status, prop::bool::weighted(0.2)), 2..12);
    let links = prop::collection::btree_set((any::<usize>(), any::<usize>()), 1..24);
    (tasks, links).prop_map(|(tasks, links)| {
        let size = tasks.len();
        let mut links: Vec<(usize, usize)> = links
            .into_iter()
            .map(|(a, b)| ((a % size).max(b % size), (a % size).min(b % size)))
            .filter(|(child, parent)| child != parent)
            .collect();
        links.sort_unstable();
        links.dedup();
        World { tasks, links }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn any_graph_has_dead_ends_as_the_definition_says(world in world()) {
        let (ended, links, ancestors, others) = world.seen();
        prop_assert_eq!(canceled(&ended, &links, &ancestors, &others), world.expected());
    }
}
