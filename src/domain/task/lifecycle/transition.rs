//! The results of decisions. Only the state machine makes a [`Transition`], and only a transition makes a [`Settled`].

use uuid::Uuid;

use super::cause::Cause;
use super::record::Attempt;
use crate::domain::task::Task;
use crate::domain::task::status::{Outcome, Status};

/// A change that `decide` allowed: the status and run before it, the task after it, and what to store along with it.
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
    /// Only the state machine calls this, after it has checked that the change is allowed.
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

    /// Returns the task after the change.
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

    /// Returns the slots that the task releases.
    pub fn freed(&self) -> &[i64] {
        &self.freed
    }

    /// Whether the task ends without success.
    pub fn ends_badly(&self) -> bool {
        self.task.status.outcome().is_some_and(|outcome| !outcome.is_success())
    }

    /// Returns the end of the task, which moves its children. `None` if the task does not end.
    pub fn settled(&self) -> Option<Settled> {
        let outcome = self.task.status.outcome()?;
        Some(Settled { id: self.task.id, outcome })
    }
}

/// A task that has ended. Only a transition to a terminal status makes one.
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

/// The notification that a transition sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    Success,
    Failure,
    Retry,
    Cancel,
}
