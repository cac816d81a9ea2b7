//! Retries as the API shows them: policies, results of manual retries, and statistics with the totals behind them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Timestamp;
use crate::domain::retry::failure::{FailureType, Trigger};
use crate::domain::retry::policy::Policy;

/// The number of executions by how they ended.
#[derive(Clone, Copy, Debug, Default)]
pub struct RetryTotals {
    pub succeeded: i64,
    pub succeeded_after_retry: i64,
    pub failed_after_retry: i64,
    pub scheduled: i64,
    pub deferred: i64,
    pub exhausted: i64,
    pub final_: i64,
}

impl RetryTotals {
    pub fn add(&mut self, other: &RetryTotals) {
        self.succeeded += other.succeeded;
        self.succeeded_after_retry += other.succeeded_after_retry;
        self.failed_after_retry += other.failed_after_retry;
        self.scheduled += other.scheduled;
        self.deferred += other.deferred;
        self.exhausted += other.exhausted;
        self.final_ += other.final_;
    }

    /// Returns the share of successes among the tasks that were retried and have ended.
    pub fn success_rate(&self) -> Option<f64> {
        ratio(self.succeeded_after_retry, self.failed_after_retry)
    }

    fn failed(&self) -> i64 {
        self.scheduled + self.deferred + self.exhausted + self.final_
    }
}

#[allow(clippy::cast_precision_loss, reason = "a rate is a float")]
fn ratio(good: i64, bad: i64) -> Option<f64> {
    (good + bad > 0).then(|| good as f64 / (good + bad) as f64)
}

/// Statistics of the retries of tasks that have a policy.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct RetryStats {
    /// Number of scheduled retries.
    pub scheduled: i64,
    pub succeeded_after_retry: i64,
    /// Tasks that failed after all their retries.
    pub exhausted: i64,
    /// Failures that were not retried, for any other reason.
    #[serde(rename = "final")]
    pub final_: i64,
    pub deferred: i64,
    /// Share of successes among the tasks that were retried and have ended; null if there are none.
    #[schema(required)]
    pub success_rate: Option<f64>,
    pub by_attempt: Vec<AttemptStats>,
    pub by_kind: Vec<KindStats>,
    pub by_failure_type: Vec<FailureTypeStats>,
}

/// Executions by the number of retries before them.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct AttemptStats {
    pub attempt: i16,
    pub succeeded: i64,
    pub failed: i64,
    #[schema(required)]
    pub success_rate: Option<f64>,
}

/// Retry statistics of one kind.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct KindStats {
    pub kind: String,
    pub scheduled: i64,
    pub succeeded_after_retry: i64,
    pub exhausted: i64,
    #[serde(rename = "final")]
    pub final_: i64,
    pub deferred: i64,
    #[schema(required)]
    pub success_rate: Option<f64>,
}

/// Retry statistics of one failure type.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct FailureTypeStats {
    pub failure_type: FailureType,
    pub scheduled: i64,
    pub exhausted: i64,
    #[serde(rename = "final")]
    pub final_: i64,
    pub deferred: i64,
}

impl AttemptStats {
    pub fn new(attempt: i16, sums: &RetryTotals) -> AttemptStats {
        let (succeeded, failed) = (sums.succeeded, sums.failed());
        AttemptStats { attempt, succeeded, failed, success_rate: ratio(succeeded, failed) }
    }
}

impl KindStats {
    pub fn new(kind: String, sums: &RetryTotals) -> KindStats {
        KindStats {
            kind,
            scheduled: sums.scheduled,
            succeeded_after_retry: sums.succeeded_after_retry,
            exhausted: sums.exhausted,
            final_: sums.final_,
            deferred: sums.deferred,
            success_rate: sums.success_rate(),
        }
    }
}

impl FailureTypeStats {
    pub fn new(failure_type: FailureType, sums: &RetryTotals) -> FailureTypeStats {
        FailureTypeStats {
            failure_type,
            scheduled: sums.scheduled,
            exhausted: sums.exhausted,
            final_: sums.final_,
            deferred: sums.deferred,
        }
    }
}

// Only describes the schema; `policy::Policy` serializes to it.
/// A retry policy with all defaults filled in.
#[derive(Debug, ToSchema)]
pub struct RetryPolicy {
    /// Retries after the first execution; at most `RETRY_MAX_RETRIES_LIMIT`.
    #[schema(minimum = 1)]
    pub max_retries: i16,
    pub strategy: StrategyName,
    /// With `exponential_backoff`: the first delay.
    #[schema(minimum = 1)]
    pub initial_delay_secs: Option<u64>,
    /// With `exponential_backoff`: the factor by which each further delay grows.
    #[schema(minimum = 1.0)]
    pub backoff_multiplier: Option<f64>,
    /// With `exponential_backoff`: the longest delay; at most `RETRY_MAX_DELAY_LIMIT`.
    #[schema(minimum = 1)]
    pub max_delay_secs: Option<u64>,
    /// With `fixed_delay`: the delay; at most `RETRY_MAX_DELAY_LIMIT`.
    #[schema(minimum = 1)]
    pub delay_secs: Option<u64>,
    /// With `custom`: one delay per retry; the last one repeats; at most `RETRY_MAX_SCHEDULE_DELAY_SECS` each.
    #[schema(min_items = 1, max_items = 1000)]
    pub schedule: Option<Vec<WrittenDelay>>,
    /// Reprise adds up to this many random milliseconds to each delay.
    #[schema(minimum = 0)]
    pub jitter_ms: u64,
    /// The triggers whose failures are retried.
    #[schema(min_items = 1)]
    pub retry_on: Vec<Trigger>,
    /// HTTP statuses (`"429"`) or classes (`"5xx"`) of `on_start` answers that are retried, whatever their failure
    /// type.
    pub retry_on_status: Option<Vec<String>>,
    /// HTTP statuses or classes of `on_start` answers that are not retried. If both lists match, the exact status wins
    /// over the class.
    pub no_retry_on_status: Option<Vec<String>>,
    /// No retry is scheduled for later than this many seconds after the task was created.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub expires_after_secs: Option<u64>,
}

// Only describes the schema; `policy::Delay` serializes to it.
/// A delay in the unit in which it was given.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(untagged, deny_unknown_fields)]
#[schema(as = Delay)]
pub enum WrittenDelay {
    Secs {
        #[schema(minimum = 1)]
        secs: u64,
    },
    Hours {
        #[schema(minimum = 1)]
        hours: u64,
    },
    Days {
        #[schema(minimum = 1)]
        days: u64,
    },
}

/// How the delays of a retry policy grow.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum StrategyName {
    /// No delay except jitter.
    Immediate,
    /// A delay of `initial_delay_secs × backoff_multiplier^attempt`, capped at `max_delay_secs`. The default.
    ExponentialBackoff,
    /// A delay of `delay_secs`.
    FixedDelay,
    /// The delays of `schedule`, in order.
    Custom,
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

/// The default retry policy of a kind.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct KindPolicy {
    pub kind: String,
    #[schema(value_type = RetryPolicy)]
    pub retry: Policy,
    pub updated_at: Timestamp,
}
