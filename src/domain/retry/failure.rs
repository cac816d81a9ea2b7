//! Failed executions: what triggered the failure, and its class.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What made an execution fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
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

/// The class of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FailureType {
    RateLimit,
    NetworkError,
    Timeout,
    ValidationError,
    AuthenticationError,
    ServerError,
    Dependency,
    Unknown,
}

impl FailureType {
    pub const ALL: [FailureType; 8] = [
        FailureType::RateLimit,
        FailureType::NetworkError,
        FailureType::Timeout,
        FailureType::ValidationError,
        FailureType::AuthenticationError,
        FailureType::ServerError,
        FailureType::Dependency,
        FailureType::Unknown,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            FailureType::RateLimit => "rate_limit",
            FailureType::NetworkError => "network_error",
            FailureType::Timeout => "timeout",
            FailureType::ValidationError => "validation_error",
            FailureType::AuthenticationError => "authentication_error",
            FailureType::ServerError => "server_error",
            FailureType::Dependency => "dependency",
            FailureType::Unknown => "unknown",
        }
    }

    pub fn parse(text: &str) -> Option<FailureType> {
        FailureType::ALL.into_iter().find(|t| t.as_str() == text)
    }

    /// Whether a retry cannot help. Unknown failures are not final: a useless retry is better than a lost task.
    pub const fn is_final(self) -> bool {
        matches!(self, FailureType::ValidationError | FailureType::AuthenticationError | FailureType::Dependency)
    }

    /// Classifies an answer to `on_start` that was not 2xx.
    pub const fn of_http_status(status: u16) -> FailureType {
        match status {
            429 => FailureType::RateLimit,
            408 => FailureType::Timeout,
            401 | 403 => FailureType::AuthenticationError,
            400..=499 => FailureType::ValidationError,
            500..=599 => FailureType::ServerError,
            _ => FailureType::Unknown,
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
