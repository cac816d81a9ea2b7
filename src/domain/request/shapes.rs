//! The shapes of requests for the API description, and for nothing else: the readers beside this file parse bodies
//! field by field, to report every problem at once. The shapes are here so that a new field is added in one folder:
//! to its shape, its struct and its reader. A test compares shapes and readers.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::domain::retry::failure::Trigger;
use crate::domain::task::status::Status;
use crate::domain::view::Metadata;
use crate::domain::view::retry::{StrategyName, WrittenDelay};
use crate::domain::webhook::Action;

/// A batch of tasks: an array of tasks, or an object with settings of the batch.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum CreateTasks {
    Tasks(Vec<NewTaskShape>),
    Batch(NewBatchShape),
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewBatch)]
pub struct NewBatchShape {
    pub tasks: Vec<NewTaskShape>,
    /// Webhooks called when every task of the batch has ended.
    pub on_batch_complete: Option<Vec<Action>>,
    /// A label of the batch, a filter of `GET /batches`.
    #[schema(min_length = 1, max_length = 255)]
    pub scope: Option<String>,
    /// Any JSON object of at most 64 KiB.
    #[schema(value_type = Option<Metadata>)]
    pub metadata: Option<Value>,
    /// The `fair_key` of tasks without their own.
    #[schema(min_length = 1, max_length = 255)]
    pub fair_key: Option<String>,
    /// Whether to cancel a task of the batch once a failure or cancellation leaves it without an alive child. The
    /// default is `DEAD_END_CANCEL`.
    pub dead_end_cancel: Option<bool>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewTask)]
pub struct NewTaskShape {
    /// An id within the request, for `dependencies`.
    #[schema(min_length = 1, max_length = 255)]
    pub id: Option<String>,
    #[schema(min_length = 1, max_length = 255)]
    pub name: String,
    #[schema(min_length = 1, max_length = 100)]
    pub kind: String,
    /// Seconds without a heartbeat after which the run times out.
    #[schema(minimum = 1, maximum = 86400, default = 60)]
    pub timeout: Option<i32>,
    /// Any JSON object of at most 64 KiB.
    #[schema(value_type = Option<Metadata>)]
    pub metadata: Option<Value>,
    /// Tasks with a higher priority start first.
    #[schema(minimum = -1000, maximum = 1000, default = 0)]
    pub priority: Option<i16>,
    /// The webhook that starts the task. Without it, a claimed task is Running at once.
    pub on_start: Option<Action>,
    /// Webhooks called when the task succeeds.
    pub on_success: Option<Vec<Action>>,
    /// Webhooks called when the task fails for good.
    pub on_failure: Option<Vec<Action>>,
    /// Webhooks called when a retry or a deferral is scheduled.
    pub on_retry: Option<Vec<Action>>,
    /// Tasks that must end before this task starts.
    pub dependencies: Option<Vec<NewDependency>>,
    /// If one of these matchers finds an existing task, this task is not created.
    #[schema(max_items = 10)]
    pub dedupe_strategy: Option<Vec<NewMatcher>>,
    #[schema(minimum = 0)]
    pub expected_count: Option<i32>,
    /// Whether the cancellation of dead ends stops at this task instead of continuing to its parents.
    #[schema(default = false)]
    pub dead_end_barrier: Option<bool>,
    pub retry: Option<NewRetry>,
    /// The task does not start before this time.
    pub run_at: Option<DateTime<Utc>>,
    /// Limits that the task must meet to start. All of them must pass.
    #[schema(max_items = 10)]
    pub rules: Option<Vec<NewRule>>,
    /// A key such as a tenant. Among tasks of equal priority, keys take turns.
    #[schema(min_length = 1, max_length = 255)]
    pub fair_key: Option<String>,
}

/// A limit on executing tasks: the task starts only while the matching tasks leave room. The spellings
/// `max_concurrency` and `Concurrency` are accepted as well.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", deny_unknown_fields)]
#[schema(examples(
    json!({"type": "Concurency", "max_concurency": 3, "matcher": {"kind": "import", "fields": ["tenant"]}}),
    json!({"type": "Capacity", "max_capacity": 1000, "matcher": {"kind": "import", "fields": []}}),
))]
pub enum NewRule {
    /// At most `max_concurency` matching tasks execute at once.
    #[serde(rename = "Concurency")]
    Concurrency {
        #[schema(minimum = 1)]
        max_concurency: i32,
        matcher: NewRuleMatcher,
    },
    /// The work left in the matching tasks that execute, the sum of `expected_count − success − failures`, is less than
    /// `max_capacity`.
    Capacity {
        #[schema(minimum = 1)]
        max_capacity: i64,
        matcher: NewRuleMatcher,
    },
}

/// Selects the tasks of a kind whose metadata fields have the same values as those of the task with the rule.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewRuleMatcher {
    /// The kind of the matching tasks; the task's own kind by default.
    #[schema(min_length = 1, max_length = 100)]
    pub kind: Option<String>,
    /// Always `Running`, which includes Claimed tasks.
    #[schema(value_type = Option<String>, example = "Running")]
    pub status: Option<String>,
    /// Names of top-level metadata fields.
    #[schema(max_items = 20)]
    pub fields: Option<Vec<String>>,
}

