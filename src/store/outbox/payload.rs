//! The payload of a task's notification. The statements that insert it add `name`, `kind`, `scope` and `metadata`, which
//! a transition does not know; no other code may write its JSON.

use chrono::{DateTime, Utc};
use serde_json::json;
use uuid::Uuid;

use crate::domain::retry::failure::FailureType;
use crate::domain::task::lifecycle::{Notice, Transition};
use crate::domain::task::status::Status;
use crate::domain::view::Timestamp;

/// The payload of a notification.
pub(super) struct TaskState<'a> {
    pub task_id: Uuid,
    pub batch_id: Uuid,
    pub status: Status,
    pub trigger: Option<&'static str>,
    /// The attempt of the execution that the notification reports, not of the one that may follow.
    pub attempt: i16,
    /// The run of that execution.
    pub run: i32,
    pub max_retries: Option<i16>,
    pub next_retry_at: Option<DateTime<Utc>>,
    pub failure_type: Option<FailureType>,
    pub failure_reason: Option<&'a str>,
    pub ended_at: Option<DateTime<Utc>>,
}

impl TaskState<'_> {
    /// Builds the payload of a transition's notification.
    pub fn of(transition: &Transition) -> TaskState<'_> {
        let task = transition.task();
        TaskState {
            task_id: task.id,
            batch_id: task.batch_id,
            status: task.status,
            trigger: transition.notice().map(Notice::trigger),
            attempt: transition.attempt().map_or(task.attempt, |ended| ended.attempt),
            run: transition.from_run(),
            max_retries: task.retry.as_ref().map(|policy| policy.max_retries),
            next_retry_at: task.next_retry_at,
            failure_type: task.failure_type,
            failure_reason: task.failure_reason.as_deref(),
            ended_at: task.ended_at,
        }
    }

    pub fn to_json(&self) -> String {
        json!({
            "task_id": self.task_id,
            "batch_id": self.batch_id,
            "status": self.status,
            "trigger": self.trigger,
            "attempt": self.attempt,
            "run": self.run,
            "max_retries": self.max_retries,
            "will_retry": self.status == Status::RetryPending,
            "next_retry_at": self.next_retry_at.map(Timestamp),
            "failure_type": self.failure_type,
            "failure_reason": self.failure_reason,
            "ended_at": self.ended_at.map(Timestamp),
        })
        .to_string()
    }
}
