//! The statuses of a task, and the one question that decides about its children: has its fate been sealed?

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

/// Where a task stands. PascalCase in JSON, `snake_case` in the database; input takes either, in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, ToSchema)]
pub enum Status {
    Waiting,
    Pending,
    Claimed,
    Running,
    RetryPending,
    Paused,
    Success,
    Failure,
    Canceled,
}

/// How a task ended. `RetryPending` has none: a task that will be tried again tells its children nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    Success,
    Failure,
    Canceled,
}

impl Status {
    pub const ALL: [Status; 9] = [
        Status::Waiting,
        Status::Pending,
        Status::Claimed,
        Status::Running,
        Status::RetryPending,
        Status::Paused,
        Status::Success,
        Status::Failure,
        Status::Canceled,
    ];

    /// Written out without a wildcard: a new status has to say here whether it moves children.
    pub const fn outcome(self) -> Option<Outcome> {
        match self {
            Status::Success => Some(Outcome::Success),
            Status::Failure => Some(Outcome::Failure),
            Status::Canceled => Some(Outcome::Canceled),
            Status::Waiting
            | Status::Pending
            | Status::Claimed
            | Status::Running
            | Status::RetryPending
            | Status::Paused => None,
        }
    }

    pub const fn is_terminal(self) -> bool {
        self.outcome().is_some()
    }

    /// Somebody is executing it or about to: it has a holder and a deadline.
    pub const fn is_executing(self) -> bool {
        matches!(self, Status::Claimed | Status::Running)
    }

    /// The position in [`Status::ALL`], for arrays of counters.
    pub const fn index(self) -> usize {
        self as usize
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Status::Waiting => "waiting",
            Status::Pending => "pending",
            Status::Claimed => "claimed",
            Status::Running => "running",
            Status::RetryPending => "retry_pending",
            Status::Paused => "paused",
            Status::Success => "success",
            Status::Failure => "failure",
            Status::Canceled => "canceled",
        }
    }

    /// `RetryPending`, `retry_pending`, `RETRYPENDING`: the letters count, not their case or the underscore.
    pub fn parse(text: &str) -> Option<Status> {
        let letters = |s: &str| s.chars().filter(|c| *c != '_').collect::<String>().to_ascii_lowercase();
        let wanted = letters(text);
        Status::ALL.into_iter().find(|s| letters(s.as_str()) == wanted)
    }
}

impl Outcome {
    pub const fn is_success(self) -> bool {
        matches!(self, Outcome::Success)
    }
}

impl<'de> Deserialize<'de> for Status {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Status::parse(&text).ok_or_else(|| serde::de::Error::custom(format!("`{text}` is not a status")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_is_understood() {
        for status in Status::ALL {
            let pascal = serde_json::to_value(status).unwrap();
            let pascal = pascal.as_str().unwrap();
            for text in [pascal, status.as_str(), &pascal.to_uppercase(), &pascal.to_lowercase()] {
                assert_eq!(Status::parse(text), Some(status), "{text}");
            }
            assert_eq!(Status::ALL[status.index()], status);
        }
        assert_eq!(Status::parse("done"), None);
    }

    #[test]
    fn a_retrying_task_is_alive() {
        assert_eq!(Status::RetryPending.outcome(), None);
        assert_eq!(Status::ALL.iter().filter(|s| s.is_terminal()).count(), 3);
    }
}
