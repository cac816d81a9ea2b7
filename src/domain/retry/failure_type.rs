//! The classes of failures, and which of them are final. HTTP answers are classified here.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The class of a failure.
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

    /// Whether a retry cannot help. Unknown failures are not final: a useless retry is better than a lost task.
    pub const fn is_final(self) -> bool {
        matches!(self, FailureType::ValidationError | FailureType::AuthenticationError | FailureType::Dependency)
    }

    /// Classifies an answer to `on_start` that was not 2xx.
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
