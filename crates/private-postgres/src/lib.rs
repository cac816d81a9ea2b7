//! The private PostgreSQL that the service runs when no `DATABASE_URL` is set.
//!
//! This module owns the public face of the launcher: its settings, its handle
//! and the connection URL. It must never speak SQL, never listen on a network
//! port, and never leave a server running after the service has gone.

mod binaries;
mod cluster;
mod data_dir;
mod error;
mod fetch;
mod joined;
mod log;
mod package;
mod process;
mod server;
mod user;

use std::future::Future;
use std::path::{Path, PathBuf};

use tokio::sync::watch;
use tokio::task::JoinHandle;

pub use error::Error;
pub use joined::{Joined, Private};

use data_dir::DataDir;
use server::Server;

/// The port that names the socket file; nothing listens on it over TCP.
const PORT: u16 = 5432;

/// What the caller decides about the private server.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where the cluster lives (`REPRISE_DATA_DIR`).
    pub data_dir: PathBuf,
    /// Where `postgres` and `initdb` are (`POSTGRES_BIN_DIR`); nothing else is
    /// looked at when this is set.
    pub bin_dir: Option<PathBuf>,
    /// Survive a power failure. Off only for servers whose data is disposable.
    pub durable: bool,
    /// Further settings of the server, which win over the built-in ones.
    pub extra: Vec<(String, String)>,
    /// Look for a PostgreSQL installed on the machine; when off, only cached
    /// or freshly fetched binaries are used.
    pub search_system: bool,
}

impl Settings {
    /// A durable server in `data_dir` with everything else left to discovery.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self { data_dir: data_dir.into(), bin_dir: None, durable: true, extra: Vec::new(), search_system: true }
    }
}

/// A running private PostgreSQL, restarted when it dies and stopped on
/// [`Embedded::stop`], on drop, or when the service itself is killed.
#[derive(Debug)]
pub struct Embedded {
    url: String,
    data_dir: PathBuf,
    socket_dir: PathBuf,
    version: String,
    stop: watch::Sender<bool>,
    failed: watch::Receiver<Option<String>>,
    supervisor: JoinHandle<()>,
}

impl Embedded {
    /// Finds binaries, makes the cluster on the first run, starts the server
    /// and returns once it accepts connections.
    pub async fn start(settings: Settings) -> Result<Self, Error> {
        Self::start_in(DataDir::acquire(&settings.data_dir).await?, settings).await
    }

    async fn start_in(data_dir: DataDir, settings: Settings) -> Result<Self, Error> {
        cluster::remove_unfinished_clusters(&data_dir.path);
        let cluster_major = cluster::major(&data_dir.cluster())?;
        let binaries = binaries::locate(&settings, &data_dir, cluster_major).await?;
        if cluster_major.is_none() {
            cluster::initialise(&data_dir, &binaries, settings.durable).await?;
        }
        let path = data_dir.path.clone();
        let socket_dir = data_dir.socket_dir().await?;
        let url = connection_url(&socket_dir, PORT);
        let version = binaries.version.clone();

        let mut server = Server::new(data_dir, binaries, socket_dir.clone(), &settings)?;
        if let Err(error) = server.start_with_retries(false).await {
            server.remove_socket_dir();
            return Err(error);
        }
        tracing::info!(
            data_dir = %path.display(),
            version,
            "the private PostgreSQL is ready"
        );

        let (stop, stopped) = watch::channel(false);
        let (fail, failed) = watch::channel(None);
        let supervisor = tokio::spawn(server.supervise(stopped, fail));
        Ok(Self { url, data_dir: path, socket_dir, version, stop, failed, supervisor })
    }

    /// The URL to connect with, through a socket only this user can open.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The directory really used; it differs from the wanted one when the
    /// server's user cannot reach that.
    pub fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// The directory of the socket.
    pub fn socket_dir(&self) -> &Path {
        &self.socket_dir
    }

    /// The version of the server, such as `18.4`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Resolves when the server has died and cannot be restarted. The future
    /// borrows nothing, so it can be awaited while the handle is kept for
    /// [`Embedded::stop`].
    pub fn failed(&self) -> impl Future<Output = Error> + Send + use<> {
        let mut failed = self.failed.clone();
        async move {
            let reason = match failed.wait_for(Option::is_some).await {
                Ok(reason) => reason.clone().unwrap_or_default(),
                Err(_) => "nothing watches over it any more".to_owned(),
            };
            Error::Gone { reason }
        }
    }

    /// Stops the server: clients are disconnected, everything committed is
    /// written, and it returns once the process has ended. Close connection
    /// pools first, or their users see broken connections.
    pub async fn stop(self) -> Result<(), Error> {
        // A supervisor that has given up is no longer listening, and there is
        // nothing left to stop then.
        let _ = self.stop.send(true);
        self.supervisor.await.map_err(|source| Error::Gone { reason: source.to_string() })
    }
}

/// The port and the TLS mode are spelled out because clients otherwise take
/// them from `PGPORT` and `PGSSLMODE`, which concern some other server.
fn connection_url(socket_dir: &Path, port: u16) -> String {
    format!(
        "postgres://postgres@localhost:{port}/postgres?host={}&sslmode=disable",
        percent_encode(&socket_dir.to_string_lossy())
    )
}

fn percent_encode(text: &str) -> String {
    use std::fmt::Write as _;

    let mut encoded = String::with_capacity(text.len() * 2);
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_url_encodes_the_socket_directory() {
        assert_eq!(
            connection_url(Path::new("/tmp/a b&c=ü"), 5432),
            "postgres://postgres@localhost:5432/postgres?host=%2Ftmp%2Fa%20b%26c%3D%C3%BC&sslmode=disable"
        );
    }

    #[test]
    fn unreserved_characters_stay() {
        assert_eq!(percent_encode("aZ09-._~"), "aZ09-._~");
    }
}
