//! The limits of requests that come from the configuration.

use super::values::Limit;
use crate::domain::retry::RetryLimits;

/// The limits of requests and the defaults for what they leave out, from the configuration.
#[derive(Clone, Copy, Debug)]
pub struct RequestLimits {
    pub tasks_per_batch: usize,
    pub dependencies_per_task: usize,
    pub links_per_batch: usize,
    pub actions_per_task: usize,
    pub metadata_bytes: usize,
    /// Bytes of one action: URL, headers and body.
    pub action_bytes: usize,
    /// Bytes of one task with all its actions.
    pub task_bytes: usize,
    pub retry: RetryLimits,
    /// Whether to cancel dead ends in batches that do not say.
    pub dead_end_cancel: bool,
}

impl RequestLimits {
    /// No limits beyond those of the types themselves.
    pub const NONE: RequestLimits = RequestLimits {
        tasks_per_batch: usize::MAX,
        dependencies_per_task: usize::MAX,
        links_per_batch: usize::MAX,
        actions_per_task: usize::MAX,
        metadata_bytes: usize::MAX,
        action_bytes: usize::MAX,
        task_bytes: usize::MAX,
        retry: RetryLimits {
            max_retries: i16::MAX,
            max_delay_secs: u64::MAX,
            max_schedule_delay_secs: u64::MAX,
            max_retry_after_secs: u64::MAX,
            max_deferrals: i32::MAX,
        },
        dead_end_cancel: false,
    };
}

/// The settings that limit the length of lists.
pub const TASKS_PER_BATCH: &str = "MAX_TASKS_PER_BATCH";
pub const DEPENDENCIES_PER_TASK: &str = "MAX_DEPENDENCIES_PER_TASK";
pub const ACTIONS_PER_TASK: &str = "MAX_ACTIONS_PER_TASK";

/// Declares numbers that are limited by a setting: `Type, "SETTING", least, limits => most`.
macro_rules! limits {
    ($($(#[doc = $doc:literal])* $type:ident, $name:literal, $least:literal, $limits:ident => $most:expr;)*) => {
        $(
            $(#[doc = $doc])*
            #[derive(Debug, PartialEq, Eq)]
            pub struct $type;

            impl Limit for $type {
                const NAME: &'static str = $name;
                const LEAST: i64 = $least;

                fn most($limits: &RequestLimits) -> i64 {
                    $most
                }
            }
        )*

        /// Returns the value of a limit that the schema names in `x-limit`.
        pub fn limit(name: &str, limits: &RequestLimits) -> Option<i64> {
            let count = |count| i64::try_from(count).ok();
            match name {
                $( $name => Some($type::most(limits)), )*
                TASKS_PER_BATCH => count(limits.tasks_per_batch),
                DEPENDENCIES_PER_TASK => count(limits.dependencies_per_task),
                ACTIONS_PER_TASK => count(limits.actions_per_task),
                _ => None,
            }
        }
    };
}

limits! {
    /// The number of retries.
    MaxRetries, "RETRY_MAX_RETRIES_LIMIT", 1, limits => i64::from(limits.retry.max_retries);
    /// A delay in seconds.
    MaxDelay, "RETRY_MAX_DELAY_LIMIT", 1, limits => signed(limits.retry.max_delay_secs);
    /// Jitter in milliseconds: at most the longest delay.
    MaxJitter, "RETRY_MAX_DELAY_LIMIT × 1000", 0, limits => signed(limits.retry.max_delay_secs).saturating_mul(1000);
    /// A delay of a schedule in seconds.
    MaxScheduleSecs, "RETRY_MAX_SCHEDULE_DELAY_SECS", 1, limits => signed(limits.retry.max_schedule_delay_secs);
    /// A delay of a schedule in hours.
    MaxScheduleHours, "RETRY_MAX_SCHEDULE_DELAY_SECS / 3600", 1,
        limits => signed(limits.retry.max_schedule_delay_secs / 3600);
    /// A delay of a schedule in days.
    MaxScheduleDays, "RETRY_MAX_SCHEDULE_DELAY_SECS / 86400", 1,
        limits => signed(limits.retry.max_schedule_delay_secs / 86_400);
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
