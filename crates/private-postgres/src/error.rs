//! Errors of the private PostgreSQL.
//!
//! Each message is a single line: what failed, where, and what helps. Messages name no setting of the application,
//! because the crate does not know how the application reads its settings.

use std::io;
use std::path::PathBuf;

/// Reason why the private PostgreSQL is not available.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory in the data directory cannot be read, created or written.
    #[error("cannot use the data directory {}: {source}", path.display())]
    DataDir { path: PathBuf, source: io::Error },

    /// The account that runs PostgreSQL cannot enter the data directory.
    #[error(
        "user {user}, who runs PostgreSQL, cannot enter the data directory {}: make its parent directories accessible",
        path.display()
    )]
    Unreachable { path: PathBuf, user: String },

    /// The directory of the cluster holds something else.
    #[error("{} is not empty and not a PostgreSQL cluster: move it away", path.display())]
    NotACluster { path: PathBuf },

    /// Another process holds the lock on the data directory, and its server cannot be joined.
    #[error(
        "another process holds the data directory {}, and its PostgreSQL does not answer: stop that process",
        path.display()
    )]
    Locked { path: PathBuf },

    /// The process runs as root, and no other account can run the server.
    #[error("PostgreSQL refuses to run as root, and {reason}: start the service as another user")]
    User { reason: String },

    /// [`Settings::bin_dir`](crate::Settings::bin_dir) holds no usable binaries.
    #[error("cannot use the PostgreSQL in {}: {reason}", path.display())]
    BinDir { path: PathBuf, reason: String },

    /// The machine has no usable PostgreSQL, and none could be fetched.
    #[error("found no PostgreSQL 14 or newer and could not fetch one ({reason}): install PostgreSQL")]
    NoBinaries { reason: String },

    /// No binaries of the cluster's major version were found.
    #[error(
        "the data directory {} needs PostgreSQL {cluster} (found: {found}): install PostgreSQL {cluster}",
        path.display()
    )]
    Version { path: PathBuf, cluster: u32, found: String },

    /// `initdb` failed.
    #[error("cannot create a PostgreSQL cluster in {}: {reason}", path.display())]
    Initdb { path: PathBuf, reason: String },

    /// No candidate for the socket directory is short enough and owned by the server's account.
    #[error("cannot create a directory for PostgreSQL's socket: set TMPDIR to a short path that every user may use")]
    SocketDir,

    /// A server of an earlier run does not stop.
    #[error(
        "an earlier PostgreSQL (process {pid}) still runs in the data directory {} and does not stop: stop it manually",
        path.display()
    )]
    Orphan { path: PathBuf, pid: i32 },

    /// The server did not become ready.
    #[error("PostgreSQL did not start in {}: {reason}", path.display())]
    Start { path: PathBuf, reason: String },

    /// The server stopped and could not be restarted.
    #[error("the private PostgreSQL stopped and could not be restarted: {reason}")]
    Gone { reason: String },
}
