//! Downward: how the end of tasks changes their children.

use std::collections::{BTreeMap, HashMap, HashSet};

use uuid::Uuid;

use super::Edge;
use crate::domain::task::Task;
use crate::domain::task::lifecycle::{Event, Moment, Settled, Transition, decide};
use crate::domain::task::status::Status;

/// Returns every transition that follows from `settled`. `edges` must hold the edges that leave a settled task or a
/// task that can be reached from one over required edges. `tasks` must hold the locked rows of their children.
pub fn propagate(settled: &[Settled], edges: &[Edge], tasks: &[Task], moment: Moment) -> Vec<Transition> {
    let rows: HashMap<Uuid, &Task> = tasks.iter().map(|t| (t.id, t)).collect();
    let mut leaving: HashMap<Uuid, Vec<Edge>> = HashMap::new();
    for edge in edges {
        leaving.entry(edge.parent).or_default().push(*edge);
    }

    // First the doomed tasks: those that wait, over required edges, for a task that ended badly.
    let mut doomed: HashSet<Uuid> = HashSet::new();
    let mut ended_badly: Vec<Uuid> = settled.iter().filter(|s| !s.outcome().is_success()).map(|s| s.id()).collect();
    while let Some(parent) = ended_badly.pop() {
        for edge in leaving.get(&parent).into_iter().flatten().filter(|e| e.requires_success) {
            let waits = rows.get(&edge.child).is_some_and(|t| matches!(t.status, Status::Waiting | Status::Paused));
            if waits && doomed.insert(edge.child) {
                ended_badly.push(edge.child);
            }
        }
    }

    // Then the number of parents of each child that have ended, including the doomed ones.
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
