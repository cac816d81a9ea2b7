//! The part of a task that decisions depend on, as read under its row lock.

pub mod lifecycle;
pub mod status;

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use super::retry::failure::FailureType;
use super::retry::policy::Policy;
use status::Status;

/// The hot row of a task plus its retry policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    pub id: Uuid,
    pub batch_id: Uuid,
    pub kind: String,
    pub status: Status,
    pub flags: Flags,
    /// Retry counter, compared with `max_retries`.
    pub attempt: i16,
    /// Execution number. Fences stale workers and is part of idempotency keys.
    pub run: i32,
    pub deferrals: i32,
    /// Parents that have not ended. Meaningful only while the task is alive.
    pub wait_count: i32,
    pub timeout_secs: i32,
    pub claimed_by: Option<Uuid>,
    /// The last run that was claimed. Its worker may still report.
    pub claimed_run: Option<i32>,
    /// How often the task was claimed. Fences the answers to calls that were made for an earlier claim.
    pub claim: i32,
    /// The run that the last manual retry asked for.
    pub manual_run: Option<i32>,
    /// The slots that the task occupies while it is Claimed or Running.
    pub slots: Vec<i64>,
    /// While Claimed, the end of the lease. While Running, when to check for a timeout; heartbeats do not move it.
    pub timeout_at: Option<DateTime<Utc>>,
    pub next_retry_at: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
    pub last_updated: DateTime<Utc>,
    pub started_at: Option<DateTime<Utc>>,
    pub ended_at: Option<DateTime<Utc>>,
    pub failure_type: Option<FailureType>,
    pub failure_reason: Option<String>,
    pub retry: Option<Policy>,
}

impl Task {
    /// Whether the task was claimed since it was created or last retried manually. From then on its parents do not
    /// matter.
    pub fn has_begun(&self) -> bool {
        self.claimed_run.is_some_and(|claimed| claimed >= self.manual_run.unwrap_or(0))
    }

    /// Whether the last heartbeat is recent enough. `last_updated` tells, because only its worker changes a Running
    /// task.
    pub fn has_heartbeat(&self, now: DateTime<Utc>) -> bool {
        self.status == Status::Running && self.last_updated + TimeDelta::seconds(i64::from(self.timeout_secs)) > now
    }
}

/// Which rows of other tables a transition has to look for. Most tasks have none of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub i16);

impl Flags {
    pub const ON_START: Flags = Flags(1);
    pub const ON_SUCCESS: Flags = Flags(2);
    pub const ON_FAILURE: Flags = Flags(4);
    pub const ON_RETRY: Flags = Flags(8);
    pub const HAS_CHILDREN: Flags = Flags(16);
    /// The batch cancels dead ends: the task is canceled when it becomes one.
    pub const DEAD_END: Flags = Flags(32);
    /// The batch cancels dead ends, and the task has parents and is no barrier: its bad end may make them dead ends.
    pub const TELLS_PARENTS: Flags = Flags(64);
    /// The task has children in other batches, created later. More may be added whenever its row is not locked.
    pub const IN_OTHER_BATCHES: Flags = Flags(128);
    /// The task carries rules.
    pub const HAS_RULES: Flags = Flags(256);

    pub const fn has(self, other: Flags) -> bool {
        self.0 & other.0 != 0
    }

    pub fn set(&mut self, other: Flags, on: bool) {
        if on {
            self.0 |= other.0;
        }
    }
}
