//! Runs the service as a separate process, and reads the processor time and memory of processes from `/proc`. On
//! systems without `/proc`, they are unknown.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

const STARTED_WITHIN: Duration = Duration::from_secs(60);
const STOPPED_WITHIN: Duration = Duration::from_secs(20);

/// A shell script that becomes the service. It leaves a watcher behind, which terminates the service when the benchmark
/// dies: then the read from the benchmark's pipe fails.
const WATCHED: &str = r#"exec 3<&0 </dev/null
( (read _ <&3 || kill -TERM $$) >/dev/null 2>&1 & )
exec "$@" 3<&-"#;

/// A service process, which runs this same program.
pub struct ServiceProcess {
    child: Child,
    pub pid: i32,
    pub authority: String,
    /// The pipe that the watcher reads.
    watched: Option<ChildStdin>,
    /// Kept open, because writing to a closed pipe would fail.
    _output: Lines<BufReader<ChildStdout>>,
}

impl ServiceProcess {
    pub async fn start(database_url: &str, settings: &[(&str, String)]) -> Result<ServiceProcess, String> {
        let cannot = |error: std::io::Error| format!("cannot start the service: {error}");
        let program = std::env::current_exe().map_err(cannot)?;
        let kept = ["PATH", "HOME", "TMPDIR"].into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        let mut child = Command::new("/bin/sh")
            .args(["-c", WATCHED, "sh"])
            .arg(program)
            .arg("serve")
            .env_clear()
            .envs(kept)
            .envs([("DATABASE_URL", database_url), ("PORT", "0"), ("WEBHOOK_ALLOW", "127.0.0.0/8,::1")])
            .env("RUST_LOG", "warn")
            .envs(settings.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(cannot)?;
        let watched = child.stdin.take();
        let pid = child.id().map(u32::cast_signed).ok_or("the service ended at once")?;
        let output = child.stdout.take().ok_or("the service has no standard output")?;
        let mut output = BufReader::new(output).lines();
        let ready = async {
            while let Some(line) = output.next_line().await.map_err(cannot)? {
                if let Some(url) = line.trim().strip_prefix("API") {
                    return Ok(url.trim().trim_start_matches("http://").to_owned());
                }
            }
            Err("the service ended before it was ready".to_owned())
        };
        let authority = tokio::time::timeout(STARTED_WITHIN, ready)
            .await
            .map_err(|_| format!("the service was not ready within {} s", STARTED_WITHIN.as_secs()))??;
        Ok(ServiceProcess { child, pid, authority, watched, _output: output })
    }

    /// Stops the service with SIGTERM or, if it does not end in time, with SIGKILL.
    pub async fn stop(mut self) {
        if let Some(pid) = Pid::from_raw(self.pid) {
            let _ = kill_process(pid, Signal::TERM);
        }
        if tokio::time::timeout(STOPPED_WITHIN, self.child.wait()).await.is_err() {
            let _ = self.child.kill().await;
        }
        // A line ends the watcher. Otherwise it would later signal this process id, which another process may have by
        // then.
        if let Some(mut watched) = self.watched.take() {
            let _ = tokio::io::AsyncWriteExt::write_all(&mut watched, b"\n").await;
        }
    }
}

/// Returns the seconds of processor time that a process and its ended children have used.
pub fn cpu(pid: i32) -> Option<f64> {
    Some(seconds(Stat::of(pid)?.ticks))
}

/// Returns the seconds of processor time of a process and all its children. In PostgreSQL, child processes do the work.
pub fn cpu_of_family(parent: i32) -> Option<f64> {
    let mut ticks = Stat::of(parent)?.ticks;
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
        ticks += pid.and_then(Stat::of).filter(|stat| stat.parent == parent).map_or(0, |stat| stat.ticks);
    }
    Some(seconds(ticks))
}

/// Returns the parent of a PostgreSQL backend, or `None` if the process is not one: the process id of a backend on
/// another machine may belong to any process here.
pub fn server_of(backend: i32) -> Option<i32> {
    let title = fs::read(format!("/proc/{backend}/cmdline")).ok()?;
    title.starts_with(b"postgres:").then(|| Stat::of(backend)).flatten().map(|stat| stat.parent)
}

/// Returns the resident memory of a process in bytes.
pub fn memory(pid: i32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

struct Stat {
    parent: i32,
    ticks: u64,
}

impl Stat {
    fn of(pid: i32) -> Option<Stat> {
        Stat::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    /// Parses the fields after the name, which is in parentheses and may itself contain parentheses: the state, the
    /// parent and, from the twelfth field on, the user and system ticks of the process and of its ended children.
    fn parse(text: &str) -> Option<Stat> {
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
        let ticks = fields.get(11..15)?.iter().map(|field| field.parse::<u64>().ok()).sum::<Option<u64>>()?;
        Some(Stat { parent: fields.get(1)?.parse().ok()?, ticks })
    }
}

#[allow(clippy::cast_precision_loss, reason = "a duration")]
fn seconds(ticks: u64) -> f64 {
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_line_is_parsed_after_the_process_name() {
        let line = "4242 (post) gres) S 17 4242 4242 0 -1 4194560 100 200 0 0 7 5 30 8 20 0 1 0 12345 0 0";
        let stat = Stat::parse(line).unwrap();
        assert_eq!((stat.parent, stat.ticks), (17, 50));
    }

    #[test]
    fn cpu_and_memory_are_known_where_proc_exists() {
        let own = std::process::id().cast_signed();
        assert_eq!(cpu(own).is_some(), fs::exists("/proc/self/stat").unwrap());
        assert_eq!(memory(own).is_some_and(|bytes| bytes > 1 << 20), fs::exists("/proc/self/status").unwrap());
        assert_eq!(server_of(own), None);
    }
}
