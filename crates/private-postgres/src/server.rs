//! The running server: start, readiness, supervision and stop.
//!
//! A liveness pipe connects the server to this process, which alone holds the writing end. When this process ends, even
//! if it is killed, the pipe closes and a watcher stops the server. No other process may inherit the writing end.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, ChildStdin};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::cluster;
use super::data_dir::DataDir;
use super::error::Error;
use super::log::Log;
use super::probe::Binaries;
use super::process::PidFile;
use super::{PORT, Settings};

/// Shell script that starts a watcher on the liveness pipe and then becomes the server.
///
/// The watcher is not a child of the server, because the server takes every child that ends for one of its own. A line
/// on the pipe ends the watcher without stopping the server.
const LAUNCH_SCRIPT: &str = r#"exec 3<&0 </dev/null
( (read _ <&3 || kill -INT $$) >/dev/null 2>&1 & )
exec "$@" 3<&-"#;

const LOG_CHECK_EVERY: Duration = Duration::from_secs(60);

/// Time for a live server to become ready. Recovery after a crash can take long.
const READY_WITHIN: Duration = Duration::from_secs(120);

/// Time for a restart. Processes of a killed server can hold its shared memory for a while, and no new server starts
/// before they have ended.
const RESTART_WITHIN: Duration = Duration::from_secs(30);
const STILL_IN_USE: &str = "shared memory block";
const RESTART_PAUSE_MAX: Duration = Duration::from_secs(4);

/// Limit of restarts: more crashes than this within the window are an error.
const CRASHES_MAX: usize = 20;
const CRASH_WINDOW: Duration = Duration::from_secs(300);

const STOP_WITHIN: Duration = Duration::from_secs(20);
const QUIT_WITHIN: Duration = Duration::from_secs(5);

/// A server and everything that a restart needs.
#[derive(Debug)]
pub struct Server {
    data_dir: DataDir,
    binaries: Binaries,
    socket_dir: PathBuf,
    options: Vec<String>,
    log: Log,
    running: Option<RunningServer>,
}

#[derive(Debug)]
struct RunningServer {
    child: Child,
    pid: Pid,
    liveness_pipe: ChildStdin,
}

impl Server {
    /// Prepares a server without starting it. The log of the last run stays beside the new one.
    pub fn new(data_dir: DataDir, binaries: Binaries, socket_dir: PathBuf, settings: &Settings) -> Result<Self, Error> {
        let log = Log::begin(&data_dir.path)?;
        let options = options(&socket_dir.to_string_lossy(), settings);
        Ok(Self { data_dir, binaries, socket_dir, options, log, running: None })
    }

