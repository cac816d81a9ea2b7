//! The shapes in which the API shows things. Filled by the store, serialized at the edge.

pub mod retry;

use std::collections::BTreeMap;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Serialize, Serializer};
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::admission::Rule;
use super::retry::failure::FailureType;
use super::retry::policy::Policy;
use super::task::Task;
use super::task::status::Status;
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
pub struct TaskSummary {
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
pub struct TaskDetails {
    #[serde(flatten)]
    pub basic: TaskSummary,
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
    #[schema(required, value_type = Option<retry::RetryPolicy>)]
    pub retry: Option<Policy>,
    /// Where the policy came from.
    #[schema(required)]
    pub retry_source: Option<RetrySource>,
    /// How often the other side said when to come back, which uses up no retry.
    pub deferrals: i32,
    /// Not started before this.
    #[schema(required)]
    pub run_at: Option<Timestamp>,
    /// What has to be so for it to start.
    pub rules: Vec<Rule>,
    /// Among equal priorities, keys take turns.
    #[schema(required)]
    pub fair_key: Option<String>,
}

impl TaskDetails {
    /// What a transition changes of what is shown.
    pub fn follow(&mut self, task: &Task, now: DateTime<Utc>) {
        if self.basic.run != task.run {
            // It was the answer to the run before.
            self.actions.cancel = None;
        }
        self.basic.status = task.status;
        self.basic.attempt = task.attempt;
        self.basic.run = task.run;
        self.basic.next_retry_at = task.next_retry_at.map(Timestamp);
        self.basic.started_at = task.started_at.map(Timestamp);
        self.basic.ended_at = task.ended_at.map(Timestamp);
        self.last_updated = Timestamp(now);
        self.failure_reason.clone_from(&task.failure_reason);
        self.failure_type = task.failure_type;
        self.deferrals = task.deferrals;
    }
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

/// What a change of rules did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ChangedRules {
    pub batch_id: Uuid,
    pub kind: String,
    /// Alive tasks of the kind, which have the rules now.
    pub updated_count: i32,
}

/// The tasks of a batch and what depends on what.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Dag {
    pub tasks: Vec<TaskSummary>,
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

/// Where the retry policy of a task came from: its own request, or the default of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RetrySource {
    Task,
    Kind,
}

impl RetrySource {
    pub const fn as_str(self) -> &'static str {
        match self {
            RetrySource::Task => "task",
            RetrySource::Kind => "kind",
        }
    }

    pub fn parse(text: &str) -> Option<RetrySource> {
        [RetrySource::Task, RetrySource::Kind].into_iter().find(|source| source.as_str() == text)
    }
}

/// A default retry policy.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct KindPolicy {
    pub kind: String,
    #[schema(value_type = retry::RetryPolicy)]
    pub retry: Policy,
    pub updated_at: Timestamp,
}

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

/// What retrying a task changed, or would change.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct RetriedTask {
    pub task: TaskDetails,
    /// Tasks that had failed only because of it and wait for it again.
    pub revived: Vec<Uuid>,
    pub dry_run: bool,
}

/// What retrying a batch changed, or would change.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct RetriedBatch {
    pub batch_id: Uuid,
    pub retried: Vec<Uuid>,
    pub revived: Vec<Uuid>,
    pub dry_run: bool,
}
