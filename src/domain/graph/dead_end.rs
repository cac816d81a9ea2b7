//! Dead ends: tasks on which no alive task depends any more. The search goes upward from tasks that ended badly.

use std::collections::{BTreeMap, HashMap, HashSet};

use uuid::Uuid;

use crate::domain::task::Task;
use crate::domain::task::lifecycle::{Event, Moment, Transition, decide};

/// A dependency as seen from the child, required or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upward {
    pub child: Uuid,
    pub parent: Uuid,
    /// Whether a bad end of the child counts for the parent. False if the child is a barrier.
    pub tells: bool,
}

/// Counts, for each ancestor, the alive children that are ancestors themselves.
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

/// Cancels every ancestor that has no alive child and a child that ended badly, and then the ancestors above it.
///
/// `ended` are the tasks that ended badly and tell their parents. `ancestors` are the locked rows of all tasks that
/// may be canceled, and `links` must hold every link from `ended` and `ancestors` up to `ancestors`. `alive` holds the
/// number of alive children of each ancestor; where some of them are no ancestors, any number above that of
/// [`alive_among`] will do.
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
            // `alive` does not count the tasks in `ended` any more, but still counts those that are canceled here.
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
