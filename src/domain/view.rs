//! The shapes in which the API shows things. Filled by the store, serialized at the edge.

use std::collections::BTreeMap;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Serialize, Serializer};
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::retry::{FailureType, Policy};
use super::status::Status;
use super::webhook::Actions;

/// RFC 3339, UTC, always with microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ToSchema)]
#[schema(value_type = String, format = DateTime, example = "2026-01-31T12:00:00.000000Z")]
pub struct Timestamp(pub DateTime<Utc>);

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0.to_rfc3339_opts(SecondsFormat::Micros, true))
    }
}

impl From<DateTime<Utc>> for Timestamp {
    fn from(at: DateTime<Utc>) -> Timestamp {
        Timestamp(at)
    }
}

/// Anything the caller wants to keep with it.
#[derive(Debug, ToSchema)]
pub struct Metadata(#[allow(dead_code, reason = "only its shape is used")] BTreeMap<String, Value>);

/// A task in lists.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct BasicTask {
    pub id: Uuid,
    pub name: String,
    pub kind: String,
    pub status: Status,
    pub batch_id: Uuid,
    pub priority: i16,
    /// Retries so far.
    pub attempt: i16,
    /// Number of the current execution.
    pub run: i32,
    #[schema(required)]
    pub next_retry_at: Option<Timestamp>,
    pub success: i64,
    pub failures: i64,
    #[schema(required)]
    pub expected_count: Option<i32>,
    pub created_at: Timestamp,
    #[schema(required)]
    pub started_at: Option<Timestamp>,
    #[schema(required)]
    pub ended_at: Option<Timestamp>,
    pub dead_end_barrier: bool,
}

/// The whole task.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = Task)]
pub struct WholeTask {
    #[serde(flatten)]
    pub basic: BasicTask,
    /// Seconds without a sign of life after which it times out.
    pub timeout: i32,
    #[schema(value_type = Metadata)]
    pub metadata: Value,
    pub actions: Actions,
    pub last_updated: Timestamp,
    #[schema(required)]
    pub failure_reason: Option<String>,
    #[schema(required)]
    pub failure_type: Option<FailureType>,
    #[schema(required)]
    pub retry: Option<Policy>,
    pub deferrals: i32,
    /// Not started before this.
    #[schema(required)]
    pub run_at: Option<Timestamp>,
}

/// How many tasks of a batch are in which status.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct StatusCounts {
    pub waiting: i32,
    pub pending: i32,
    pub claimed: i32,
    pub running: i32,
    pub retry_pending: i32,
    pub paused: i32,
    pub success: i32,
    pub failure: i32,
    pub canceled: i32,
}

/// A batch in the list.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct BatchSummary {
    pub batch_id: Uuid,
    pub total_tasks: i32,
    pub first_created_at: Timestamp,
    /// When a task of the batch last changed its status.
    pub latest_updated_at: Timestamp,
    pub status_counts: StatusCounts,
    pub kinds: Vec<String>,
    #[schema(required)]
    pub scope: Option<String>,
    #[schema(value_type = Metadata)]
    pub metadata: Value,
}

/// One batch with its sums.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Batch {
    pub batch_id: Uuid,
    pub total_tasks: i32,
    /// Sum of the tasks' `success` counters.
    pub total_success: i64,
    pub total_failures: i64,
    pub total_expected: i64,
    pub status_counts: StatusCounts,
    #[schema(required)]
    pub scope: Option<String>,
    #[schema(value_type = Metadata)]
    pub metadata: Value,
    pub created_at: Timestamp,
    #[schema(required)]
    pub completed_at: Option<Timestamp>,
}

/// What stopping a batch did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct StoppedBatch {
    pub batch_id: Uuid,
    pub canceled_waiting: i32,
    pub canceled_pending: i32,
    pub canceled_claimed: i32,
    pub canceled_running: i32,
    pub canceled_retry_pending: i32,
    pub canceled_paused: i32,
    pub already_terminal: i32,
}

/// The tasks of a batch and what depends on what.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Dag {
    pub tasks: Vec<BasicTask>,
    pub links: Vec<Link>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Link {
    pub parent_id: Uuid,
    pub child_id: Uuid,
    pub requires_success: bool,
}

/// One notification of the outbox.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Delivery {
    pub id: i64,
    /// Null for a batch's own notifications.
    #[schema(required)]
    pub task_id: Option<Uuid>,
    pub batch_id: Uuid,
    #[schema(example = "end")]
    pub trigger: String,
    #[schema(example = "success")]
    pub condition: String,
    /// Of the task; for a batch, which completion this tells of.
    pub run: i32,
    pub url: String,
    pub status: DeliveryStatus,
    pub attempts: i32,
    /// The last HTTP status, if there was an answer.
    #[schema(required)]
    pub last_status: Option<i32>,
    #[schema(required)]
    pub last_error: Option<String>,
    #[schema(required)]
    pub next_attempt_at: Option<Timestamp>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeliveryStatus {
    Pending,
    Success,
    Exhausted,
}

impl DeliveryStatus {
    pub const fn as_str(self) -> &'static str {
        match self {
            DeliveryStatus::Pending => "pending",
            DeliveryStatus::Success => "success",
            DeliveryStatus::Exhausted => "exhausted",
        }
    }

    pub fn parse(text: &str) -> Option<DeliveryStatus> {
        [DeliveryStatus::Pending, DeliveryStatus::Success, DeliveryStatus::Exhausted]
            .into_iter()
            .find(|status| status.as_str().eq_ignore_ascii_case(text))
    }
}
