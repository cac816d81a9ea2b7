//! The running server: start, readiness, supervision and stop.
//!
//! The server hangs on a liveness pipe, whose other end only the service holds:
//! when the service dies, however it dies, the pipe closes and the server is
//! told to stop. Nothing here may hand that end of the pipe to anyone else.

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

use super::binaries::Binaries;
use super::cluster;
use super::data_dir::DataDir;
use super::error::Error;
use super::log::Log;
use super::process::PidFile;
use super::{PORT, Settings};

/// Becomes the server, after leaving behind a watcher that reads the liveness pipe.
/// The watcher is nobody's child, since the server takes an unknown child that
/// dies for one of its own; a line on the liveness pipe sends it away without harm.
const LAUNCH_SCRIPT: &str = r#"exec 3<&0 </dev/null
( (read _ <&3 || kill -INT $$) >/dev/null 2>&1 & )
exec "$@" 3<&-"#;

const LOG_CHECK_EVERY: Duration = Duration::from_secs(60);

/// Recovery after a crash can take long; the server is given this much time as
/// long as it is alive.
const READY_WITHIN: Duration = Duration::from_secs(120);

/// Processes of a killed server can hold its memory for a while, and no new
/// server starts before they are gone.
const RESTART_WITHIN: Duration = Duration::from_secs(30);
const STILL_IN_USE: &str = "shared memory block";
const RESTART_PAUSE_MAX: Duration = Duration::from_secs(4);

/// A server that dies this often within this time is not worth restarting.
const CRASHES_MAX: usize = 20;
const CRASH_WINDOW: Duration = Duration::from_secs(300);

const STOP_WITHIN: Duration = Duration::from_secs(20);
const QUIT_WITHIN: Duration = Duration::from_secs(5);

/// A server and all it needs to be started again.
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
    /// Prepares a server without starting it. The log of the last run is kept
    /// beside the new one.
    pub fn new(data_dir: DataDir, binaries: Binaries, socket_dir: PathBuf, settings: &Settings) -> Result<Self, Error> {
        let log = Log::begin(&data_dir.path)?;
        let options = options(&socket_dir.to_string_lossy(), settings);
        Ok(Self { data_dir, binaries, socket_dir, options, log, running: None })
    }

    /// Starts the server and waits until it accepts connections. When this is
    /// cancelled, [`Server::shut_down`] ends what has been started.
    async fn start(&mut self) -> Result<(), Error> {
        cluster::recover(&self.data_dir.cluster()).await?;
        self.clear_socket();
        // It may have been cleared away since, as old temporary files are.
        self.data_dir.claim_socket_dir(&self.socket_dir).map_err(|error| self.start_error(error.to_string()))?;
        let log_start = self.log.size();
        let pid = self.spawn().map_err(|error| self.start_error(error.to_string()))?;
        let start = Instant::now();
        let mut mention_at = Duration::from_secs(5);
        while !self.is_ready(pid) {
            if let Some(status) = self.exit_status() {
                self.dismiss_watcher().await;
                let reason = format!("it ended with {status}: {}", self.log.errors_since(log_start));
                return Err(self.start_error(reason));
            }
            if start.elapsed() > READY_WITHIN {
                self.shut_down().await;
                let reason =
                    format!("it is not ready after {} s: {}", READY_WITHIN.as_secs(), self.log.errors_since(log_start));
                return Err(self.start_error(reason));
            }
            if start.elapsed() > mention_at {
                tracing::info!("PostgreSQL is still starting, most likely after a crash");
                mention_at *= 2;
            }
            sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    /// Watches over the server until it is told to stop or is beyond help. The
    /// handle being dropped counts as being told.
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
            tracing::error!("the private PostgreSQL ended unexpectedly ({status}); restarting it");
            crashes.retain(|crash| crash.elapsed() < CRASH_WINDOW);
            crashes.push(Instant::now());
            let outcome = if crashes.len() > CRASHES_MAX {
                Err(format!("it has ended {} times in a row", crashes.len()))
            } else {
                tokio::select! {
                    _ = stop.wait_for(|stop| *stop) => break,
                    outcome = self.start_with_retries(true) => outcome.map_err(|error| error.to_string()),
                }
            };
            match outcome {
                Ok(()) => tracing::warn!("the private PostgreSQL is ready again"),
                Err(reason) => {
                    tracing::error!("the private PostgreSQL cannot be restarted: {reason}");
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

    /// Starts the server, trying again for a while when it fails: after any
    /// failure if it has run before, else only after one that passes by itself.
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
            tracing::debug!("{error}");
            sleep(pause).await;
            pause = (pause * 2).min(RESTART_PAUSE_MAX);
        }
    }

    /// Removes the socket of a killed server. Its lock file names a process as
    /// the pid file does, and is just as misleading once that number is reused;
    /// with the lock on the data directory held, nobody else uses it.
    fn clear_socket(&self) {
        for suffix in ["", ".lock"] {
            let name = format!(".s.PGSQL.{PORT}{suffix}");
            let _ = fs::remove_file(self.socket_dir.join(name));
        }
    }

    /// Stops the server if it runs: kindly, then at the cost of a recovery at
    /// the next start, then by force.
    async fn shut_down(&mut self) {
        for (signal, patience) in [(Signal::INT, STOP_WITHIN), (Signal::QUIT, QUIT_WITHIN), (Signal::KILL, QUIT_WITHIN)]
        {
            let Some(running) = &mut self.running else {
                return;
            };
            if signal != Signal::INT {
                tracing::warn!("PostgreSQL does not stop; sending it {signal:?}");
            }
            // The process is not collected yet, so the number is still its.
            let _ = kill_process(running.pid, signal);
            if timeout(patience, running.child.wait()).await.is_ok() {
                self.dismiss_watcher().await;
            }
        }
    }

    /// Removes the directory of the socket when no server runs any more.
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
            // Ctrl-C in the terminal is for the service, which stops the
            // server when it no longer needs it.
            .process_group(0)
            .kill_on_drop(false);
        let mut child = command.spawn()?;
        // Waiting for a child closes its input, so the liveness pipe is held apart.
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

    /// Sends the watcher of a server that has ended away. Just closing the
    /// pipe would have it signal a process number that is free again.
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

/// The server's settings as `name=value`; of two with one name the last wins.
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
    fn a_durable_server_writes_through() {
        let durable = options("/tmp/x", &Settings::new("/srv"));
        assert!(durable.contains(&"fsync=on".to_owned()));
        let disposable = Settings { durable: false, ..Settings::new("/srv") };
        assert!(options("/tmp/x", &disposable).contains(&"fsync=off".to_owned()));
    }

    #[test]
    fn further_settings_come_last_and_win() {
        let settings = Settings { extra: vec![("max_connections".into(), "7".into())], ..Settings::new("/srv") };
        let options = options("/tmp/x", &settings);
        assert_eq!(options.last().map(String::as_str), Some("max_connections=7"));
    }

    #[test]
    fn the_socket_directory_is_quoted() {
        let options = options("/tmp/a,\"b", &Settings::new("/srv"));
        assert!(options.contains(&"unix_socket_directories=\"/tmp/a,\"\"b\"".to_owned()));
    }
}
