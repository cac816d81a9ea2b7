//! Whether a failed execution is tried again, and when. This is the only place that decides about a retry.

use chrono::{DateTime, TimeDelta, Utc};

use super::failure::{Failure, FailureType, Trigger};
use super::policy::Policy;

/// What the environment allows policies to say and rate limits to ask for.
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

/// What a decision looks at besides policy and failure.
#[derive(Clone, Copy, Debug)]
pub struct Circumstances {
    /// Retries so far.
    pub attempt: i16,
    pub deferrals: i32,
    pub created_at: DateTime<Utc>,
    pub now: DateTime<Utc>,
    /// A random number from 0 up to 1.
    pub jitter: f64,
    pub limits: RetryLimits,
}

/// The answer to a failure, and the reason for it in words.
#[derive(Clone, Debug, PartialEq)]
pub struct Judgement {
    pub verdict: Verdict,
    pub reason: String,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Counts as an attempt.
    Retry {
        delay_ms: u64,
        jitter_ms: u64,
        at: DateTime<Utc>,
    },
    /// The other side said when: does not count.
    Defer {
        delay_ms: u64,
        at: DateTime<Utc>,
    },
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
    /// The policy does not want this HTTP status retried.
    Status(u16),
    Exhausted,
    /// The next try would come too late.
    Expired,
}

pub fn judge(policy: Option<&Policy>, failure: &Failure, around: Circumstances) -> Judgement {
    let Some(policy) = policy else {
        return refuse(Final::NoPolicy, "the task has no retry policy");
    };
    if !policy.retry_on.contains(&failure.trigger) {
        let trigger = failure.trigger;
        return refuse(Final::Trigger(trigger), &format!("retry_on does not name {}", trigger.as_str()));
    }
    let wanted = failure.http_status.and_then(|status| Some((status, policy.wants_retry_of(status)?)));
    match wanted {
        Some((status, false)) => return refuse(Final::Status(status), &format!("no_retry_on_status names {status}")),
        None if failure.failure_type.is_final() => {
            let failure_type = failure.failure_type;
            return refuse(Final::Type(failure_type), &format!("{} is final", failure_type.as_str()));
        }
        Some((_, true)) | None => {}
    }
    let asked = failure.retry_after.and_then(|after| after.wait_ms(around.now));
    if let Some(asked) = asked
        && around.deferrals < around.limits.max_deferrals
    {
        return defer(policy, asked, around);
    }
    if around.attempt >= policy.max_retries {
        return refuse(Final::Exhausted, &format!("all {} retries are used up", policy.max_retries));
    }
    let (delay_ms, jitter_ms) = (policy.delay_ms(around.attempt), policy.jitter(around.jitter));
    let at = later(around.now, delay_ms.saturating_add(jitter_ms));
    if let Some(expired) = expired(policy, at, around) {
        return expired;
    }
    let (number, most) = (around.attempt + 1, policy.max_retries);
    let mut reason =
        format!("retry {number} of {most}: {}, {jitter_ms} ms of jitter", policy.explain_delay(around.attempt));
    if asked.is_some() {
        reason.push_str("; a rate limit counts as a failure after so many deferrals");
    }
    Judgement { verdict: Verdict::Retry { delay_ms, jitter_ms, at }, reason }
}

fn defer(policy: &Policy, asked: u64, around: Circumstances) -> Judgement {
    let cap = around.limits.max_retry_after_secs.saturating_mul(1000);
    let delay_ms = asked.min(cap);
    let at = later(around.now, delay_ms);
    if let Some(expired) = expired(policy, at, around) {
        return expired;
    }
    let capped = if asked > cap { format!(", asked for {asked} ms") } else { String::new() };
    let reason = format!("deferred for {delay_ms} ms as the other side wished{capped}; no retry is used up");
    Judgement { verdict: Verdict::Defer { delay_ms, at }, reason }
}

fn expired(policy: &Policy, at: DateTime<Utc>, around: Circumstances) -> Option<Judgement> {
    let secs = policy.expires_after_secs?;
    let end = later(around.created_at, secs.saturating_mul(1000));
    (at > end).then(|| {
        refuse(
            Final::Expired,
            &format!("retrying expired: the next try would come later than {secs} s after the task was created"),
        )
    })
}

fn refuse(why: Final, reason: &str) -> Judgement {
    Judgement { verdict: Verdict::Final(why), reason: format!("not retried: {reason}") }
}

fn later(from: DateTime<Utc>, ms: u64) -> DateTime<Utc> {
    TimeDelta::try_milliseconds(i64::try_from(ms).unwrap_or(i64::MAX))
        .and_then(|wait| from.checked_add_signed(wait))
        .unwrap_or(DateTime::<Utc>::MAX_UTC)
}

#[cfg(test)]
#[path = "tests/judge.rs"]
mod tests;
