use super::*;

use Status::{Claimed, RetryPending, Running};

const STUCK_AFTER: TimeDelta = TimeDelta::seconds(30);

/// A task that failed because of a parent.
fn failed_by_dependency(n: usize) -> Task {
    Task { failure_type: Some(FailureType::Dependency), claimed_run: None, started_at: None, ..row(n, Failure, 0) }
}

/// The number, new status and open parents of each changed task, in the order of the decisions.
type Moves = Vec<(usize, Status, i32)>;

#[derive(Debug, Default, PartialEq)]
struct Found {
    retried: Moves,
    revived: Moves,
    waiting: Moves,
}

fn moves(transitions: &[Transition]) -> Moves {
    let number = |task: &Task| usize::try_from(task.id.as_u128() - 100).unwrap();
    transitions.iter().map(|t| (number(t.task()), t.task().status, t.task().wait_count)).collect()
}

fn revived_with(targets: &[usize], cascade: bool, edges: &[Edge], rows: &[Task]) -> Result<Found, NoRevival> {
    let targets: Vec<Uuid> = targets.iter().copied().map(id).collect();
    let found = revive(&targets, cascade, edges, rows, STUCK_AFTER, moment(0))?;
    assert!(found.retried.iter().chain(&found.revived).chain(&found.waiting).all(|t| t.cause() == Cause::Manual));
    Ok(Found { retried: moves(&found.retried), revived: moves(&found.revived), waiting: moves(&found.waiting) })
}

fn revived(targets: &[usize], edges: &[Edge], rows: &[Task]) -> Result<Found, NoRevival> {
    revived_with(targets, true, edges, rows)
}

#[test]
fn a_retried_head_revives_its_chain() {
    let edges = [edge(0, 1), edge(1, 2), edge(2, 3)];
    for bad in [Failure, Canceled] {
        let rows = [row(0, bad, 0), failed_by_dependency(1), failed_by_dependency(2), failed_by_dependency(3)];
        let expected = Found {
            retried: vec![(0, Pending, 0)],
            revived: vec![(1, Waiting, 1), (2, Waiting, 1), (3, Waiting, 1)],
            waiting: vec![],
        };
        assert_eq!(revived(&[0], &edges, &rows), Ok(expected));
    }
    let rows = [row(0, Failure, 0), failed_by_dependency(1), failed_by_dependency(2), failed_by_dependency(3)];
    let targets = [id(0)];
    let found = revive(&targets, true, &edges, &rows, STUCK_AFTER, moment(0)).unwrap();
    for (before, after) in rows.iter().zip(found.retried.iter().chain(&found.revived)) {
        assert_eq!((after.task().id, after.task().run), (before.id, before.run + 1));
        assert_eq!((after.task().attempt, after.task().failure_type, after.task().ended_at), (0, None, None));
    }
}

#[test]
fn a_revived_diamond_waits_for_both_sides() {
    let edges = [edge(0, 1), edge(0, 2), edge(1, 3), edge(2, 3)];
    let rows = [row(0, Failure, 0), failed_by_dependency(1), failed_by_dependency(2), failed_by_dependency(3)];
    let found = revived(&[0], &edges, &rows).unwrap();
    assert_eq!(found.revived, [(1, Waiting, 1), (2, Waiting, 1), (3, Waiting, 2)]);
    // The other side has succeeded, or is still running.
    let rows = [row(0, Success, 0), row(1, Failure, 0), row(2, Success, 0), failed_by_dependency(3)];
    let expected = Found { retried: vec![(1, Pending, 0)], revived: vec![(3, Waiting, 1)], waiting: vec![] };
    assert_eq!(revived(&[1], &edges, &rows), Ok(expected));
    let rows = [row(0, Success, 0), row(1, Failure, 0), row(2, Running, 0), failed_by_dependency(3)];
    assert_eq!(revived(&[1], &edges, &rows).unwrap().revived, [(3, Waiting, 2)]);
}

