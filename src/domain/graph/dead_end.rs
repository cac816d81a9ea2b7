//! Dead ends: tasks on which nothing alive depends any more, found upward from tasks that ended badly.

use std::collections::{BTreeMap, HashMap, HashSet};

use uuid::Uuid;

use crate::domain::task::Task;
use crate::domain::task::lifecycle::{Event, Moment, Transition, decide};

/// A dependency as seen from below, of whatever kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upward {
    pub child: Uuid,
    pub parent: Uuid,
    /// No barrier: the parent is told of a bad end.
    pub tells: bool,
}

/// How many children of each ancestor are alive as far as they are ancestors themselves.
pub fn alive_among(links: &[Upward], ancestors: &[Task]) -> BTreeMap<Uuid, i64> {
    let alive: HashSet<Uuid> = ancestors.iter().filter(|t| !t.status.is_terminal()).map(|t| t.id).collect();
    let mut counts: BTreeMap<Uuid, i64> = ancestors.iter().map(|task| (task.id, 0)).collect();
    for link in links.iter().filter(|link| alive.contains(&link.child)) {
        if let Some(count) = counts.get_mut(&link.parent) {
            *count += 1;
        }
    }
    counts
}

/// Cancels every ancestor of which a child has ended badly and none is alive, and then those above it. `ended` are the
/// tasks that ended badly and tell their parents so; `links` must hold what leads from those and from `ancestors` up
/// to `ancestors`, the locked rows of all who may be canceled. `alive` says how many children of each are alive; of one
/// that has others than ancestors among them any number will do that is more than the ancestors alone.
pub fn dead_ends(
    ended: &[Uuid],
    links: &[Upward],
    ancestors: &[Task],
    mut alive: BTreeMap<Uuid, i64>,
    moment: Moment,
) -> Vec<Transition> {
    let rows: HashMap<Uuid, &Task> = ancestors.iter().map(|t| (t.id, t)).collect();
    let mut above: HashMap<Uuid, Vec<Upward>> = HashMap::new();
    for link in links {
        above.entry(link.child).or_default().push(*link);
    }
    let mut told: HashSet<Uuid> = HashSet::new();
    let mut canceled: BTreeMap<Uuid, Transition> = BTreeMap::new();
    let mut ending: Vec<Uuid> = ended.to_vec();
    while let Some(child) = ending.pop() {
        for Upward { parent, tells, .. } in above.remove(&child).unwrap_or_default() {
            // One of `ended` is not among the alive any more; one that falls here was counted.
            if let (true, Some(count)) = (canceled.contains_key(&child), alive.get_mut(&parent)) {
                *count -= 1;
            }
            if tells {
                told.insert(parent);
            }
            let dead = told.contains(&parent) && alive.get(&parent) == Some(&0) && !canceled.contains_key(&parent);
            if let (true, Some(task)) = (dead, rows.get(&parent))
                && let Ok(Some(transition)) = decide(task, &Event::DeadEnd, moment)
            {
                canceled.insert(parent, transition);
                ending.push(parent);
            }
        }
    }
    canceled.into_values().collect()
}

#[cfg(test)]
#[path = "tests/dead_end.rs"]
mod tests;
