//! Whether a failed execution is tried again, and when. Plain arithmetic: no clock, no random source.
//! This is the only place that decides about a retry.

use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What made an execution fail, as `retry_on` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Trigger {
    /// No sign of life within `timeout`.
    Timeout,
    /// `on_start` did not answer 2xx.
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

/// The class of an error.
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

    /// Trying again cannot help. Unknown errors are not final: better to retry than to lose a task.
    pub const fn is_final(self) -> bool {
        matches!(self, FailureType::ValidationError | FailureType::AuthenticationError | FailureType::Dependency)
    }

    /// The class of an `on_start` answer that was not 2xx.
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

/// One execution that went wrong.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    pub trigger: Trigger,
    pub failure_type: FailureType,
    pub reason: String,
    pub http_status: Option<u16>,
}

/// A retry policy, all defaults filled in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = RetryPolicy)]
pub struct Policy {
    /// Retries after the first execution: 3 means at most 4 executions.
    #[schema(minimum = 1, example = 3)]
    pub max_retries: i16,
    pub strategy: Strategy,
    /// Delay before the first retry.
    #[schema(minimum = 1)]
    pub initial_delay_secs: u64,
    /// Each further delay is this many times longer.
    #[schema(minimum = 1.0)]
    pub backoff_multiplier: f64,
    /// No delay is longer than this, jitter aside.
    #[schema(minimum = 1)]
    pub max_delay_secs: u64,
    /// Up to this many random milliseconds are added to each delay.
    pub jitter_ms: u64,
    /// Which failures are retried at all.
    pub retry_on: Vec<Trigger>,
}

/// How the delay grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// `initial_delay_secs × backoff_multiplier^attempt`, capped at `max_delay_secs`.
    ExponentialBackoff,
}

/// What the environment allows a policy to say.
#[derive(Clone, Copy, Debug)]
pub struct PolicyLimits {
    pub max_retries: i16,
    pub max_delay_secs: u64,
}

impl Policy {
    pub const DEFAULT_INITIAL_DELAY_SECS: u64 = 5;
    pub const DEFAULT_BACKOFF_MULTIPLIER: f64 = 2.0;
    pub const DEFAULT_MAX_DELAY_SECS: u64 = 300;
    pub const DEFAULT_JITTER_MS: u64 = 500;

    /// The delay before the retry that follows attempt number `attempt`, without jitter.
    pub fn delay_ms(&self, attempt: i16) -> u64 {
        match self.strategy {
            Strategy::ExponentialBackoff => {
                let cap = ms(self.max_delay_secs);
                // Growing past f64 gives infinity, which the cap turns into the cap.
                let factor = self.backoff_multiplier.powi(i32::from(attempt));
                let delay = precise(ms(self.initial_delay_secs)) * factor;
                if delay < precise(cap) { whole(delay) } else { cap }
            }
        }
    }

    /// The share of `jitter_ms` that `unit` (from 0 up to 1) stands for; both ends can be reached.
    pub fn jitter(&self, unit: f64) -> u64 {
        whole(unit.clamp(0.0, 1.0) * precise(self.jitter_ms + 1)).min(self.jitter_ms)
    }
}

const fn ms(secs: u64) -> u64 {
    secs.saturating_mul(1000)
}

// Delays are at most days in milliseconds, far inside what f64 holds exactly.
#[allow(clippy::cast_precision_loss)]
const fn precise(value: u64) -> f64 {
    value as f64
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
const fn whole(value: f64) -> u64 {
    value as u64
}

/// The answer to a failure.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    Retry { delay_ms: u64, jitter_ms: u64, at: DateTime<Utc> },
    Final(Final),
}

/// Why a failure is not retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Final {
    NoPolicy,
    /// `retry_on` does not name what happened.
    Trigger(Trigger),
    /// Errors of this type are never retried.
    Type(FailureType),
    Exhausted,
}

impl Final {
    pub fn explain(self, policy: Option<&Policy>) -> String {
        match self {
            Final::NoPolicy => "not retried: the task has no retry policy".into(),
            Final::Trigger(trigger) => format!("not retried: retry_on does not name {}", trigger.as_str()),
            Final::Type(failure_type) => format!("not retried: {} is final", failure_type.as_str()),
            Final::Exhausted => {
                let max = policy.map_or(0, |p| p.max_retries);
                format!("not retried: all {max} retries are used up")
            }
        }
    }
}

