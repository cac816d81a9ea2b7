//! Requests that the state of a task does not allow: which rule they break, and what would make them work.

use chrono::{DateTime, SecondsFormat, Utc};
use uuid::Uuid;

use crate::domain::task::status::Status;

/// Why the state of a task does not allow a request. Stable: programs compare it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConflictCode {
    /// The request names a run that is over.
    RunIsOver,
    /// The request names a run that the task has not reached.
    RunNotReached,
    /// The task has ended.
    TaskHasEnded,
    /// No worker has the task: only a Claimed or Running task takes a report.
    NotExecuting,
    /// The task is Claimed or Running, so it cannot be paused.
    Executing,
    /// The task is executing and had a recent heartbeat, so it cannot be retried.
    NotStuck,
    /// The task is paused, so it cannot be retried.
    Paused,
    /// The task has not failed, so it cannot be retried.
    NotFailed,
    /// A parent whose success the task requires has ended badly.
    ParentFailed,
}

/// A request that the state of a task does not allow.
#[derive(Debug)]
pub struct Conflict {
    pub code: ConflictCode,
    pub detail: String,
    pub status: Status,
    pub run: i32,
}

/// The operation that a conflict prevents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Read,
    Report,
    Heartbeat,
    Cancel,
    Pause,
    Resume,
}

impl Conflict {
    /// The conflict of an operation with the status and run of a task. `run` is the run that the request names.
    pub fn new(operation: Operation, status: Status, current: i32, run: Option<i32>) -> Conflict {
        let (code, detail) = match run {
            Some(run) if run < current => (
                ConflictCode::RunIsOver,
                format!("run {run} is over: the task is {status:?} at run {current}; drop the work of run {run}"),
            ),
            Some(run) if run > current => (
                ConflictCode::RunNotReached,
                format!("the task has not reached run {run}: it is {status:?} at run {current}"),
            ),
            _ => explain(operation, status),
        };
        Conflict { code, detail, status, run: current }
    }

    /// The conflict of a manual retry with the state of a task, or of the parent that `blocked_by` names.
    pub fn of_retry(
        task: Uuid,
        status: Status,
        run: i32,
        blocked_by: Option<Uuid>,
        stuck_at: DateTime<Utc>,
    ) -> Conflict {
        let (code, detail) = match (blocked_by, status) {
            (Some(parent), _) => (
                ConflictCode::ParentFailed,
                format!("task {task} needs the success of task {parent}, which ended badly: retry task {parent}"),
            ),
            (None, Status::Claimed | Status::Running) => {
                let at = stuck_at.to_rfc3339_opts(SecondsFormat::Secs, true);
                let hint = format!("without a heartbeat, it counts as stuck from {at} and can then be retried");
                (ConflictCode::NotStuck, format!("task {task} is {status:?} and not stuck: {hint}"))
            }
            (None, Status::Paused) => {
                (ConflictCode::Paused, format!("task {task} is Paused: resume it with PATCH /task/resume/{task}"))
            }
            (None, _) => (
                ConflictCode::NotFailed,
                format!(
                    "task {task} is {status:?}: only a task in Failure, Canceled or RetryPending, or a stuck one, can \
                     be retried"
                ),
            ),
        };
        Conflict { code, detail, status, run }
    }
}

fn explain(operation: Operation, status: Status) -> (ConflictCode, String) {
    if status.is_terminal() {
        let hint = match operation {
            Operation::Cancel => "an ended task cannot be canceled",
            Operation::Pause | Operation::Resume => "an ended task cannot be paused or resumed",
            Operation::Read | Operation::Report | Operation::Heartbeat => {
                "its result is final unless it is retried with POST /task/{id}/retry"
            }
        };
        return (ConflictCode::TaskHasEnded, format!("the task has ended in {status:?}: {hint}"));
    }
    match operation {
        Operation::Pause => (
            ConflictCode::Executing,
            format!("the task is {status:?}: only a Pending, Waiting or RetryPending task can be paused"),
        ),
        Operation::Read | Operation::Report | Operation::Heartbeat | Operation::Cancel | Operation::Resume => (
            ConflictCode::NotExecuting,
            format!(
                "the task is {status:?}: a report needs a Claimed or Running task, or the run that its last worker got"
            ),
        ),
    }
}
