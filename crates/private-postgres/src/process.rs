//! Processes that this process did not start.
//!
//! This module reads the pid file of a cluster and inspects the process it names. It must never send a signal: the
//! number may belong to any process by now.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use tokio::process::Command;

/// Contents of a `postmaster.pid`.
#[derive(Debug, PartialEq, Eq)]
pub struct PidFile {
    pub pid: i32,
    pub ready: bool,
    /// Missing until the server listens.
    pub socket: Option<Socket>,
}

/// Address of a server's socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Socket {
    pub dir: PathBuf,
    pub port: u16,
}

impl PidFile {
    /// Parses the file, even while the server is writing it. Returns `None` if it holds no process number.
    pub fn parse(text: &str) -> Option<Self> {
        // The lines: process number, data directory, start time, port, socket directory, listen address, shared
        // memory, status.
        let lines: Vec<&str> = text.lines().collect();
        let pid = lines.first()?.trim().parse().ok().filter(|&pid| pid > 0)?;
        let socket = || {
            let (port, dir) = (lines.get(3)?.trim().parse().ok()?, PathBuf::from(lines.get(4)?));
            dir.is_absolute().then_some(Socket { dir, port })
        };
        let ready = lines.get(7).is_some_and(|status| status.trim() == "ready");
        Some(Self { pid, ready, socket: socket() })
    }
}

/// Owner of a process number, from the point of view of one cluster.
#[derive(Debug, PartialEq, Eq)]
pub enum PidOwner {
    /// No process, or a process of another account.
    None,
    /// A zombie or another program.
    Other,
    /// A server of this cluster.
    Server,
}

/// Finds out whether process `pid` is the server of `cluster`.
pub async fn pid_owner(pid: i32, cluster: &Path) -> PidOwner {
    let Some(process) = Pid::from_raw(pid) else {
        return PidOwner::None;
    };
    // A process of another account cannot be the cluster's server. PostgreSQL ignores it, too.
    if test_kill_process(process).is_err() {
        return PidOwner::None;
    }
    let is_server = if Path::new("/proc/self/stat").exists() {
        is_server_by_proc(pid, cluster)
    } else {
        is_server_by_ps(pid, cluster).await
    };
    if is_server { PidOwner::Server } else { PidOwner::Other }
}

/// Whether a process or a zombie with that number exists.
pub fn exists(pid: Pid) -> bool {
    test_kill_process(pid) != Err(Errno::SRCH)
}

fn is_server_by_proc(pid: i32, cluster: &Path) -> bool {
    let proc = Path::new("/proc").join(pid.to_string());
    let Ok(stat) = fs::read_to_string(proc.join("stat")) else {
        return false;
    };
    if is_zombie(&stat) {
        return false;
    }
    let arguments = fs::read(proc.join("cmdline")).unwrap_or_default();
    // The cluster is the server's working directory, which only the server's account and root can read. Every account
    // can read the arguments.
    let works_in_cluster = fs::read_link(proc.join("cwd")).is_ok_and(|dir| dir == cluster);
    let program = arguments.split(|&byte| byte == 0).next().unwrap_or(b"");
    program.ends_with(b"postgres")
        && (works_in_cluster
            || arguments.split(|&byte| byte == 0).any(|argument| argument == cluster.as_os_str().as_bytes()))
}

/// Whether a line of `/proc/<pid>/stat` describes a zombie. The state follows the program's name, which is in
/// parentheses and may contain more of them.
fn is_zombie(stat: &str) -> bool {
    stat.rsplit_once(')').is_some_and(|(_, rest)| matches!(rest.trim_start().as_bytes().first(), Some(b'Z' | b'X')))
}

async fn is_server_by_ps(pid: i32, cluster: &Path) -> bool {
    let output = Command::new("ps")
        .args(["-ww", "-o", "stat=,command=", "-p", &pid.to_string()])
        .stdin(Stdio::null())
        .output()
        .await;
    output.is_ok_and(|output| {
        let line = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = line.trim();
        !line.starts_with('Z') && line.contains("postgres") && line.contains(&*cluster.to_string_lossy())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "4711\n/srv/pgdata\n1700000000\n5432\n/tmp/app-0\n\n  1234567    65538\nready   \n";

    #[test]
    fn a_ready_server_is_recognised() {
        let socket = Some(Socket { dir: "/tmp/app-0".into(), port: 5432 });
        assert_eq!(PidFile::parse(FILE), Some(PidFile { pid: 4711, ready: true, socket }));
    }

    #[test]
    fn a_server_is_not_ready_while_it_starts_or_writes_the_file() {
        let starting = FILE.replace("ready   ", "starting");
        assert!(!PidFile::parse(&starting).expect("a number").ready);
        assert_eq!(PidFile::parse("4711\n/srv/pgdata\n"), Some(PidFile { pid: 4711, ready: false, socket: None }));
    }

    #[test]
    fn a_file_without_a_process_number_is_refused() {
        for text in ["", "\n", "x\n", "-4711\n", "0\n"] {
            assert_eq!(PidFile::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn zombies_are_recognised_by_the_state_after_the_name() {
        assert!(is_zombie("12 (post) gres)) Z 1 12"));
        assert!(!is_zombie("12 (Z) S 1 12"));
    }

    #[tokio::test]
    async fn another_program_is_not_the_server() {
        let own = std::process::id().cast_signed();
        assert_eq!(pid_owner(own, Path::new("/srv")).await, PidOwner::Other);
        assert_eq!(pid_owner(i32::MAX, Path::new("/srv")).await, PidOwner::None);
    }
}
