//! Decides whether and when a failed execution is retried. No other code decides that.

use chrono::{DateTime, TimeDelta, Utc};

use super::failure::{Failure, FailureType, Trigger};
use super::policy::Policy;

/// The limits of policies and of requested delays, from the configuration.
#[derive(Clone, Copy, Debug)]
pub struct RetryLimits {
    pub max_retries: i16,
    pub max_delay_secs: u64,
    pub max_schedule_delay_secs: u64,
    pub max_retry_after_secs: u64,
    pub max_deferrals: i32,
}

impl Default for RetryLimits {
    fn default() -> RetryLimits {
        RetryLimits {
            max_retries: 10,
            max_delay_secs: 3600,
            max_schedule_delay_secs: 30 * 86_400,
            max_retry_after_secs: 86_400,
            max_deferrals: 100,
        }
    }
}

/// The inputs of a decision besides policy and failure.
#[derive(Clone, Copy, Debug)]
pub struct RetryContext {
    /// Number of retries so far.
    pub attempt: i16,
    pub deferrals: i32,
    pub created_at: DateTime<Utc>,
    pub now: DateTime<Utc>,
    /// A random number from 0 up to 1.
    pub jitter: f64,
    pub limits: RetryLimits,
}

/// A decision and its reason in words.
#[derive(Clone, Debug, PartialEq)]
pub struct Judgement {
    pub decision: RetryDecision,
    pub reason: String,
}

/// What happens after a failure.
#[derive(Clone, Debug, PartialEq)]
pub enum RetryDecision {
    /// A retry by the policy. Counts as an attempt.
    Retry { delay_ms: u64, jitter_ms: u64, at: DateTime<Utc> },
    /// A retry after a requested delay. Does not count as an attempt.
    Defer { delay_ms: u64, at: DateTime<Utc> },
    /// No retry.
    Final(Final),
}

/// Why a failure is not retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Final {
    NoPolicy,
    /// `retry_on` does not include the trigger.
    Trigger(Trigger),
    /// Failures of this type are never retried.
    Type(FailureType),
    /// `no_retry_on_status` includes the HTTP status.
    Status(u16),
    Exhausted,
    /// The next attempt would be due after the expiry.
    Expired,
}

/// Decides whether and when a failed execution is retried.
pub fn judge(policy: Option<&Policy>, failure: &Failure, context: RetryContext) -> Judgement {
    let Some(policy) = policy else {
        return refuse(Final::NoPolicy, "the task has no retry policy");
    };
    if !policy.retry_on.contains(&failure.trigger) {
        let trigger = failure.trigger;
        return refuse(Final::Trigger(trigger), &format!("retry_on does not include {}", trigger.as_str()));
    }
    let wanted = failure.http_status.and_then(|status| Some((status, policy.wants_retry_of(status)?)));
    match wanted {
        Some((status, false)) => {
            return refuse(Final::Status(status), &format!("no_retry_on_status includes {status}"));
        }
        None if failure.failure_type.is_final() => {
            let failure_type = failure.failure_type;
            return refuse(Final::Type(failure_type), &format!("{} is final", failure_type.as_str()));
        }
        Some((_, true)) | None => {}
    }
    let requested_ms = failure.retry_after.and_then(|after| after.wait_ms(context.now));
    if let Some(requested_ms) = requested_ms
        && context.deferrals < context.limits.max_deferrals
    {
        return defer(policy, requested_ms, context);
    }
    if context.attempt >= policy.max_retries {
        return refuse(Final::Exhausted, &format!("all {} retries are used up", policy.max_retries));
    }
    let (delay_ms, jitter_ms) = (policy.delay_ms(context.attempt), policy.jitter(context.jitter));
    let at = add_ms(context.now, delay_ms.saturating_add(jitter_ms));
    if let Some(expired) = expired(policy, at, context) {
        return expired;
    }
    let (number, most) = (context.attempt + 1, policy.max_retries);
    let mut reason =
        format!("retry {number} of {most}: {}, {jitter_ms} ms of jitter", policy.explain_delay(context.attempt));
    if requested_ms.is_some() {
        let most = context.limits.max_deferrals;
        reason = format!("{reason}; after {most} deferrals a requested delay counts as a failure");
    }
    Judgement { decision: RetryDecision::Retry { delay_ms, jitter_ms, at }, reason }
}

fn defer(policy: &Policy, requested_ms: u64, context: RetryContext) -> Judgement {
    let cap = context.limits.max_retry_after_secs.saturating_mul(1000);
    let delay_ms = requested_ms.min(cap);
    let at = add_ms(context.now, delay_ms);
    if let Some(expired) = expired(policy, at, context) {
        return expired;
    }
    let basis =
        if requested_ms > cap { format!("instead of the requested {requested_ms} ms") } else { "as requested".into() };
    let reason = format!("deferred for {delay_ms} ms {basis}; no retry is used up");
    Judgement { decision: RetryDecision::Defer { delay_ms, at }, reason }
}

fn expired(policy: &Policy, at: DateTime<Utc>, context: RetryContext) -> Option<Judgement> {
    let secs = policy.expires_after_secs?;
    let end = add_ms(context.created_at, secs.saturating_mul(1000));
    (at > end).then(|| {
        refuse(
            Final::Expired,
            &format!("expired: the next attempt would be due more than {secs} s after the task was created"),
        )
    })
}

fn refuse(why: Final, reason: &str) -> Judgement {
    Judgement { decision: RetryDecision::Final(why), reason: format!("not retried: {reason}") }
}

fn add_ms(from: DateTime<Utc>, ms: u64) -> DateTime<Utc> {
    TimeDelta::try_milliseconds(i64::try_from(ms).unwrap_or(i64::MAX))
        .and_then(|wait| from.checked_add_signed(wait))
        .unwrap_or(DateTime::<Utc>::MAX_UTC)
}

#[cfg(test)]
#[path = "tests/judge.rs"]
mod tests;
