//! A private PostgreSQL that another process runs: how it is found through its
//! data directory, and what is known of it later.
//!
//! Whoever joins a server never stops it, never restarts it and writes nothing
//! into its directory. The lock on the directory tells who owns it.

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

/// The owner of the directory may just be starting its server, or recovering
/// it from a crash, or may be about to end.
const OWNER_READY_WITHIN: Duration = Duration::from_secs(30);
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The private PostgreSQL of a data directory, run by this process or another.
#[derive(Debug)]
pub enum Private {
    Own(Embedded),
    Joined(Joined),
}

impl Private {
    /// Starts a server in the data directory, or joins the one that another
    /// process runs there.
    pub async fn open(settings: Settings) -> Result<Self, Error> {
        let start = Instant::now();
        let mut told = false;
        loop {
            let dir = match DataDir::acquire(&settings.data_dir).await {
                Ok(data_dir) => return Embedded::start_in(data_dir, settings).await.map(Self::Own),
                Err(Error::Locked { path }) => path,
                Err(error) => return Err(error),
            };
            if let Some(joined) = Joined::find(&dir).await {
                tracing::info!(data_dir = %dir.display(), "using the private PostgreSQL of another instance");
                return Ok(Self::Joined(joined));
            }
            if start.elapsed() > OWNER_READY_WITHIN {
                return Err(Error::Locked { path: dir });
            }
            if !told && start.elapsed() > Duration::from_secs(2) {
                tracing::info!("waiting for the PostgreSQL of the instance that holds {}", dir.display());
                told = true;
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// The URL to connect with.
    pub fn url(&self) -> &str {
        match self {
            Self::Own(embedded) => embedded.url(),
            Self::Joined(joined) => &joined.url,
        }
    }

    /// The directory really used.
    pub fn data_dir(&self) -> &Path {
        match self {
            Self::Own(embedded) => embedded.data_dir(),
            Self::Joined(joined) => &joined.data_dir,
        }
    }

    /// The version of the server; of one that was joined, the major version.
    pub fn version(&self) -> &str {
        match self {
            Self::Own(embedded) => embedded.version(),
            Self::Joined(joined) => &joined.version,
        }
    }

    /// Whether this process runs the server, and stops it in the end.
    pub fn is_own(&self) -> bool {
        matches!(self, Self::Own(_))
    }

    /// Resolves when a server of our own is beyond help. The server of another
    /// process may come back at any time, so its end is only told.
    pub async fn failed(&self) -> Error {
        match self {
            Self::Own(embedded) => embedded.failed().await,
            Self::Joined(joined) => joined.watch().await,
        }
    }

    /// Stops a server of our own, and leaves that of another process alone.
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
    /// The server in `dir`, if it is ready, alive and answers.
    async fn find(dir: &Path) -> Option<Self> {
        let (joined, socket) = Self::look(dir).await?;
        answers(&socket, &cluster_path(dir)).await.then_some(joined)
    }

    /// The server in `dir` as its own files tell of it, if it is ready and
    /// its process is one.
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

    /// Tells when the server goes and when it comes back. It is the same one
    /// to its clients if its owner starts it again in the same place.
    async fn watch(&self) -> ! {
        let mut there = true;
        loop {
            sleep(LOOK_EVERY).await;
            let found = Self::look(&self.data_dir).await.map(|(found, _)| found);
            if (found.as_ref() == Some(self)) == there {
                continue;
            }
            there = !there;
            let data_dir = self.data_dir.display();
            match found {
                Some(_) if there => tracing::info!(%data_dir, "the private PostgreSQL is back"),
                Some(_) => tracing::error!(
                    %data_dir,
                    "the private PostgreSQL listens elsewhere now: restart this instance"
                ),
                None => tracing::error!(
                    %data_dir,
                    "the private PostgreSQL has ended with the instance that runs it: no database until that is started again"
                ),
            }
        }
    }
}

/// Whether somebody listens on the socket, in a directory that only the
/// account of the cluster can have made.
async fn answers(socket: &Socket, cluster: &Path) -> bool {
    let (Ok(dir), Ok(cluster)) = (fs::symlink_metadata(&socket.dir), fs::metadata(cluster)) else {
        return false;
    };
    let path = socket.dir.join(format!(".s.PGSQL.{}", socket.port));
    dir.is_dir()
        && dir.uid() == cluster.uid()
        && matches!(timeout(ANSWER_WITHIN, UnixStream::connect(path)).await, Ok(Ok(_)))
}
