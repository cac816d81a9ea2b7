//! Sample tasks, failures and moments for tests: plausible in every status, with distinct numbers.

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use super::request::RequestLimits;
use super::retry::RetryLimits;
use super::retry::failure::{Failure, FailureType, Trigger};
use super::retry::policy::{Policy, Strategy};
use super::task::lifecycle::{Jitter, Moment};
use super::task::status::Status;
use super::task::{Flags, Task};

pub const INSTANCE: Uuid = Uuid::from_u128(0xa11);
pub const OTHER_INSTANCE: Uuid = Uuid::from_u128(0xb22);
pub const RUN: i32 = 4;
pub const CLAIM: i32 = 6;
pub const ATTEMPT: i16 = 2;

pub const RETRY_LIMITS: RetryLimits = RetryLimits {
    max_retries: 10,
    max_delay_secs: 3600,
    max_schedule_delay_secs: 30 * 86_400,
    max_retry_after_secs: 86_400,
    max_deferrals: 100,
};

/// Request limits, small where a test has to exceed them.
pub const LIMITS: RequestLimits = RequestLimits {
    tasks_per_batch: 12,
    dependencies_per_task: 3,
    links_per_batch: 1000,
    actions_per_task: 4,
    metadata_bytes: 65_536,
    action_bytes: 262_144,
    task_bytes: 1_048_576,
    retry: RETRY_LIMITS,
    dead_end_cancel: false,
};

/// Returns the time `secs` seconds after the present of the samples.
pub fn at(secs: i64) -> DateTime<Utc> {
    DateTime::UNIX_EPOCH + TimeDelta::seconds(1_800_000_000 + secs)
}

pub fn moment(secs: i64) -> Moment {
    Moment { now: at(secs), jitter: Jitter::Exactly(0.0), limits: RETRY_LIMITS }
}

/// A policy with delays of 10, 20 and 40 s. One retry is left after [`ATTEMPT`].
pub fn policy() -> Policy {
    Policy {
        max_retries: 3,
        strategy: backoff(10, 2.0, 300),
        jitter_ms: 500,
        retry_on: Trigger::ALL.to_vec(),
        retry_on_status: Vec::new(),
        no_retry_on_status: Vec::new(),
        expires_after_secs: None,
    }
}

pub fn backoff(initial_delay_secs: u64, backoff_multiplier: f64, max_delay_secs: u64) -> Strategy {
    Strategy::ExponentialBackoff { initial_delay_secs, backoff_multiplier, max_delay_secs }
}

pub fn failure(trigger: Trigger, failure_type: FailureType) -> Failure {
    Failure { trigger, failure_type, reason: "it broke".into(), http_status: None, retry_after: None }
}

/// A task in this status. Its lease, timeout or retry delay ends at the present of the samples.
pub fn task(status: Status) -> Task {
    let mut task = Task {
        id: Uuid::from_u128(1),
        batch_id: Uuid::from_u128(2),
        kind: "kind".into(),
        status,
        flags: Flags(Flags::ON_START.0 | Flags::HAS_CHILDREN.0),
        attempt: ATTEMPT,
        run: RUN,
        deferrals: 7,
        wait_count: 0,
        timeout_secs: 30,
        claimed_by: None,
        claimed_run: Some(RUN - 1),
        claim: CLAIM,
        manual_run: None,
        slots: Vec::new(),
        timeout_at: None,
        next_retry_at: None,
        created_at: at(-1000),
        last_updated: at(-30),
        started_at: None,
        ended_at: None,
        failure_type: None,
        failure_reason: None,
        retry: Some(policy()),
    };
    match status {
        Status::Waiting => task.wait_count = 1,
        Status::Pending | Status::Paused => {}
        Status::Claimed | Status::Running => {
            task.claimed_by = Some(INSTANCE);
            task.claimed_run = Some(RUN);
            task.slots = vec![5, 8];
            task.timeout_at = Some(at(0));
            task.started_at = (status == Status::Running).then(|| at(-30));
        }
        Status::RetryPending => {
            task.started_at = Some(at(-60));
            task.next_retry_at = Some(at(0));
            task.failure_type = Some(FailureType::Timeout);
            task.failure_reason = Some("no heartbeat for 30 s".into());
        }
        Status::Success | Status::Failure | Status::Canceled => {
            task.claimed_run = Some(RUN);
            task.started_at = Some(at(-60));
            task.ended_at = Some(at(-20));
            if status == Status::Failure {
                task.failure_type = Some(FailureType::Unknown);
                task.failure_reason = Some("it broke".into());
            }
        }
    }
    task
}