/// New rules for the tasks of a kind that have not ended.
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
    /// The `id` of a task that appears earlier in the request.
    #[schema(min_length = 1, max_length = 255)]
    pub id: String,
    /// Whether the task fails if the named task does not succeed. If false, it starts in either case.
    #[schema(default = true)]
    pub requires_success: Option<bool>,
}

/// Selects existing tasks of a kind and status whose named metadata fields have the same values as those of the new
/// task.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(examples(json!({"fields": ["order"]}), json!({"kind": "import", "status": "Pending", "fields": ["a", "b"]})))]
pub struct NewMatcher {
    /// The kind of the matching tasks; the task's own kind by default.
    #[schema(min_length = 1, max_length = 100)]
    pub kind: Option<String>,
    /// The status of the matching tasks; by default any status of a task that has not ended.
    pub status: Option<Status>,
    /// Names of top-level metadata fields. The new task must have them.
    #[schema(max_items = 20)]
    pub fields: Option<Vec<String>>,
}

/// The retry policy. If absent, the default policy of the kind applies, or the task is not retried; null turns retries
/// off.
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
    /// Number of retries after the first run; at most `RETRY_MAX_RETRIES_LIMIT`.
    #[schema(minimum = 1)]
    pub max_retries: i16,
    pub strategy: Option<StrategyName>,
    /// With `exponential_backoff`: the first delay.
    #[schema(minimum = 1, default = 5)]
    pub initial_delay_secs: Option<u64>,
    /// With `exponential_backoff`: the factor by which each further delay grows.
    #[schema(minimum = 1.0, default = 2.0)]
    pub backoff_multiplier: Option<f64>,
    /// With `exponential_backoff`: the longest delay; at most `RETRY_MAX_DELAY_LIMIT`.
    #[schema(minimum = 1, default = 300)]
    pub max_delay_secs: Option<u64>,
    /// With `fixed_delay`: the delay; at most `RETRY_MAX_DELAY_LIMIT`.
    #[schema(minimum = 1)]
    pub delay_secs: Option<u64>,
    /// With `custom`: one delay per retry, of which the last one repeats; at most `RETRY_MAX_SCHEDULE_DELAY_SECS` each.
    #[schema(min_items = 1, max_items = 1000)]
    pub schedule: Option<Vec<WrittenDelay>>,
    /// Longest random delay added to each delay, in milliseconds.
    #[schema(minimum = 0, default = 500)]
    pub jitter_ms: Option<u64>,
    /// The failures that are retried.
    #[schema(min_items = 1)]
    pub retry_on: Option<Vec<Trigger>>,
    /// HTTP statuses (`"429"`) or classes (`"5xx"`) of `on_start` answers that are retried, whatever their failure
    /// type.
    pub retry_on_status: Option<Vec<String>>,
    /// HTTP statuses or classes of `on_start` answers that are not retried, whatever their failure type. The more exact
    /// pattern wins.
    pub no_retry_on_status: Option<Vec<String>>,
    /// Seconds after the creation of the task past which no retry is scheduled.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub expires_after_secs: Option<u64>,
}

/// A manual retry.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = RetryRequest)]
pub struct RetryRequestShape {
    /// The name of the requester in the audit trail.
    #[schema(min_length = 1, max_length = 255)]
    pub requested_by: Option<String>,
    /// Whether tasks that failed only because of the retried tasks wait for them again.
    #[schema(default = true)]
    pub cascade: Option<bool>,
    /// Whether to only return what would change.
    #[schema(default = false)]
    pub dry_run: Option<bool>,
}

/// A report of a run, or a change of a task.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TaskPatch {
    /// The result of the run.
    pub status: Option<ReportedStatus>,
    /// Why the run failed; required with Failure.
    #[schema(min_length = 1, max_length = 65536)]
    pub failure_reason: Option<String>,
    pub failure_type: Option<ReportedFailureType>,
    /// With Failure: defers the task by this many seconds, without using up a retry.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub retry_after_secs: Option<u64>,
    /// Fields merged into the metadata of the task.
    #[schema(value_type = Option<Metadata>)]
    pub metadata: Option<Value>,
    /// Added to `success`.
    #[schema(minimum = 0)]
    pub new_success: Option<i32>,
    /// Added to `failures`.
    #[schema(minimum = 0)]
    pub new_failures: Option<i32>,
    #[schema(minimum = 0)]
    pub expected_count: Option<i32>,
    #[schema(minimum = -1000, maximum = 1000)]
    pub priority: Option<i16>,
    /// The run that the request is about. The answer is 409 if the task is at another run.
    #[schema(minimum = 0)]
    pub run: Option<i32>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub enum ReportedStatus {
    Success,
    Failure,
}

/// The failure types that a worker may report: all but `dependency`.
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

/// A heartbeat, with numbers to add to the counters of the task.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Heartbeat)]
pub struct HeartbeatBody {
    /// Added to `success`.
    #[schema(minimum = 0)]
    pub new_success: Option<i32>,
    /// Added to `failures`.
    #[schema(minimum = 0)]
    pub new_failures: Option<i32>,
}
