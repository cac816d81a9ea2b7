//! The history of a task as the API shows it: its attempts and events.

use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Timestamp;
use crate::domain::retry::failure::FailureType;
use crate::domain::task::status::Status;

/// One execution of a task.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = Attempt)]
pub struct AttemptView {
    pub run: i32,
    /// The retry counter during this execution.
    pub attempt: i16,
    /// `automatic` or `manual`; null if the execution was not a retry.
    #[schema(required, example = "automatic")]
    pub retry_type: Option<String>,
    /// The instance that had claimed the task.
    #[schema(required)]
    pub instance: Option<Uuid>,
    #[schema(required)]
    pub started_at: Option<Timestamp>,
    pub ended_at: Timestamp,
    /// `success`, `retried`, `deferred`, `failed`, `canceled` or `lost`.
    #[schema(example = "retried")]
    pub outcome: String,
    #[schema(required)]
    pub failure_type: Option<FailureType>,
    #[schema(required)]
    pub error: Option<String>,
    #[schema(required)]
    pub http_status: Option<i16>,
    /// The computed delay before the next execution, without jitter.
    #[schema(required)]
    pub delay_ms: Option<i64>,
    #[schema(required)]
    pub jitter_ms: Option<i64>,
    #[schema(required)]
    pub next_retry_at: Option<Timestamp>,
    /// Why the execution was or was not retried, and why after this delay.
    pub reason: String,
}

/// A status change of a task.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TaskEvent {
    pub seq: i64,
    pub at: Timestamp,
    pub task_id: Uuid,
    pub batch_id: Uuid,
    pub kind: String,
    /// Null for the creation of the task.
    #[schema(required)]
    pub from: Option<Status>,
    pub to: Status,
    #[schema(example = "report")]
    pub cause: String,
    /// Who made the change: a loop, the `requested_by` of a manual retry, the name of an API key, or `api`.
    #[schema(example = "api")]
    pub actor: String,
    pub instance: Uuid,
    /// The run after the change.
    pub run: i32,
    pub attempt: i16,
    /// More about the change, if there is more: which part of the answer to `on_start` was ignored, and why.
    #[schema(required)]
    pub reason: Option<String>,
}
