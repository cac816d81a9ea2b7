//! What the end of tasks does to the tasks that depend on them, for any number of tasks at once.

use std::collections::{BTreeMap, HashMap, HashSet};

use uuid::Uuid;

use super::lifecycle::{Event, Moment, Settled, Transition, decide};
use super::status::Status;
use super::task::Task;

/// A dependency. Within a batch a child always comes after its parents, so there are no cycles.
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

#[cfg(test)]
#[path = "graph_tests.rs"]
mod tests;
