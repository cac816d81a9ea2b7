//! The statuses of a task, and which of them are outcomes. Only an outcome moves the children of a task.

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

// The database stores it in `snake_case`.
/// The status of a task. Answers write it in PascalCase. Requests may use any letter case, with or without underscores.
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

/// How a task ended. `RetryPending` has no outcome: a task that will be retried does not move its children.
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

    /// Returns how a task in this status ended. The match has no wildcard, so a new status must declare here whether it
    /// moves children.
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

    /// Whether a task in this status is executed or about to be: it has a holder and a deadline.
    pub const fn is_executing(self) -> bool {
        matches!(self, Status::Claimed | Status::Running)
    }

    /// Returns the position in [`Status::ALL`], for arrays of counters.
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

    /// Parses a status, ignoring letter case and underscores: `RetryPending`, `retry_pending`, `RETRYPENDING`.
    pub fn parse(text: &str) -> Option<Status> {
        let letters = |s: &str| s.chars().filter(|c| *c != '_').collect::<String>().to_ascii_lowercase();
        let wanted = letters(text);
        Status::ALL.into_iter().find(|s| letters(s.as_str()) == wanted)
    }
}

/// The status for which a request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Until {
    /// Any terminal status.
    Terminal,
    Status(Status),
}

impl Until {
    /// Parses `terminal` or a status.
    pub fn parse(text: &str) -> Option<Until> {
        if text.eq_ignore_ascii_case("terminal") {
            return Some(Until::Terminal);
        }
        Status::parse(text).map(Until::Status)
    }

    /// Whether a task in this status ends the wait: it has the status, or it has ended in another one.
    pub fn is_settled_by(self, status: Status) -> bool {
        status.is_terminal() || self == Until::Status(status)
    }

    /// Returns the status, if it is a certain one.
    pub const fn status(self) -> Option<Status> {
        match self {
            Until::Terminal => None,
            Until::Status(status) => Some(status),
        }
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
    fn every_spelling_of_a_status_is_parsed() {
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
    fn a_wait_ends_at_its_status_and_at_every_end() {
        let running = Until::parse("RUNNING").unwrap();
        assert_eq!((running, Until::parse("Terminal")), (Until::Status(Status::Running), Some(Until::Terminal)));
        assert_eq!(Until::parse("done"), None);
        for status in Status::ALL {
            assert_eq!(Until::Terminal.is_settled_by(status), status.is_terminal(), "{status:?}");
            assert_eq!(running.is_settled_by(status), status.is_terminal() || status == Status::Running, "{status:?}");
        }
    }

    #[test]
    fn retry_pending_is_not_an_outcome() {
        assert_eq!(Status::RetryPending.outcome(), None);
        assert_eq!(Status::ALL.iter().filter(|s| s.is_terminal()).count(), 3);
    }
}
