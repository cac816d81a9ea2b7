#![doc = include_str!("../README.md")]

mod binaries;
mod cluster;
mod data_dir;
mod error;
mod fetch;
mod joined;
mod log;
mod package;
mod probe;
mod process;
mod server;
mod user;

use std::future::Future;
use std::path::{Path, PathBuf};

use tokio::sync::watch;
use tokio::task::JoinHandle;

pub use error::Error;
pub use joined::{Joined, PrivatePostgres};

use data_dir::DataDir;
use server::Server;

/// Port in the name of the socket file. The server does not listen on TCP.
const PORT: u16 = 5432;

/// Settings of a private server.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Name of the application, a single path component. The socket directory and the fallback data directories
    /// carry it.
    pub app: String,
    /// Directory that holds the cluster, the server's log and fetched binaries.
    pub data_dir: PathBuf,
    /// Directory of `postgres` and `initdb`. If set, the crate looks nowhere else.
    pub bin_dir: Option<PathBuf>,
    /// Whether committed data survives a power failure. Turn it off only if the data is disposable.
    pub durable: bool,
    /// Server settings as name and value. They override the built-in ones.
    pub extra: Vec<(String, String)>,
    /// Whether to look for a PostgreSQL installed on the machine. If not, the crate uses only binaries it fetched.
    pub search_system: bool,
}

impl Settings {
    /// Settings of a durable server in `data_dir` that uses the first suitable binaries.
    pub fn new(app: impl Into<String>, data_dir: impl Into<PathBuf>) -> Self {
        Self {
            app: app.into(),
            data_dir: data_dir.into(),
            bin_dir: None,
            durable: true,
            extra: Vec::new(),
            search_system: true,
        }
    }
}

/// A server that this process runs.
///
/// A background task restarts the server after a crash. The server stops on [`Embedded::stop`], on drop, or when this
/// process ends, even if it is killed.
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
    /// Finds binaries, creates the cluster on the first run, starts the server and waits until it accepts connections.
    pub async fn start(settings: Settings) -> Result<Self, Error> {
        Self::start_in(DataDir::acquire(&settings.app, &settings.data_dir).await?, settings).await
    }

    async fn start_in(data_dir: DataDir, settings: Settings) -> Result<Self, Error> {
        cluster::remove_unfinished_clusters(&data_dir.path);
        let cluster_major = cluster::major(&data_dir.cluster())?;
        let binaries = binaries::locate(&settings, &data_dir, cluster_major).await?;
        if cluster_major.is_none() {
            cluster::initialise(&data_dir, &binaries, settings.durable).await?;
        }
        let path = data_dir.path.clone();
        let socket_dir = data_dir.socket_dir(&settings.app).await?;
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
            "private PostgreSQL ready"
        );

        let (stop, stopped) = watch::channel(false);
        let (fail, failed) = watch::channel(None);
        let supervisor = tokio::spawn(server.supervise(stopped, fail));
        Ok(Self { url, data_dir: path, socket_dir, version, stop, failed, supervisor })
    }

    /// Connection URL, through a socket that only the server's account and root can open.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Data directory in use. It differs from [`Settings::data_dir`] if the server's account cannot enter that.
    pub fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// Directory of the socket.
    pub fn socket_dir(&self) -> &Path {
        &self.socket_dir
    }

    /// Version of the server, such as `18.4`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Resolves when the server has crashed and cannot be restarted.
    ///
    /// The future borrows nothing: the caller can await it and keep the handle for [`Embedded::stop`].
    pub fn failed(&self) -> impl Future<Output = Error> + Send + use<> {
        let mut failed = self.failed.clone();
        async move {
            let reason = match failed.wait_for(Option::is_some).await {
                Ok(reason) => reason.clone().unwrap_or_default(),
                Err(_) => "its supervisor ended".to_owned(),
            };
            Error::Gone { reason }
        }
    }

    /// Stops the server and waits until its process has ended.
    ///
    /// The server disconnects its clients and writes everything that was committed. Close connection pools first, or
    /// their users see broken connections.
    pub async fn stop(self) -> Result<(), Error> {
        // Sending fails only if the supervisor has given up. Then no server runs.
        let _ = self.stop.send(true);
        self.supervisor.await.map_err(|source| Error::Gone { reason: source.to_string() })
    }
}

/// Connection URL for a socket directory.
///
/// It names the port and the TLS mode, because clients otherwise take them from `PGPORT` and `PGSSLMODE`, which are
/// meant for another server.
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
