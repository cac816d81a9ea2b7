//! What a decision comes to. A [`Transition`] is made by the state machine alone; [`Settled`] only by a transition.

use uuid::Uuid;

use super::cause::Cause;
use super::record::Attempt;
use crate::domain::task::Task;
use crate::domain::task::status::{Outcome, Status};

/// A change that `decide` allowed: the row as it was, the row as it will be, and what goes with it.
#[derive(Clone, Debug)]
pub struct Transition {
    from: Status,
    from_run: i32,
    task: Task,
    cause: Cause,
    attempt: Option<Attempt>,
    notice: Option<Notice>,
    freed: Vec<i64>,
}

impl Transition {
    /// For the state machine alone, which has looked whether it may be.
    pub(super) fn new(before: &Task, after: Task, cause: Cause, attempt: Option<Attempt>) -> Transition {
        let notice = match after.status.outcome() {
            Some(Outcome::Success) => Some(Notice::Success),
            Some(Outcome::Failure) => Some(Notice::Failure),
            Some(Outcome::Canceled) if before.status.is_executing() => Some(Notice::Cancel),
            None if after.status == Status::RetryPending && before.status != Status::Paused => Some(Notice::Retry),
            Some(Outcome::Canceled) | None => None,
        };
        let freed = before.slots.iter().filter(|slot| !after.slots.contains(slot)).copied().collect();
        Transition { from: before.status, from_run: before.run, task: after, cause, attempt, notice, freed }
    }

    pub fn from(&self) -> Status {
        self.from
    }

    pub fn from_run(&self) -> i32 {
        self.from_run
    }

    /// The task as it will be.
    pub fn task(&self) -> &Task {
        &self.task
    }

    pub fn cause(&self) -> Cause {
        self.cause
    }

    pub fn attempt(&self) -> Option<&Attempt> {
        self.attempt.as_ref()
    }

    pub fn notice(&self) -> Option<Notice> {
        self.notice
    }

    /// The slots that it releases.
    pub fn freed(&self) -> &[i64] {
        &self.freed
    }

    /// The task ends, and not in success.
    pub fn ends_badly(&self) -> bool {
        self.task.status.outcome().is_some_and(|outcome| !outcome.is_success())
    }

    /// What this change tells the children, if it is one that may tell them anything.
    pub fn settled(&self) -> Option<Settled> {
        let outcome = self.task.status.outcome()?;
        Some(Settled { id: self.task.id, outcome })
    }
}

/// A task whose fate is final. Can only be had from a transition to a terminal status.
#[derive(Clone, Copy, Debug)]
pub struct Settled {
    id: Uuid,
    outcome: Outcome,
}

impl Settled {
    pub fn id(self) -> Uuid {
        self.id
    }

    pub fn outcome(self) -> Outcome {
        self.outcome
    }
}

/// A notification that goes with a transition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    Success,
    Failure,
    Retry,
    Cancel,
}