/// Decides about the failure of attempt number `attempt`. `jitter` is a random number from 0 up to 1.
pub fn judge(policy: Option<&Policy>, failure: &Failure, attempt: i16, now: DateTime<Utc>, jitter: f64) -> Verdict {
    let Some(policy) = policy else {
        return Verdict::Final(Final::NoPolicy);
    };
    if failure.failure_type.is_final() {
        return Verdict::Final(Final::Type(failure.failure_type));
    }
    if !policy.retry_on.contains(&failure.trigger) {
        return Verdict::Final(Final::Trigger(failure.trigger));
    }
    if attempt >= policy.max_retries {
        return Verdict::Final(Final::Exhausted);
    }
    let delay_ms = policy.delay_ms(attempt);
    let jitter_ms = policy.jitter(jitter);
    let wait = i64::try_from(delay_ms.saturating_add(jitter_ms)).unwrap_or(i64::MAX);
    let at = TimeDelta::try_milliseconds(wait)
        .and_then(|wait| now.checked_add_signed(wait))
        .unwrap_or(DateTime::<Utc>::MAX_UTC);
    Verdict::Retry { delay_ms, jitter_ms, at }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> Policy {
        Policy {
            max_retries: 3,
            strategy: Strategy::ExponentialBackoff,
            initial_delay_secs: 5,
            backoff_multiplier: 2.0,
            max_delay_secs: 300,
            jitter_ms: 500,
            retry_on: Trigger::ALL.to_vec(),
        }
    }

    fn failure(trigger: Trigger, failure_type: FailureType) -> Failure {
        Failure { trigger, failure_type, reason: "x".into(), http_status: None }
    }

    #[test]
    fn delays_double_up_to_the_cap() {
        let delays: Vec<u64> = (0..9).map(|a| policy().delay_ms(a)).collect();
        assert_eq!(delays, [5000, 10_000, 20_000, 40_000, 80_000, 160_000, 300_000, 300_000, 300_000]);
    }

    #[test]
    fn huge_exponents_give_the_cap() {
        let steep = Policy { backoff_multiplier: 1e300, ..policy() };
        assert_eq!(steep.delay_ms(0), 5000);
        assert_eq!(steep.delay_ms(300), 300_000);
        let ten = Policy { backoff_multiplier: 10.0, ..policy() };
        assert_eq!(ten.delay_ms(300), 300_000);
        assert_eq!(Policy { backoff_multiplier: 1.0, ..policy() }.delay_ms(i16::MAX), 5000);
    }

    #[test]
    fn jitter_stays_inside_its_bounds() {
        assert_eq!(policy().jitter(0.0), 0);
        assert_eq!(policy().jitter(0.999_999), 500);
        assert_eq!(policy().jitter(1.0), 500);
        assert_eq!(Policy { jitter_ms: 0, ..policy() }.jitter(0.9), 0);
    }

    #[test]
    fn verdicts() {
        use FailureType as F;
        let now = DateTime::<Utc>::UNIX_EPOCH;
        let only_timeout = Policy { retry_on: vec![Trigger::Timeout], ..policy() };
        let cases = [
            (None, Trigger::Timeout, F::Timeout, 0, Some(Final::NoPolicy)),
            (Some(policy()), Trigger::Timeout, F::Timeout, 0, None),
            (Some(policy()), Trigger::Explicit, F::Unknown, 2, None),
            (Some(policy()), Trigger::Explicit, F::Unknown, 3, Some(Final::Exhausted)),
            (Some(policy()), Trigger::WebhookFailure, F::ValidationError, 0, Some(Final::Type(F::ValidationError))),
            (Some(policy()), Trigger::WebhookFailure, F::ServerError, 0, None),
            (Some(only_timeout.clone()), Trigger::Timeout, F::Timeout, 0, None),
            (Some(only_timeout), Trigger::Explicit, F::Unknown, 0, Some(Final::Trigger(Trigger::Explicit))),
        ];
        for (policy, trigger, failure_type, attempt, expected) in cases {
            let verdict = judge(policy.as_ref(), &failure(trigger, failure_type), attempt, now, 0.0);
            match expected {
                Some(why) => assert_eq!(verdict, Verdict::Final(why)),
                None => assert!(matches!(verdict, Verdict::Retry { .. }), "{verdict:?}"),
            }
        }
    }

    #[test]
    fn the_due_time_is_delay_plus_jitter() {
        let now = DateTime::<Utc>::UNIX_EPOCH;
        let verdict = judge(Some(&policy()), &failure(Trigger::Timeout, FailureType::Timeout), 1, now, 1.0);
        let Verdict::Retry { delay_ms, jitter_ms, at } = verdict else { panic!("{verdict:?}") };
        assert_eq!((delay_ms, jitter_ms), (10_000, 500));
        assert_eq!((at - now).num_milliseconds(), 10_500);
    }
}