    /// Starts the server and waits until it accepts connections. If the caller drops the future, [`Server::shut_down`]
    /// stops the server.
    async fn start(&mut self) -> Result<(), Error> {
        cluster::recover(&self.data_dir.cluster()).await?;
        self.clear_socket();
        // The system may have removed it as an old temporary file.
        self.data_dir.claim_socket_dir(&self.socket_dir).map_err(|error| self.start_error(error.to_string()))?;
        let log_start = self.log.size();
        let pid = self.spawn().map_err(|error| self.start_error(error.to_string()))?;
        let start = Instant::now();
        let mut log_at = Duration::from_secs(5);
        while !self.is_ready(pid) {
            if let Some(status) = self.exit_status() {
                self.dismiss_watcher().await;
                let reason = format!("it exited with {status}: {}", self.log.errors_since(log_start));
                return Err(self.start_error(reason));
            }
            if start.elapsed() > READY_WITHIN {
                self.shut_down().await;
                let reason = format!(
                    "it was not ready within {} s: {}",
                    READY_WITHIN.as_secs(),
                    self.log.errors_since(log_start)
                );
                return Err(self.start_error(reason));
            }
            if start.elapsed() > log_at {
                tracing::info!("PostgreSQL is still starting, probably recovering from a crash");
                log_at *= 2;
            }
            sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    /// Supervises the server until `stop` is set or dropped, or a restart fails.
    pub async fn supervise(mut self, mut stop: watch::Receiver<bool>, failed: watch::Sender<Option<String>>) {
        let mut crashes: Vec<Instant> = Vec::new();
        let mut log_check = tokio::time::interval(LOG_CHECK_EVERY);
        loop {
            let status = tokio::select! {
                _ = stop.wait_for(|stop| *stop) => break,
                _ = log_check.tick() => {
                    self.log.trim();
                    continue;
                }
                status = self.wait_for_exit() => status,
            };
            self.dismiss_watcher().await;
            tracing::error!(status, "private PostgreSQL exited unexpectedly: restarting it");
            crashes.retain(|crash| crash.elapsed() < CRASH_WINDOW);
            crashes.push(Instant::now());
            let outcome = if crashes.len() > CRASHES_MAX {
                Err(format!("it crashed {} times within {} s", crashes.len(), CRASH_WINDOW.as_secs()))
            } else {
                tokio::select! {
                    _ = stop.wait_for(|stop| *stop) => break,
                    outcome = self.start_with_retries(true) => outcome.map_err(|error| error.to_string()),
                }
            };
            match outcome {
                Ok(()) => tracing::warn!("private PostgreSQL ready again"),
                Err(reason) => {
                    tracing::error!(reason, "cannot restart the private PostgreSQL");
                    self.shut_down().await;
                    self.remove_socket_dir();
                    failed.send_replace(Some(reason));
                    return;
                }
            }
        }
        self.shut_down().await;
        self.remove_socket_dir();
    }

    /// Starts the server and retries for a while: after every failure if it has run before, otherwise only while an
    /// earlier server's shared memory is still in use.
    pub async fn start_with_retries(&mut self, has_run: bool) -> Result<(), Error> {
        let start = Instant::now();
        let mut pause = Duration::from_millis(100);
        loop {
            let error = match self.start().await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let retry = has_run || error.to_string().contains(STILL_IN_USE);
            if !retry || start.elapsed() > RESTART_WITHIN {
                return Err(error);
            }
            tracing::debug!(%error, "start failed: retrying");
            sleep(pause).await;
            pause = (pause * 2).min(RESTART_PAUSE_MAX);
        }
    }

    /// Removes the socket of a killed server.
    ///
    /// Its lock file names a process, like the pid file, and is as misleading once that number is reused. This process
    /// holds the lock on the data directory, so no other server uses the socket.
    fn clear_socket(&self) {
        for suffix in ["", ".lock"] {
            let name = format!(".s.PGSQL.{PORT}{suffix}");
            let _ = fs::remove_file(self.socket_dir.join(name));
        }
    }

    /// Stops the server if it runs: first with a fast shutdown, then with an immediate one, after which the next start
    /// recovers, then with SIGKILL.
    async fn shut_down(&mut self) {
        for (signal, patience) in [(Signal::INT, STOP_WITHIN), (Signal::QUIT, QUIT_WITHIN), (Signal::KILL, QUIT_WITHIN)]
        {
            let Some(running) = &mut self.running else {
                return;
            };
            if signal != Signal::INT {
                tracing::warn!(?signal, "PostgreSQL does not stop: sending another signal");
            }
            // The process has not been waited for, so the number still belongs to it.
            let _ = kill_process(running.pid, signal);
            if timeout(patience, running.child.wait()).await.is_ok() {
                self.dismiss_watcher().await;
            }
        }
    }

    /// Removes the directory of the socket. The server must have stopped.
    pub fn remove_socket_dir(&self) {
        self.clear_socket();
        let _ = fs::remove_dir(&self.socket_dir);
    }

    fn spawn(&mut self) -> io::Result<Pid> {
        let log = || self.log.handle().map(Stdio::from);
        let mut command = self.data_dir.user.command("/bin/sh");
        command
            .args(["-c", LAUNCH_SCRIPT, "sh"])
            .arg(self.binaries.dir.join("postgres"))
            .arg("-D")
            .arg(self.data_dir.cluster())
            .args(self.options.iter().flat_map(|option| ["-c", option]))
            .stdin(Stdio::piped())
            .stdout(log()?)
            .stderr(log()?)
            // Ctrl-C in the terminal must not reach the server: this process stops it later.
            .process_group(0)
            .kill_on_drop(false);
        let mut child = command.spawn()?;
        // Waiting for a child closes its input, so the liveness pipe is kept apart.
        let liveness_pipe = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed())).ok_or(io::ErrorKind::NotFound)?;
        self.running = Some(RunningServer { child, pid, liveness_pipe });
        Ok(pid)
    }

