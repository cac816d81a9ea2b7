//! Everything that can go wrong with the private PostgreSQL.
//!
//! Each message is one line that says what to change. It must never span
//! lines, because it is printed as the reason why the service stops.

use std::io;
use std::path::PathBuf;

/// Why the private PostgreSQL is not there.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot use the data directory {} (REPRISE_DATA_DIR): {source}", path.display())]
    DataDir { path: PathBuf, source: io::Error },

    #[error(
        "the data directory {} is out of reach of the user {user} that PostgreSQL runs as: make its parents accessible or set another REPRISE_DATA_DIR",
        path.display()
    )]
    Unreachable { path: PathBuf, user: String },

    #[error(
        "the directory {} is not a PostgreSQL cluster although it is not empty: move it away or set another REPRISE_DATA_DIR",
        path.display()
    )]
    NotACluster { path: PathBuf },

    #[error(
        "another service holds the data directory {}, and its PostgreSQL does not answer: stop it, or set another REPRISE_DATA_DIR",
        path.display()
    )]
    Locked { path: PathBuf },

    #[error("PostgreSQL refuses to run as root and {reason}: start the service as another user or set DATABASE_URL")]
    User { reason: String },

    #[error("POSTGRES_BIN_DIR={}: {reason}", path.display())]
    BinDir { path: PathBuf, reason: String },

    #[error(
        "no PostgreSQL 14 or newer was found and none could be fetched ({reason}): install PostgreSQL, set DATABASE_URL, or run `docker compose up`"
    )]
    NoBinaries { reason: String },

    #[error(
        "the data directory {} belongs to PostgreSQL {cluster}, which was not found (found: {found}): install PostgreSQL {cluster}, point POSTGRES_BIN_DIR to it, or set another REPRISE_DATA_DIR",
        path.display()
    )]
    Version { path: PathBuf, cluster: u32, found: String },

    #[error("initdb could not make a cluster in {} (REPRISE_DATA_DIR): {reason}", path.display())]
    Initdb { path: PathBuf, reason: String },

    #[error(
        "no directory for the socket of PostgreSQL can be made: set TMPDIR to a short path that everyone may use, or set DATABASE_URL"
    )]
    SocketDir,

    #[error(
        "an earlier PostgreSQL (process {pid}) on the data directory {} does not end: stop it and start again",
        path.display()
    )]
    Orphan { path: PathBuf, pid: i32 },

    #[error("PostgreSQL did not start in {} (REPRISE_DATA_DIR): {reason}", path.display())]
    Start { path: PathBuf, reason: String },

    #[error("the private PostgreSQL is gone: {reason}")]
    Gone { reason: String },
}
