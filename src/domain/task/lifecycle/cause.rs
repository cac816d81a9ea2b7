//! The causes of status changes.

use crate::domain::retry::failure::Trigger;

/// Why a status changed, for the history and the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    Parents,
    Dependency,
    Claim,
    Start,
    LeaseRanOut,
    Failed(Trigger),
    Report,
    RetryDue,
    Cancel,
    DeadEnd,
    Pause,
    Resume,
    Manual,
}

impl Cause {
    pub const ALL: [Cause; 15] = [
        Cause::Parents,
        Cause::Dependency,
        Cause::Claim,
        Cause::Start,
        Cause::LeaseRanOut,
        Cause::Failed(Trigger::Timeout),
        Cause::Failed(Trigger::WebhookFailure),
        Cause::Failed(Trigger::Explicit),
        Cause::Report,
        Cause::RetryDue,
        Cause::Cancel,
        Cause::DeadEnd,
        Cause::Pause,
        Cause::Resume,
        Cause::Manual,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Cause::Parents => "parents",
            Cause::Dependency => "dependency",
            Cause::Claim => "claim",
            Cause::Start => "start",
            Cause::LeaseRanOut => "lease_ran_out",
            Cause::Failed(trigger) => trigger.as_str(),
            Cause::Report => "report",
            Cause::RetryDue => "retry_due",
            Cause::Cancel => "cancel",
            Cause::DeadEnd => "dead_end",
            Cause::Pause => "pause",
            Cause::Resume => "resume",
            Cause::Manual => "manual",
        }
    }
}
