//! A private PostgreSQL that another process runs: how to find it through its data directory, and how to watch it.
//!
//! A process that joins a server must never stop it, restart it or write into its directory. The process that holds the
//! lock on the directory owns the server.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

use super::cluster;
use super::data_dir::{DataDir, cluster_path};
use super::error::Error;
use super::process::{PidFile, PidOwner, Socket, pid_owner};
use super::{Embedded, Settings, connection_url};

/// Time for the owner of the directory to become ready: it may be starting its server, recovering it from a crash, or
/// about to end.
const OWNER_READY_WITHIN: Duration = Duration::from_secs(30);
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The private PostgreSQL of a data directory, run by this process or by another one.
#[derive(Debug)]
pub enum PrivatePostgres {
    /// This process runs the server.
    Own(Embedded),
    /// Another process runs the server.
    Joined(Joined),
}

impl PrivatePostgres {
    /// Starts a server in the data directory, or joins the server that another process runs there.
    pub async fn open(settings: Settings) -> Result<Self, Error> {
        let start = Instant::now();
        let mut logged = false;
        loop {
            let dir = match DataDir::acquire(&settings.app, &settings.data_dir).await {
                Ok(data_dir) => return Embedded::start_in(data_dir, settings).await.map(Self::Own),
                Err(Error::Locked { path }) => path,
                Err(error) => return Err(error),
            };
            if let Some(joined) = Joined::find(&dir).await {
                tracing::info!(data_dir = %dir.display(), "joined the private PostgreSQL of another process");
                return Ok(Self::Joined(joined));
            }
            if start.elapsed() > OWNER_READY_WITHIN {
                return Err(Error::Locked { path: dir });
            }
            if !logged && start.elapsed() > Duration::from_secs(2) {
                tracing::info!(data_dir = %dir.display(), "waiting for the private PostgreSQL of another process");
                logged = true;
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Connection URL.
    pub fn url(&self) -> &str {
        match self {
            Self::Own(embedded) => embedded.url(),
            Self::Joined(joined) => &joined.url,
        }
    }

    /// Data directory in use.
    pub fn data_dir(&self) -> &Path {
        match self {
            Self::Own(embedded) => embedded.data_dir(),
            Self::Joined(joined) => &joined.data_dir,
        }
    }

    /// Version of the server. For a joined server, only the major version.
    pub fn version(&self) -> &str {
        match self {
            Self::Own(embedded) => embedded.version(),
            Self::Joined(joined) => &joined.version,
        }
    }

    /// Whether this process runs the server and stops it.
    pub fn is_own(&self) -> bool {
        matches!(self, Self::Own(_))
    }

    /// Resolves when this process's server has crashed and cannot be restarted.
    ///
    /// For a joined server it never resolves: its owner may restart it at any time, so its end is only logged.
    pub async fn failed(&self) -> Error {
        match self {
            Self::Own(embedded) => embedded.failed().await,
            Self::Joined(joined) => joined.watch().await,
        }
    }

    /// Stops the server if this process runs it. A joined server keeps running.
    pub async fn stop(self) -> Result<(), Error> {
        match self {
            Self::Own(embedded) => embedded.stop().await,
            Self::Joined(_) => Ok(()),
        }
    }
}

/// A server that another process runs.
#[derive(Debug, PartialEq, Eq)]
pub struct Joined {
    url: String,
    data_dir: PathBuf,
    version: String,
}

impl Joined {
    /// Finds the server in `dir` if it is ready and accepts connections.
    async fn find(dir: &Path) -> Option<Self> {
        let (joined, socket) = Self::look(dir).await?;
        answers(&socket, &cluster_path(dir)).await.then_some(joined)
    }

    /// Reads the server's files in `dir`. Returns `None` unless the server is ready and its process exists.
    async fn look(dir: &Path) -> Option<(Self, Socket)> {
        let cluster = cluster_path(dir);
        let file = PidFile::parse(&fs::read_to_string(cluster.join("postmaster.pid")).ok()?)?;
        let socket = file.socket.filter(|_| file.ready)?;
        if pid_owner(file.pid, &cluster).await != PidOwner::Server {
            return None;
        }
        let version = cluster::major(&cluster).ok()??.to_string();
        let url = connection_url(&socket.dir, socket.port);
        Some((Self { url, data_dir: dir.to_owned(), version }, socket))
    }

    /// Logs when the server stops and when it returns. Clients can use a restarted server if its URL is the same.
    async fn watch(&self) -> ! {
        let mut available = true;
        loop {
            sleep(LOOK_EVERY).await;
            let found = Self::look(&self.data_dir).await.map(|(found, _)| found);
            if (found.as_ref() == Some(self)) == available {
                continue;
            }
            available = !available;
            let data_dir = self.data_dir.display();
            match found {
                Some(_) if available => tracing::info!(%data_dir, "private PostgreSQL available again"),
                Some(_) => tracing::error!(
                    %data_dir,
                    "private PostgreSQL listens on another socket now: restart this process"
                ),
                None => tracing::error!(
                    %data_dir,
                    "private PostgreSQL stopped with the process that ran it: no database until one is started there again"
                ),
            }
        }
    }
}

/// Whether a server accepts connections on the socket. The socket's directory must belong to the cluster's account, so
/// that no other user can have created it.
async fn answers(socket: &Socket, cluster: &Path) -> bool {
    let (Ok(dir), Ok(cluster)) = (fs::symlink_metadata(&socket.dir), fs::metadata(cluster)) else {
        return false;
    };
    let path = socket.dir.join(format!(".s.PGSQL.{}", socket.port));
    dir.is_dir()
        && dir.uid() == cluster.uid()
        && matches!(timeout(ANSWER_WITHIN, UnixStream::connect(path)).await, Ok(Ok(_)))
}
