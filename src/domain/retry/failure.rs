//! Failed executions: what triggered the failure, and its class.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use super::failure_type::FailureType;

/// What made an execution fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = RetryTrigger)]
pub enum Trigger {
    /// No heartbeat within `timeout`.
    Timeout,
    /// `on_start` was not answered with 2xx.
    WebhookFailure,
    /// The worker reported Failure.
    Explicit,
}

impl Trigger {
    pub const ALL: [Trigger; 3] = [Trigger::Timeout, Trigger::WebhookFailure, Trigger::Explicit];

    pub const fn as_str(self) -> &'static str {
        match self {
            Trigger::Timeout => "timeout",
            Trigger::WebhookFailure => "webhook_failure",
            Trigger::Explicit => "explicit",
        }
    }
}

/// A failed execution.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    pub trigger: Trigger,
    pub failure_type: FailureType,
    pub reason: String,
    /// The HTTP status of the answer to `on_start`, if there was one.
    pub http_status: Option<u16>,
    pub retry_after: Option<RetryAfter>,
}

/// The delay that the receiver of `on_start` or the worker requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryAfter {
    Secs(u64),
    At(DateTime<Utc>),
}

impl RetryAfter {
    /// Returns the milliseconds from `now`, rounded up so that the retry is never early. `None` if that time has
    /// passed.
    pub fn wait_ms(self, now: DateTime<Utc>) -> Option<u64> {
        let wait = match self {
            RetryAfter::Secs(secs) => secs.saturating_mul(1000),
            RetryAfter::At(at) => {
                let micros = (at - now).num_microseconds().and_then(|wait| u64::try_from(wait).ok());
                micros.unwrap_or(0).div_ceil(1000)
            }
        };
        (wait > 0).then_some(wait)
    }
}