    fn is_ready(&self, pid: Pid) -> bool {
        fs::read_to_string(self.data_dir.cluster().join("postmaster.pid"))
            .ok()
            .and_then(|text| PidFile::parse(&text))
            .is_some_and(|file| file.ready && file.pid == pid.as_raw_nonzero().get())
    }

    async fn wait_for_exit(&mut self) -> String {
        match &mut self.running {
            Some(running) => describe(running.child.wait().await),
            None => "it was not running".to_owned(),
        }
    }

    fn exit_status(&mut self) -> Option<String> {
        let status = self.running.as_mut()?.child.try_wait().transpose()?;
        Some(describe(status))
    }

    /// Ends the watcher of a server that has exited. If the pipe were only closed, the watcher would signal a process
    /// number that may belong to another process.
    async fn dismiss_watcher(&mut self) {
        if let Some(mut running) = self.running.take() {
            let _ = running.liveness_pipe.write_all(b"\n").await;
        }
    }

    fn start_error(&self, reason: String) -> Error {
        Error::Start { path: self.data_dir.path.clone(), reason }
    }
}

fn describe(status: io::Result<ExitStatus>) -> String {
    status.map_or_else(|error| error.to_string(), |status| status.to_string())
}

/// Server settings as `name=value`. If a name occurs twice, the last value wins.
fn options(socket_dir: &str, settings: &Settings) -> Vec<String> {
    let on = if settings.durable { "on" } else { "off" };
    let socket_dir = format!("\"{}\"", socket_dir.replace('"', "\"\""));
    let port = PORT.to_string();
    let own = [
        ("listen_addresses", ""),
        ("port", &port),
        ("unix_socket_directories", &socket_dir),
        ("fsync", on),
        ("synchronous_commit", on),
        ("full_page_writes", on),
        ("max_connections", "100"),
        ("shared_buffers", "256MB"),
        ("max_wal_size", "4GB"),
        ("checkpoint_timeout", "15min"),
        ("wal_compression", "on"),
        ("timezone", "UTC"),
        ("log_timezone", "UTC"),
    ];
    let extra = settings.extra.iter();
    own.into_iter()
        .chain(extra.map(|(name, value)| (name.as_str(), value.as_str())))
        .map(|(name, value)| format!("{name}={value}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durability_sets_fsync() {
        let durable = options("/tmp/x", &Settings::new("app", "/srv"));
        assert!(durable.contains(&"fsync=on".to_owned()));
        let disposable = Settings { durable: false, ..Settings::new("app", "/srv") };
        assert!(options("/tmp/x", &disposable).contains(&"fsync=off".to_owned()));
    }

    #[test]
    fn extra_settings_override_the_built_in_ones() {
        let settings = Settings { extra: vec![("max_connections".into(), "7".into())], ..Settings::new("app", "/srv") };
        let options = options("/tmp/x", &settings);
        assert_eq!(options.last().map(String::as_str), Some("max_connections=7"));
    }

    #[test]
    fn the_socket_directory_is_quoted() {
        let options = options("/tmp/a,\"b", &Settings::new("app", "/srv"));
        assert!(options.contains(&"unix_socket_directories=\"/tmp/a,\"\"b\"".to_owned()));
    }
}
