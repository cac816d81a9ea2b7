//! The shapes of requests for the API description, and for nothing else: the readers beside this file parse bodies field by
//! field, to report every problem at once. The shapes stand here so that a new field is added in one folder: to its
//! shape, its struct and its reader. A test compares shapes and readers.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::domain::retry::failure::Trigger;
use crate::domain::task::status::Status;
use crate::domain::view::Metadata;
use crate::domain::view::retry::{StrategyName, WrittenDelay};
use crate::domain::webhook::Action;

/// A batch: the tasks alone, or with what concerns them together.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum CreateTasks {
    Tasks(Vec<NewTask>),
    Batch(NewBatch),
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewBatch {
    pub tasks: Vec<NewTask>,
    /// Called when nothing in the batch is alive any more.
    pub on_batch_complete: Option<Vec<Action>>,
    #[schema(min_length = 1, max_length = 255)]
    pub scope: Option<String>,
    #[schema(value_type = Option<Metadata>)]
    pub metadata: Option<Value>,
    /// The `fair_key` of tasks that have none of their own.
    #[schema(min_length = 1, max_length = 255)]
    pub fair_key: Option<String>,
    /// Whether tasks of the batch are canceled when nothing alive depends on them after a bad end. Absent: as
    /// `DEAD_END_CANCEL` says.
    pub dead_end_cancel: Option<bool>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewTask {
    /// A name inside the batch, for dependencies.
    #[schema(min_length = 1, max_length = 255)]
    pub id: Option<String>,
    #[schema(min_length = 1, max_length = 255)]
    pub name: String,
    #[schema(min_length = 1, max_length = 100)]
    pub kind: String,
    /// Seconds, counted from the last sign of life.
    #[schema(minimum = 1, maximum = 86400, default = 60)]
    pub timeout: Option<i32>,
    /// At most 64 KiB.
    #[schema(value_type = Option<Metadata>)]
    pub metadata: Option<Value>,
    /// Higher first.
    #[schema(minimum = -1000, maximum = 1000, default = 0)]
    pub priority: Option<i16>,
    /// Called to start the task. Without it the task is Running once claimed.
    pub on_start: Option<Action>,
    pub on_success: Option<Vec<Action>>,
    pub on_failure: Option<Vec<Action>>,
    /// Called for each retry or deferral that is scheduled.
    pub on_retry: Option<Vec<Action>>,
    pub dependencies: Option<Vec<NewDependency>>,
    /// Not created if one of these finds a task that is there already.
    #[schema(max_items = 10)]
    pub dedupe_strategy: Option<Vec<NewMatcher>>,
    #[schema(minimum = 0)]
    pub expected_count: Option<i32>,
    /// The canceling of dead ends goes no further up than this task.
    #[schema(default = false)]
    pub dead_end_barrier: Option<bool>,
    pub retry: Option<NewRetry>,
    /// Not started before this.
    pub run_at: Option<DateTime<Utc>>,
    /// What has to be so for it to start; all of them have to pass.
    #[schema(max_items = 10)]
    pub rules: Option<Vec<NewRule>>,
    /// For example a tenant: among tasks of equal priority, keys take turns.
    #[schema(min_length = 1, max_length = 255)]
    pub fair_key: Option<String>,
}

/// Lets the task start only while those that match leave room. `max_concurency` and `Concurency` may be written with two
/// r as well.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", deny_unknown_fields)]
#[schema(examples(
    json!({"type": "Concurency", "max_concurency": 3, "matcher": {"kind": "import", "fields": ["tenant"]}}),
    json!({"type": "Capacity", "max_capacity": 1000, "matcher": {"kind": "import", "fields": []}}),
))]
pub enum NewRule {
    /// So many tasks that match execute at once at most.
    #[serde(rename = "Concurency")]
    Concurrency {
        #[schema(minimum = 1)]
        max_concurency: i32,
        matcher: NewRuleMatcher,
    },
    /// The tasks that match and execute have together less than this to do: `expected_count − success − failures`.
    Capacity {
        #[schema(minimum = 1)]
        max_capacity: i64,
        matcher: NewRuleMatcher,
    },
}

/// Tasks of a kind with the same values in these metadata fields as the task that carries the rule.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewRuleMatcher {
    /// The task's own kind by default.
    #[schema(min_length = 1, max_length = 100)]
    pub kind: Option<String>,
    /// Running, which counts Claimed tasks too.
    #[schema(value_type = Option<String>, example = "Running")]
    pub status: Option<String>,
    #[schema(max_items = 20)]
    pub fields: Option<Vec<String>>,
}

/// Rules for the alive tasks of a kind.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewRules {
    #[schema(min_length = 1, max_length = 100)]
    pub kind: String,
    #[schema(max_items = 10)]
    pub rules: Vec<NewRule>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewDependency {
    /// The `id` of a task that appears earlier in the batch.
    #[schema(min_length = 1, max_length = 255)]
    pub id: String,
    #[schema(default = true)]
    pub requires_success: Option<bool>,
}

