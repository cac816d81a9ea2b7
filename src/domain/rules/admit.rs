//! Admission: which candidates may start, given how full the slots of their rules are.

use std::collections::BTreeMap;

use super::Rule;

/// The executing tasks that match one matcher with one set of values: their number and their remaining work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    pub used: i64,
    pub load: i64,
}

/// The limits below which a slot must be for a task to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SlotLimit {
    pub slot: i64,
    pub max_tasks: Option<i32>,
    pub max_load: Option<i64>,
}

impl SlotLimit {
    pub fn is_open(&self, slot: Slot) -> bool {
        self.max_tasks.is_none_or(|max| slot.used < i64::from(max)) && self.max_load.is_none_or(|max| slot.load < max)
    }
}

/// Returns the limits of a task, one per slot, ordered by slot. Of several limits on one slot the lowest counts.
pub fn limits<'a>(rules: impl IntoIterator<Item = (&'a Rule, i64)>) -> Vec<SlotLimit> {
    fn lower<T: Ord + Copy>(limit: &mut Option<T>, max: T) {
        *limit = Some(limit.take().map_or(max, |limit| limit.min(max)));
    }
    let mut limits: BTreeMap<i64, SlotLimit> = BTreeMap::new();
    for (rule, slot) in rules {
        let limit = limits.entry(slot).or_insert(SlotLimit { slot, max_tasks: None, max_load: None });
        match rule {
            Rule::Concurrency { max, .. } => lower(&mut limit.max_tasks, *max),
            Rule::Capacity { max, .. } => lower(&mut limit.max_load, *max),
        }
    }
    limits.into_values().collect()
}

/// A task at the head of the queue or of its blocked group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Candidate {
    /// The slots that the task would occupy.
    pub takes: Vec<i64>,
    /// The work that the task has left.
    pub remaining: i64,
    pub limits: Vec<SlotLimit>,
}

/// Whether a candidate starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Starts,
    Blocked,
    /// The rules allow the task to start, but there is no room left in this round.
    Later,
}

/// Decides in order which candidates start: at most `room`, and each only if all its slots are below their limits
/// after the candidates before it have started. `slots` must hold every slot that a limit names, and is updated by the
/// starts.
pub fn admit(candidates: &[Candidate], slots: &mut BTreeMap<i64, Slot>, room: usize) -> Vec<Admission> {
    let mut started = 0;
    let mut admission = |candidate: &Candidate| {
        let current = |id: i64| slots.get(&id).copied().unwrap_or_default();
        if !candidate.limits.iter().all(|limit| limit.is_open(current(limit.slot))) {
            return Admission::Blocked;
        }
        if started == room {
            return Admission::Later;
        }
        started += 1;
        for id in &candidate.takes {
            let slot = slots.entry(*id).or_default();
            slot.used += 1;
            slot.load += candidate.remaining;
        }
        Admission::Starts
    };
    candidates.iter().map(&mut admission).collect()
}