#[test]
fn a_task_with_another_failed_parent_is_not_revived() {
    let edges = [edge(0, 2), edge(1, 2), edge(2, 3)];
    for bad in [Failure, Canceled] {
        let rows = [row(0, Failure, 0), row(1, bad, 0), failed_by_dependency(2), failed_by_dependency(3)];
        let alone = Found { retried: vec![(0, Pending, 0)], ..Found::default() };
        assert_eq!(revived(&[0], &edges, &rows), Ok(alone));
        // The task is revived once the other parent is open again.
        let rows = [row(0, Pending, 0), row(1, bad, 0), failed_by_dependency(2), failed_by_dependency(3)];
        assert_eq!(revived(&[1], &edges, &rows).unwrap().revived, [(2, Waiting, 2), (3, Waiting, 1)]);
    }
    // One that failed by itself is not the doing of the one above it.
    let edges = [optional(0, 1), edge(1, 2), edge(0, 2)];
    let rows = [row(0, Failure, 0), row(1, Failure, 0), failed_by_dependency(2)];
    assert_eq!(revived(&[0], &edges, &rows), Ok(Found { retried: vec![(0, Pending, 0)], ..Found::default() }));
}

#[test]
fn canceled_and_succeeded_children_are_not_revived() {
    let edges = [edge(0, 1), edge(1, 2), optional(0, 3), edge(3, 4)];
    let rows =
        [row(0, Failure, 0), row(1, Canceled, 0), failed_by_dependency(2), row(3, Success, 0), row(4, Success, 0)];
    assert_eq!(revived(&[0], &edges, &rows), Ok(Found { retried: vec![(0, Pending, 0)], ..Found::default() }));
}

#[test]
fn a_child_that_has_not_begun_waits_for_a_retried_parent() {
    let edges = [optional(0, 2), edge(1, 2)];
    for (status, wait_count) in [(Waiting, 1), (Paused, 1), (Paused, 0), (Pending, 0)] {
        let other = if wait_count == 0 { Success } else { Running };
        let child = Task { claimed_run: None, ..row(2, status, wait_count) };
        let rows = [row(0, Failure, 0), row(1, other, 0), child];
        let again = (2, status, i32::try_from(wait_count).unwrap() + 1);
        let expected = Found { retried: vec![(0, Pending, 0)], revived: vec![], waiting: vec![again] };
        assert_eq!(revived(&[0], &edges, &rows), Ok(expected));
    }
    for status in [Claimed, Running, RetryPending, Success, Failure, Canceled] {
        let rows = [row(0, Failure, 0), row(1, Success, 0), row(2, status, 0)];
        assert_eq!(revived(&[0], &edges, &rows).unwrap().waiting, [], "{status:?}");
    }
    let begun = Task { next_retry_at: Some(at(9)), ..row(2, Paused, 0) };
    let rows = [row(0, Failure, 0), row(1, Success, 0), begun];
    assert_eq!(revived(&[0], &edges, &rows).unwrap().waiting, []);
}

#[test]
fn a_child_waits_again_for_each_reopened_parent() {
    let edges = [edge(0, 1), optional(0, 3), optional(1, 3), optional(2, 3)];
    let rows = [row(0, Failure, 0), failed_by_dependency(1), row(2, Running, 0), row(3, Waiting, 1)];
    let expected =
        Found { retried: vec![(0, Pending, 0)], revived: vec![(1, Waiting, 1)], waiting: vec![(3, Waiting, 3)] };
    assert_eq!(revived(&[0], &edges, &rows), Ok(expected));
    let alone = Found { retried: vec![(0, Pending, 0)], revived: vec![], waiting: vec![(3, Waiting, 2)] };
    assert_eq!(revived_with(&[0], false, &edges, &rows), Ok(alone));
    // A child that is revived itself counts each parent once.
    let edges = [edge(0, 1), optional(0, 2), edge(1, 2)];
    let rows = [row(0, Failure, 0), failed_by_dependency(1), failed_by_dependency(2)];
    let expected =
        Found { retried: vec![(0, Pending, 0)], revived: vec![(1, Waiting, 1), (2, Waiting, 2)], waiting: vec![] };
    assert_eq!(revived(&[0], &edges, &rows), Ok(expected));
}

