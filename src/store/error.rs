//! What can go wrong with the database, sorted by what a caller can do about it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A failed statement or transaction. Cheap to clone: many may have waited for the same one.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The database cannot be reached or is not accepting work: try again later.
    #[error("the database is not available: {0}")]
    Unavailable(#[source] Arc<sqlx::Error>),
    /// A row or a lock that this needs is in other hands. It says nothing about the database or anybody else.
    #[error("locked by another transaction: {0}")]
    Busy(#[source] Arc<sqlx::Error>),
    /// Another transaction was preferred: try again at once.
    #[error("the transaction was broken off: {0}")]
    Transient(#[source] Arc<sqlx::Error>),
    /// Rows had changed between lock and write, which only a missing lock can bring about.
    #[error("{expected} rows were to change, {changed} did")]
    Guard { expected: usize, changed: usize },
    #[error("stored data cannot be read: {0}")]
    Corrupt(String),
    #[error("statement failed: {0}")]
    Statement(#[source] Arc<sqlx::Error>),
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub fn is_transient(&self) -> bool {
        matches!(self, Error::Transient(_) | Error::Guard { .. })
    }

    pub fn is_unavailable(&self) -> bool {
        matches!(self, Error::Unavailable(_))
    }

    pub fn is_busy(&self) -> bool {
        matches!(self, Error::Busy(_))
    }

    /// The task that was at it is gone.
    pub fn broken_off() -> Error {
        Error::Unavailable(Arc::new(sqlx::Error::WorkerCrashed))
    }

    /// Nothing was heard of the database for so long.
    pub fn too_late(limit: Duration) -> Error {
        let what = format!("no end after {} s", limit.as_secs_f64());
        Error::Unavailable(Arc::new(sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, what))))
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
        let has = |codes: &[&str]| codes.iter().any(|start| code.starts_with(start));
        let kind: fn(Arc<sqlx::Error>) -> Error = match &error {
            E::Io(_) | E::Tls(_) | E::Protocol(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed => {
                Error::Unavailable
            }
            // A lock that was not to be had in time.
            E::Database(_) if code == "55P03" => Error::Busy,
            // Deadlock, serialization failure; canceled by somebody or by a time limit that the server has for statements
            // or transactions.
            E::Database(_) if has(&["40P01", "40001", "57014", "25P03", "25P04"]) => Error::Transient,
            // Connection exceptions, out of some resource, shutting or starting up, read-only after a failover.
            E::Database(_) if has(&["08", "53", "57P", "25006"]) => Error::Unavailable,
            _ => Error::Statement,
        };
        kind(Arc::new(error))
    }
}
