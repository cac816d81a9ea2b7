//! A real server from its first start to its end.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use private_postgres::{Embedded, Error, PrivatePostgres, Settings};
use rustix::process::{Pid, Signal, kill_process};
use tokio::net::UnixStream;

/// A data directory that is removed with the test.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        Dir(dir)
    }

    fn settings(&self) -> Settings {
        Settings { durable: false, ..Settings::new("private-postgres-test", &self.0) }
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Number of the server's process, once the server is ready.
fn ready_pid(data_dir: &Path) -> Option<i32> {
    let file = std::fs::read_to_string(data_dir.join("pgdata/postmaster.pid")).ok()?;
    let ready = file.lines().nth(7).is_some_and(|status| status.trim() == "ready");
    file.lines().next()?.parse().ok().filter(|_| ready)
}

async fn accepts_connections(socket_dir: &Path) -> bool {
    UnixStream::connect(socket_dir.join(".s.PGSQL.5432")).await.is_ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_server_is_restarted_and_a_stopped_one_leaves_no_socket() {
    let dir = Dir::new("restart");
    let server = Embedded::start(dir.settings()).await.unwrap();
    let (data_dir, socket_dir) = (server.data_dir().to_owned(), server.socket_dir().to_owned());
    assert!(accepts_connections(&socket_dir).await);
    assert!(server.url().ends_with("&sslmode=disable"), "{}", server.url());

    let first = ready_pid(&data_dir).expect("ready");
    kill_process(Pid::from_raw(first).unwrap(), Signal::KILL).unwrap();
    let start = Instant::now();
    // Before a restart the file may name this process, see `cluster::recover`: only a connection shows the new server.
    while ready_pid(&data_dir).is_none_or(|pid| pid == first) || !accepts_connections(&socket_dir).await {
        assert!(start.elapsed() < Duration::from_secs(60), "no new server");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    server.stop().await.unwrap();
    assert!(!socket_dir.exists() && ready_pid(&data_dir).is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_opener_joins_the_server_and_does_not_stop_it() {
    let dir = Dir::new("join");
    let owner = PrivatePostgres::open(dir.settings()).await.unwrap();
    assert!(matches!(Embedded::start(dir.settings()).await, Err(Error::Locked { .. })));

    let joined = PrivatePostgres::open(dir.settings()).await.unwrap();
    assert!(owner.is_own() && !joined.is_own());
    assert_eq!((joined.url(), joined.data_dir()), (owner.url(), owner.data_dir()));
    assert_eq!(owner.version().split('.').next(), Some(joined.version()));

    let pid = ready_pid(owner.data_dir());
    joined.stop().await.unwrap();
    assert_eq!(ready_pid(owner.data_dir()), pid, "the server still runs");
    owner.stop().await.unwrap();
}

#[tokio::test]
async fn unusable_directories_are_reported() {
    let dir = Dir::new("unusable");
    let bin_dir = Some(dir.0.join("nowhere"));
    let error = Embedded::start(Settings { bin_dir, ..dir.settings() }).await.unwrap_err();
    assert!(matches!(error, Error::BinDir { .. }), "{error}");

    std::fs::create_dir_all(dir.0.join("pgdata")).unwrap();
    std::fs::write(dir.0.join("pgdata/notes.txt"), "not a cluster").unwrap();
    let error = Embedded::start(dir.settings()).await.unwrap_err();
    assert!(matches!(error, Error::NotACluster { .. }), "{error}");
}