#[test]
fn children_do_not_count_an_open_task_twice() {
    for status in [RetryPending, Claimed, Running] {
        let edges = [optional(0, 1), edge(0, 2)];
        let rows = [row(0, status, 0), row(1, Waiting, 1), row(2, Waiting, 1)];
        assert_eq!(revived(&[0], &edges, &rows), Ok(Found { retried: vec![(0, Pending, 0)], ..Found::default() }));
    }
}

#[test]
fn a_retry_with_cascade_revives_tasks_that_failed_earlier() {
    // The first task was retried without cascade and is open.
    let edges = [edge(0, 1), edge(1, 2)];
    let both = vec![(1, Waiting, 1), (2, Waiting, 1)];
    for status in [RetryPending, Claimed, Running] {
        let rows = [row(0, status, 0), failed_by_dependency(1), failed_by_dependency(2)];
        let expected = Found { retried: vec![(0, Pending, 0)], revived: both.clone(), waiting: vec![] };
        assert_eq!(revived(&[0], &edges, &rows), Ok(expected), "{status:?}");
    }
    // The first task is still queued. A retry with cascade does more than the one without.
    let rows = [row(0, Failure, 0), failed_by_dependency(1), failed_by_dependency(2)];
    let once = revive(&[id(0)], false, &edges, &rows, STUCK_AFTER, moment(0)).unwrap();
    let rows = [once.retried[0].task().clone(), failed_by_dependency(1), failed_by_dependency(2)];
    let expected = Found { retried: vec![], revived: both, waiting: vec![] };
    assert_eq!(revived(&[0], &edges, &rows), Ok(expected));
    assert_eq!(revived_with(&[0], false, &edges, &rows), Ok(Found::default()));
}

#[test]
fn a_task_below_a_failed_parent_cannot_be_retried() {
    let edges = [edge(0, 1), edge(1, 2)];
    for bad in [Failure, Canceled] {
        for (target, parent) in [(1, 0), (2, 1)] {
            let rows = [row(0, bad, 0), failed_by_dependency(1), failed_by_dependency(2)];
            let blocked = Err(NoRevival::Blocked { task: id(target), parent: id(parent) });
            assert_eq!(revived(&[target], &edges, &rows), blocked);
            assert_eq!(revived_with(&[target], false, &edges, &rows), blocked);
        }
        // A task that was canceled itself is blocked as well.
        let rows = [row(0, bad, 0), row(1, Canceled, 0), failed_by_dependency(2)];
        assert_eq!(revived(&[1], &edges, &rows), Err(NoRevival::Blocked { task: id(1), parent: id(0) }));
        // The task can be retried together with its failed parent.
        let rows = [row(0, bad, 0), failed_by_dependency(1), failed_by_dependency(2)];
        let expected =
            Found { retried: vec![(0, Pending, 0), (1, Waiting, 1)], revived: vec![(2, Waiting, 1)], waiting: vec![] };
        assert_eq!(revived(&[1, 0], &edges, &rows), Ok(expected));
        // A task that does not require the success of its parent is not blocked.
        let rows = [row(0, bad, 0), row(1, Failure, 0)];
        assert_eq!(revived(&[1], &[optional(0, 1)], &rows).unwrap().retried, [(1, Pending, 0)]);
    }
    // The task waits for a parent that has been retried meanwhile, but not for one that has succeeded.
    for (parent, expected) in [(Running, (1, Waiting, 1)), (Waiting, (1, Waiting, 1)), (Success, (1, Pending, 0))] {
        let found =
            revived(&[1], &edges, &[row(0, parent, 1), failed_by_dependency(1), failed_by_dependency(2)]).unwrap();
        assert_eq!((found.retried, found.revived), (vec![expected], vec![(2, Waiting, 1)]), "{parent:?}");
    }
}

#[test]
fn without_cascade_only_the_target_is_retried() {
    let edges = [edge(0, 1), edge(1, 2)];
    let rows = [row(0, Failure, 0), failed_by_dependency(1), failed_by_dependency(2)];
    let expected = Found { retried: vec![(0, Pending, 0)], ..Found::default() };
    assert_eq!(revived_with(&[0], false, &edges, &rows), Ok(expected));
}

