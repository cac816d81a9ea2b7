//! What can go wrong with the database, sorted by what a caller can do about it.

use std::io;
use std::time::Duration;

/// A failed statement or transaction.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The database cannot be reached or is not accepting work: try again later.
    #[error("the database is not available: {0}")]
    Unavailable(#[source] sqlx::Error),
    /// Another transaction was preferred: try again at once.
    #[error("the transaction was broken off: {0}")]
    Transient(#[source] sqlx::Error),
    /// Rows had changed between lock and write, which only a missing lock can bring about.
    #[error("{expected} rows were to change, {changed} did")]
    Guard { expected: usize, changed: usize },
    #[error("stored data cannot be read: {0}")]
    Corrupt(String),
    #[error("statement failed: {0}")]
    Statement(#[source] sqlx::Error),
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub fn is_transient(&self) -> bool {
        matches!(self, Error::Transient(_) | Error::Guard { .. })
    }

    pub fn is_unavailable(&self) -> bool {
        matches!(self, Error::Unavailable(_))
    }

    /// For others who waited for the same statement.
    #[must_use]
    pub fn copy(&self) -> Error {
        let same = || sqlx::Error::Protocol(self.to_string());
        match self {
            Error::Unavailable(_) => Error::Unavailable(same()),
            Error::Transient(_) => Error::Transient(same()),
            Error::Guard { expected, changed } => Error::Guard { expected: *expected, changed: *changed },
            Error::Corrupt(what) => Error::Corrupt(what.clone()),
            Error::Statement(_) => Error::Statement(same()),
        }
    }

    /// Whoever was at it is gone.
    pub fn broken_off() -> Error {
        Error::Unavailable(sqlx::Error::WorkerCrashed)
    }

    /// Nothing was heard of the database for so long.
    pub fn too_late(limit: Duration) -> Error {
        let what = format!("no end after {} s", limit.as_secs_f64());
        Error::Unavailable(sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, what)))
    }

    pub fn corrupt(what: impl std::fmt::Display) -> Error {
        Error::Corrupt(what.to_string())
    }
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Error {
        use sqlx::Error as E;
        let code =
            error.as_database_error().and_then(sqlx::error::DatabaseError::code).unwrap_or_default().into_owned();
        match &error {
            E::Io(_) | E::Tls(_) | E::Protocol(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed => {
                Error::Unavailable(error)
            }
            // Deadlock, serialization failure; canceled by somebody or by a time limit that the server has for statements
            // or transactions.
            E::Database(_) if ["40P01", "40001", "57014", "25P03", "25P04"].contains(&code.as_str()) => {
                Error::Transient(error)
            }
            // Connection exceptions, out of some resource, shutting or starting up, a lock not to be had, read-only
            // after a failover.
            E::Database(_)
                if ["08", "53", "57P"].iter().any(|class| code.starts_with(class))
                    || code == "55P03"
                    || code == "25006" =>
            {
                Error::Unavailable(error)
            }
            _ => Error::Statement(error),
        }
    }
}
