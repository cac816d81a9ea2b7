//! Errors of the store, sorted by what a caller can do about them. Maps PostgreSQL error codes to these kinds; it never
//! chooses an answer for a client.

use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A failed statement or transaction. Cheap to clone, because many requests may have waited for the same transaction.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// PostgreSQL cannot be reached or accepts no work: retry later.
    #[error("the database is not available: {0}")]
    Unavailable(#[source] Arc<sqlx::Error>),
    /// Another transaction holds a row or lock that this one needs. The database itself is fine.
    #[error("a row or lock is held by another transaction: {0}")]
    Busy(#[source] Arc<sqlx::Error>),
    /// PostgreSQL aborted the transaction in favor of another one: repeat it at once.
    #[error("PostgreSQL aborted the transaction: {0}")]
    Transient(#[source] Arc<sqlx::Error>),
    /// Rows changed between lock and write, which only a missing lock allows.
    #[error("expected to change {expected} rows, but changed {changed}")]
    Guard { expected: usize, changed: usize },
    #[error("invalid data in the database: {0}")]
    Corrupt(String),
    #[error("statement failed: {0}")]
    Statement(#[source] Arc<sqlx::Error>),
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Whether repeating the transaction at once may succeed.
    pub fn is_transient(&self) -> bool {
        matches!(self, Error::Transient(_) | Error::Guard { .. })
    }

    pub fn is_unavailable(&self) -> bool {
        matches!(self, Error::Unavailable(_))
    }

    pub fn is_busy(&self) -> bool {
        matches!(self, Error::Busy(_))
    }

    /// The work was aborted before it had a result.
    pub fn aborted() -> Error {
        Error::Unavailable(Arc::new(sqlx::Error::WorkerCrashed))
    }

    /// The database did not answer within `limit`.
    pub fn timed_out(limit: Duration) -> Error {
        let what = format!("timed out after {} s", limit.as_secs_f64());
        Error::Unavailable(Arc::new(sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, what))))
    }

    /// A stored value cannot be read as what its column holds.
    pub fn corrupt(what: impl std::fmt::Display) -> Error {
        Error::Corrupt(what.to_string())
    }
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Error {
        use sqlx::Error as E;
        let code =
            error.as_database_error().and_then(sqlx::error::DatabaseError::code).unwrap_or_default().into_owned();
        let has = |codes: &[&str]| codes.iter().any(|start| code.starts_with(start));
        let kind: fn(Arc<sqlx::Error>) -> Error = match &error {
            E::Io(_) | E::Tls(_) | E::Protocol(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed => {
                Error::Unavailable
            }
            // Lock timeout.
            E::Database(_) if code == "55P03" => Error::Busy,
            // Deadlock and serialization failure; statements canceled by an operator or by a time limit of the server.
            E::Database(_) if has(&["40P01", "40001", "57014", "25P03", "25P04"]) => Error::Transient,
            // Connection failure, insufficient resources, shutdown or start-up, read-only after a failover.
            E::Database(_) if has(&["08", "53", "57P", "25006"]) => Error::Unavailable,
            _ => Error::Statement,
        };
        kind(Arc::new(error))
    }
}