#[test]
fn several_targets_are_retried_at_once() {
    // A task that failed because of two parents is revived if both are retried. A target waits for a retried parent.
    let edges = [edge(0, 3), edge(1, 3), optional(0, 2), edge(2, 4), edge(3, 4)];
    let rows =
        [row(0, Failure, 0), row(1, Failure, 0), row(2, Failure, 0), failed_by_dependency(3), failed_by_dependency(4)];
    let expected = Found {
        retried: vec![(0, Pending, 0), (1, Pending, 0), (2, Waiting, 1)],
        revived: vec![(3, Waiting, 2), (4, Waiting, 2)],
        waiting: vec![],
    };
    assert_eq!(revived(&[2, 1, 0], &edges, &rows), Ok(expected), "in whatever order they are named");
    let some = Found { retried: vec![(0, Pending, 0), (2, Waiting, 1)], ..Found::default() };
    assert_eq!(revived(&[0, 2], &edges, &rows), Ok(some));
    assert_eq!(revived(&[], &edges, &rows), Ok(Found::default()));
}

#[test]
fn one_refused_target_refuses_the_whole_retry() {
    let edges = [edge(0, 1)];
    for status in [Success, Paused, Pending, Waiting] {
        let rows = [row(0, Failure, 0), failed_by_dependency(1), row(2, status, 0)];
        assert_eq!(revived(&[2], &edges, &rows), Err(NoRevival::Refused(id(2))), "{status:?}");
        assert_eq!(revived(&[0, 2], &edges, &rows), Err(NoRevival::Refused(id(2))), "{status:?}");
    }
    for status in [Claimed, Running] {
        let alive = Task { last_updated: at(-29), ..row(2, status, 0) };
        let rows = [row(0, Failure, 0), failed_by_dependency(1), alive];
        assert_eq!(revived(&[2], &edges, &rows), Err(NoRevival::Refused(id(2))), "{status:?} and not stuck");
    }
}

#[test]
fn a_repeated_retry_revives_nothing() {
    let edges = [edge(0, 1), optional(0, 2)];
    let rows = [row(0, Failure, 0), failed_by_dependency(1), row(2, Waiting, 1)];
    let once = revive(&[id(0)], true, &edges, &rows, STUCK_AFTER, moment(0)).unwrap();
    let after: Vec<Task> =
        once.retried.iter().chain(&once.revived).chain(&once.waiting).map(|t| t.task().clone()).collect();
    assert_eq!(after.len(), 3);
    assert_eq!(revived(&[0], &edges, &after), Ok(Found::default()));
    // A target that is already queued counts the parents that are retried with it.
    let queued = Task { manual_run: Some(sample::RUN), ..row(2, Waiting, 1) };
    let edges = [optional(0, 2), optional(1, 2)];
    let rows = [row(0, Failure, 0), row(1, Running, 0), queued];
    let expected = Found { retried: vec![(0, Pending, 0)], revived: vec![], waiting: vec![(2, Waiting, 2)] };
    assert_eq!(revived(&[0, 2], &edges, &rows), Ok(expected));
}

#[test]
fn ten_thousand_tasks_are_revived_quickly() {
    let edges: Vec<Edge> = (0..10_000).map(|n| edge(n, n + 1)).collect();
    let mut rows = vec![row(0, Failure, 0)];
    rows.extend((1..=10_000).map(failed_by_dependency));
    let began = Instant::now();
    assert_eq!(revived(&[0], &edges, &rows).unwrap().revived.len(), 10_000);
    let edges: Vec<Edge> = (0..10_000).map(|n| edge(n, 10_000)).collect();
    let mut rows: Vec<Task> = (0..10_000).map(|n| row(n, Failure, 0)).collect();
    rows.push(failed_by_dependency(10_000));
    let all: Vec<usize> = (0..10_000).collect();
    assert_eq!(revived(&all, &edges, &rows).unwrap().revived, [(10_000, Waiting, 10_000)]);
    assert!(began.elapsed() < QUICK, "{:?}", began.elapsed());
}
