//! The record of an execution that has ended.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::cause::Cause;
use crate::domain::retry::Final;
use crate::domain::retry::failure::Failure;

/// The record of one execution, made when it ends.
#[derive(Clone, Debug, PartialEq)]
pub struct Attempt {
    pub run: i32,
    pub attempt: i16,
    pub instance: Option<Uuid>,
    pub started_at: Option<DateTime<Utc>>,
    pub ended_at: DateTime<Utc>,
    pub outcome: AttemptOutcome,
    pub cause: Cause,
    pub failure: Option<Failure>,
    pub delay_ms: Option<u64>,
    pub jitter_ms: Option<u64>,
    pub next_retry_at: Option<DateTime<Utc>>,
    pub reason: String,
    /// Which retry started this execution; `None` for the first one.
    pub retry_type: Option<RetryType>,
    /// Why the execution was not retried.
    pub refusal: Option<Final>,
}

/// Whether the policy or a person started a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryType {
    Automatic,
    Manual,
}

impl RetryType {
    pub const ALL: [RetryType; 2] = [RetryType::Automatic, RetryType::Manual];

    pub const fn as_str(self) -> &'static str {
        match self {
            RetryType::Automatic => "automatic",
            RetryType::Manual => "manual",
        }
    }
}

/// How an execution ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptOutcome {
    Success,
    Retried,
    Deferred,
    Failed,
    Canceled,
    /// Given up by a manual retry, without a report from its worker.
    Lost,
}

impl AttemptOutcome {
    pub const ALL: [AttemptOutcome; 6] = [
        AttemptOutcome::Success,
        AttemptOutcome::Retried,
        AttemptOutcome::Deferred,
        AttemptOutcome::Failed,
        AttemptOutcome::Canceled,
        AttemptOutcome::Lost,
    ];

    pub fn parse(text: &str) -> Option<AttemptOutcome> {
        AttemptOutcome::ALL.into_iter().find(|outcome| outcome.as_str() == text)
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            AttemptOutcome::Success => "success",
            AttemptOutcome::Retried => "retried",
            AttemptOutcome::Deferred => "deferred",
            AttemptOutcome::Failed => "failed",
            AttemptOutcome::Canceled => "canceled",
            AttemptOutcome::Lost => "lost",
        }
    }
}
