//! What the end of tasks does to the tasks that depend on them, for any number of tasks at once.

pub mod dead_end;

use std::collections::{BTreeMap, HashMap, HashSet};

use uuid::Uuid;

use chrono::TimeDelta;

use super::retry::failure::FailureType;
use super::task::Task;
use super::task::lifecycle::{Event, Moment, Settled, Transition, decide};
use super::task::status::Status;

/// A dependency. A child always comes after its parents, so there are no cycles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    pub parent: Uuid,
    pub child: Uuid,
    pub requires_success: bool,
}

/// Makes every transition that follows from `settled`. `edges` must hold the edges that leave a settled task or
/// a task that can be reached from one over required edges; `tasks` the locked rows of their children.
pub fn propagate(settled: &[Settled], edges: &[Edge], tasks: &[Task], moment: Moment) -> Vec<Transition> {
    let rows: HashMap<Uuid, &Task> = tasks.iter().map(|t| (t.id, t)).collect();
    let mut leaving: HashMap<Uuid, Vec<Edge>> = HashMap::new();
    for edge in edges {
        leaving.entry(edge.parent).or_default().push(*edge);
    }

    // First who falls: whatever waits, over required edges, for a task that ended badly.
    let mut doomed: HashSet<Uuid> = HashSet::new();
    let mut falling: Vec<Uuid> = settled.iter().filter(|s| !s.outcome().is_success()).map(|s| s.id()).collect();
    while let Some(parent) = falling.pop() {
        for edge in leaving.get(&parent).into_iter().flatten().filter(|e| e.requires_success) {
            let waits = rows.get(&edge.child).is_some_and(|t| matches!(t.status, Status::Waiting | Status::Paused));
            if waits && doomed.insert(edge.child) {
                falling.push(edge.child);
            }
        }
    }

    // Then how many of its parents each child has lost from its count, the fallen ones included.
    let mut counts: BTreeMap<Uuid, i32> = BTreeMap::new();
    for parent in settled.iter().map(|s| s.id()).chain(doomed.iter().copied()) {
        for edge in leaving.get(&parent).into_iter().flatten() {
            *counts.entry(edge.child).or_default() += 1;
        }
    }

    counts
        .into_iter()
        .filter_map(|(child, count)| {
            let event = Event::ParentsSettled { count, doomed: doomed.contains(&child) };
            decide(rows.get(&child)?, &event, moment).ok().flatten()
        })
        .collect()
}

/// What a retry by hand changes.
#[derive(Debug, Default)]
pub struct Revival {
    /// The tasks that were named, as far as there was anything to do.
    pub retried: Vec<Transition>,
    /// Tasks that had failed only because of them.
    pub revived: Vec<Transition>,
    /// Tasks that wait for them again.
    pub waiting: Vec<Transition>,
}

/// Why a named task cannot be retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRevival {
    /// Its own state does not allow it.
    Refused(Uuid),
    /// A parent whose success it needs has ended badly and is not being retried.
    Blocked { task: Uuid, parent: Uuid },
}

/// Retries `targets` and, with `cascade`, brings back what failed only because of them: tasks whose every required
/// parent is fine, open or itself coming back. `edges` must hold every edge that touches a target or a task that can
/// be reached from one over required edges; `tasks` the locked rows at both ends of them, in the order of their ids,
/// which goes from parents to children.
pub fn revive(
    targets: &[Uuid],
    cascade: bool,
    edges: &[Edge],
    tasks: &[Task],
    stuck_after: TimeDelta,
    moment: Moment,
) -> Result<Revival, NoRevival> {
    let rows: HashMap<Uuid, &Task> = tasks.iter().map(|t| (t.id, t)).collect();
    let targets: HashSet<Uuid> = targets.iter().copied().collect();
    let mut entering: HashMap<Uuid, Vec<Edge>> = HashMap::new();
    for edge in edges {
        entering.entry(edge.child).or_default().push(*edge);
    }
    let mut back: HashSet<Uuid> = HashSet::new();
    // Named, but retried by hand before: what is below them may not have come back then.
    let mut in_line: HashSet<Uuid> = HashSet::new();
    let mut revival = Revival::default();
    for task in tasks {
        let parents = entering.get(&task.id).map_or(&[][..], Vec::as_slice);
        let lost = parents.iter().find(|edge| {
            let ended_badly =
                rows.get(&edge.parent).is_some_and(|p| p.status.outcome().is_some_and(|outcome| !outcome.is_success()));
            edge.requires_success && ended_badly && !back.contains(&edge.parent)
        });
        let open = parents.iter().filter(|edge| {
            back.contains(&edge.parent) || rows.get(&edge.parent).is_some_and(|p| !p.status.is_terminal())
        });
        let wait_count = i32::try_from(open.count()).unwrap_or(i32::MAX);
        if targets.contains(&task.id) {
            let event = Event::RetriedByHand { wait_count, stuck_after };
            let decided = decide(task, &event, moment).map_err(|_| NoRevival::Refused(task.id))?;
            if let (Some(edge), Some(_)) = (lost, &decided) {
                return Err(NoRevival::Blocked { task: task.id, parent: edge.parent });
            }
            if let Some(transition) = decided {
                back.insert(task.id);
                revival.retried.push(transition);
            } else {
                in_line.insert(task.id);
            }
        } else if cascade && lost.is_none() && task.failure_type == Some(FailureType::Dependency) {
            let comes = |parent: &Uuid| back.contains(parent) || in_line.contains(parent);
            let among_back = parents.iter().any(|edge| edge.requires_success && comes(&edge.parent));
            let decided = decide(task, &Event::Revived { wait_count }, moment);
            if let (true, Ok(Some(transition))) = (among_back, decided) {
                back.insert(task.id);
                revival.revived.push(transition);
            }
        }
    }

    // Who had counted one of them as ended waits for it again.
    let mut reopened: BTreeMap<Uuid, i32> = BTreeMap::new();
    for edge in edges.iter().filter(|edge| back.contains(&edge.parent) && !back.contains(&edge.child)) {
        if rows.get(&edge.parent).is_some_and(|p| p.status.is_terminal()) {
            *reopened.entry(edge.child).or_default() += 1;
        }
    }
    let waits_again = |(child, count): (Uuid, i32)| {
        decide(rows.get(&child)?, &Event::ParentsReopened { count }, moment).ok().flatten()
    };
    revival.waiting = reopened.into_iter().filter_map(waits_again).collect();
    Ok(revival)
}

#[cfg(test)]
mod tests;
