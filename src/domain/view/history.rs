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
    /// How it came about: `automatic`, `manual`, or null for one that was no retry.
    #[schema(required, example = "automatic")]
    pub retry_type: Option<String>,
    /// Which instance had claimed it.
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
    /// Why it was or wasn't retried, and why with this delay.
    pub reason: String,
}

/// One move of a task.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TaskEvent {
    pub seq: i64,
    pub at: Timestamp,
    pub task_id: Uuid,
    pub batch_id: Uuid,
    pub kind: String,
    /// Null: it was created.
    #[schema(required)]
    pub from: Option<Status>,
    pub to: Status,
    #[schema(example = "report")]
    pub cause: String,
    /// A loop, `api`, or who asked for it.
    #[schema(example = "api")]
    pub actor: String,
    pub instance: Uuid,
    /// As it was after the move.
    pub run: i32,
    pub attempt: i16,
    /// More than the cause says, where there is more: what of the answer to `on_start` could not be taken, and why.
    #[schema(required)]
    pub reason: Option<String>,
}
