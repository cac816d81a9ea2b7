//! Manual retries: which tasks come back, and which of their descendants with them.

use std::collections::{BTreeMap, HashMap, HashSet};

use chrono::TimeDelta;
use uuid::Uuid;

use super::Edge;
use crate::domain::retry::failure::FailureType;
use crate::domain::task::Task;
use crate::domain::task::lifecycle::{Event, Moment, Transition, decide};

/// The changes of a manual retry.
#[derive(Debug, Default)]
pub struct Revival {
    /// The targets that change.
    pub retried: Vec<Transition>,
    /// Tasks that had failed only because of the targets.
    pub revived: Vec<Transition>,
    /// Tasks that wait for retried or revived tasks again.
    pub waiting: Vec<Transition>,
}

/// Why a target cannot be retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRevival {
    /// The state of the task does not allow a retry.
    Refused(Uuid),
    /// A parent whose success the task requires has ended badly and is not being retried.
    Blocked { task: Uuid, parent: Uuid },
}

/// Retries `targets`. With `cascade`, also revives the tasks that failed only because of them: those whose required
/// parents have all succeeded, are open, or are reopened themselves. `edges` must hold every edge that touches a target
/// or a task that can be reached from one over required edges. `tasks` must hold the locked rows at both ends of them,
/// ordered by id, which puts parents before children.
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
    // The tasks that are retried or revived.
    let mut reopened: HashSet<Uuid> = HashSet::new();
    // Targets that an earlier manual retry put in the queue. It may not have revived the tasks below them.
    let mut already_queued: HashSet<Uuid> = HashSet::new();
    let mut revival = Revival::default();
    for task in tasks {
        let parents = entering.get(&task.id).map_or(&[][..], Vec::as_slice);
        let bad_parent = parents.iter().find(|edge| {
            let ended_badly =
                rows.get(&edge.parent).is_some_and(|p| p.status.outcome().is_some_and(|outcome| !outcome.is_success()));
            edge.requires_success && ended_badly && !reopened.contains(&edge.parent)
        });
        let open = parents.iter().filter(|edge| {
            reopened.contains(&edge.parent) || rows.get(&edge.parent).is_some_and(|p| !p.status.is_terminal())
        });
        let wait_count = i32::try_from(open.count()).unwrap_or(i32::MAX);
        if targets.contains(&task.id) {
            let event = Event::RetriedManually { wait_count, stuck_after };
            let decided = decide(task, &event, moment).map_err(|_| NoRevival::Refused(task.id))?;
            if let (Some(edge), Some(_)) = (bad_parent, &decided) {
                return Err(NoRevival::Blocked { task: task.id, parent: edge.parent });
            }
            if let Some(transition) = decided {
                reopened.insert(task.id);
                revival.retried.push(transition);
            } else {
                already_queued.insert(task.id);
            }
        } else if cascade && bad_parent.is_none() && task.failure_type == Some(FailureType::Dependency) {
            let retries = |parent: &Uuid| reopened.contains(parent) || already_queued.contains(parent);
            let follows_a_retry = parents.iter().any(|edge| edge.requires_success && retries(&edge.parent));
            let decided = decide(task, &Event::Revived { wait_count }, moment);
            if let (true, Ok(Some(transition))) = (follows_a_retry, decided) {
                reopened.insert(task.id);
                revival.revived.push(transition);
            }
        }
    }

    // A child that had counted a reopened task as ended waits for it again.
    let mut open_again: BTreeMap<Uuid, i32> = BTreeMap::new();
    for edge in edges.iter().filter(|edge| reopened.contains(&edge.parent) && !reopened.contains(&edge.child)) {
        if rows.get(&edge.parent).is_some_and(|p| p.status.is_terminal()) {
            *open_again.entry(edge.child).or_default() += 1;
        }
    }
    let waits_again = |(child, count): (Uuid, i32)| {
        decide(rows.get(&child)?, &Event::ParentsReopened { count }, moment).ok().flatten()
    };
    revival.waiting = open_again.into_iter().filter_map(waits_again).collect();
    Ok(revival)
}