/// Finds tasks of one kind and status whose metadata has the same values as that of the new task in the fields that
/// are named.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(examples(json!({"fields": ["order"]}), json!({"kind": "import", "status": "Pending", "fields": ["a", "b"]})))]
pub struct NewMatcher {
    /// The task's own kind by default.
    #[schema(min_length = 1, max_length = 100)]
    pub kind: Option<String>,
    /// Absent: any in which a task is alive.
    pub status: Option<Status>,
    /// Names of fields at the top of the metadata. The new task must have them.
    #[schema(max_items = 20)]
    pub fields: Option<Vec<String>>,
}

/// How failures are retried. Absent: as the kind's default says, or not at all; null: not at all.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(examples(
    json!({"max_retries": 3, "strategy": "immediate", "jitter_ms": 0}),
    json!({"max_retries": 5, "strategy": "exponential_backoff", "initial_delay_secs": 10, "backoff_multiplier": 3.0,
           "max_delay_secs": 600, "retry_on_status": ["5xx", "429"], "no_retry_on_status": ["501"]}),
    json!({"max_retries": 10, "strategy": "fixed_delay", "delay_secs": 60, "expires_after_secs": 3600}),
    json!({"max_retries": 4, "strategy": "custom", "schedule": [{"secs": 30}, {"hours": 2}, {"days": 1}],
           "retry_on": ["timeout", "explicit"]}),
))]
pub struct NewRetry {
    /// Retries after the first execution; at most `RETRY_MAX_RETRIES_LIMIT`.
    #[schema(minimum = 1)]
    pub max_retries: i16,
    pub strategy: Option<StrategyName>,
    /// With `exponential_backoff`: the first delay.
    #[schema(minimum = 1, default = 5)]
    pub initial_delay_secs: Option<u64>,
    /// With `exponential_backoff`: each further delay is this many times longer.
    #[schema(minimum = 1.0, default = 2.0)]
    pub backoff_multiplier: Option<f64>,
    /// With `exponential_backoff`: no delay is longer; at most `RETRY_MAX_DELAY_LIMIT`.
    #[schema(minimum = 1, default = 300)]
    pub max_delay_secs: Option<u64>,
    /// With `fixed_delay`: the delay; at most `RETRY_MAX_DELAY_LIMIT`.
    #[schema(minimum = 1)]
    pub delay_secs: Option<u64>,
    /// With `custom`: one delay per retry, the last one repeats; at most `RETRY_MAX_SCHEDULE_DELAY_SECS` each.
    #[schema(min_items = 1, max_items = 1000)]
    pub schedule: Option<Vec<WrittenDelay>>,
    /// Up to this many random milliseconds are added to each delay.
    #[schema(minimum = 0, default = 500)]
    pub jitter_ms: Option<u64>,
    /// Which failures are retried at all.
    #[schema(min_items = 1)]
    pub retry_on: Option<Vec<Trigger>>,
    /// HTTP statuses (`"429"`) or classes (`"5xx"`) of `on_start` answers that are retried whatever their type.
    pub retry_on_status: Option<Vec<String>>,
    /// The same for answers that are not retried. The more exact pattern wins.
    pub no_retry_on_status: Option<Vec<String>>,
    /// No retry is scheduled later than this long after the task was created.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub expires_after_secs: Option<u64>,
}

/// A retry by hand.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RetryRequest {
    /// Who wants it, for the audit trail.
    #[schema(min_length = 1, max_length = 255)]
    pub requested_by: Option<String>,
    /// Bring back what failed only because of it.
    #[schema(default = true)]
    pub cascade: Option<bool>,
    /// Answer what would happen, and change nothing.
    #[schema(default = false)]
    pub dry_run: Option<bool>,
}

/// A report or a change.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TaskPatch {
    pub status: Option<ReportedStatus>,
    /// Required with Failure.
    #[schema(min_length = 1, max_length = 65536)]
    pub failure_reason: Option<String>,
    pub failure_type: Option<ReportedFailureType>,
    /// With Failure: come back in so many seconds; uses up no retry.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub retry_after_secs: Option<u64>,
    /// Merged into what is there.
    #[schema(value_type = Option<Metadata>)]
    pub metadata: Option<Value>,
    #[schema(minimum = 0)]
    pub new_success: Option<i32>,
    #[schema(minimum = 0)]
    pub new_failures: Option<i32>,
    #[schema(minimum = 0)]
    pub expected_count: Option<i32>,
    #[schema(minimum = -1000, maximum = 1000)]
    pub priority: Option<i16>,
    /// The run this is about; 409 if the task is at another one.
    #[schema(minimum = 0)]
    pub run: Option<i32>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub enum ReportedStatus {
    Success,
    Failure,
}

/// The failure types but `dependency`: that one is never a worker's to say.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReportedFailureType {
    RateLimit,
    NetworkError,
    Timeout,
    ValidationError,
    AuthenticationError,
    ServerError,
    Unknown,
}

/// A sign of life, with what to add to the counters.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Heartbeat)]
pub struct HeartbeatBody {
    #[schema(minimum = 0)]
    pub new_success: Option<i32>,
    #[schema(minimum = 0)]
    pub new_failures: Option<i32>,
}
