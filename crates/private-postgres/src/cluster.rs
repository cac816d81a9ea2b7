//! The cluster on disk: its version, its creation, and the files that a killed server leaves in it.
//!
//! This module must never leave an incomplete cluster under the final name, and never remove a file that still keeps
//! two servers from using the data at once.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};

use super::data_dir::DataDir;
use super::error::Error;
use super::probe::Binaries;
use super::process::{PidFile, PidOwner, exists, pid_owner};

/// Prefix of a cluster's name during its creation.
const UNFINISHED: &str = "pgdata.init-";

/// Time limits for a server of an earlier run. It is most likely stopping, so it gets a moment before the first signal.
const ORPHAN_INTERRUPTED_AFTER: Duration = Duration::from_secs(5);
const ORPHAN_QUIT_AFTER: Duration = Duration::from_secs(25);
const ORPHAN_GIVEN_UP_AFTER: Duration = Duration::from_secs(35);

/// Major version of the cluster, or `None` if it does not exist yet.
pub fn major(cluster: &Path) -> Result<Option<u32>, Error> {
    let path = cluster.to_owned();
    match read_if_exists(&cluster.join("PG_VERSION")) {
        Ok(Some(text)) => text.trim().parse().map(Some).map_err(|_| Error::NotACluster { path }),
        Ok(None) => match fs::read_dir(cluster).map(Iterator::count) {
            Ok(0) => Ok(None),
            Ok(_) => Err(Error::NotACluster { path }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::DataDir { path, source }),
        },
        Err(source) => Err(Error::DataDir { path, source }),
    }
}

/// Removes clusters whose creation was interrupted.
pub fn remove_unfinished_clusters(dir: &Path) {
    remove_leftovers(dir, UNFINISHED);
}

/// Creates the cluster under a temporary name and renames it when it is complete. A process killed in between leaves
/// nothing that looks usable.
pub async fn initialise(data_dir: &DataDir, binaries: &Binaries, durable: bool) -> Result<(), Error> {
    let failed = |reason: String| Error::Initdb { path: data_dir.path.clone(), reason };
    let io_failed = |error: io::Error| failed(error.to_string());

    let unfinished = data_dir.path.join(unique(UNFINISHED));
    DirBuilder::new().mode(0o700).create(&unfinished).map_err(io_failed)?;
    data_dir.user.own(&unfinished).map_err(io_failed)?;

    tracing::info!(version = binaries.version, data_dir = %data_dir.path.display(), "creating a PostgreSQL cluster");
    let mut initdb = data_dir.user.command(binaries.dir.join("initdb"));
    initdb
        .arg("-D")
        .arg(&unfinished)
        .args(["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C"])
        .arg("--no-instructions");
    if !durable {
        initdb.arg("--no-sync");
    }
    let output = initdb.output().await.map_err(io_failed)?;
    if !output.status.success() {
        let _ = fs::remove_dir_all(&unfinished);
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(failed(format!("{} ({})", one_line(&text), output.status)));
    }
    // A rename replaces only an empty directory.
    fs::rename(&unfinished, data_dir.cluster()).map_err(io_failed)?;
    if durable {
        File::open(&data_dir.path).and_then(|dir| dir.sync_all()).map_err(io_failed)?;
    }
    Ok(())
}

/// Prepares the cluster for a new server after an earlier one was killed.
///
/// The caller must hold the lock on the data directory and must not run a server itself.
pub async fn recover(cluster: &Path) -> Result<(), Error> {
    let path = cluster.join("postmaster.pid");
    let failed = |source| Error::DataDir { path: path.clone(), source };
    let Some(text) = read_if_exists(&path).map_err(failed)? else {
        return Ok(());
    };
    let Some(file) = PidFile::parse(&text) else {
        // A full disk or a power failure leaves an empty file, and PostgreSQL refuses to start with one.
        tracing::warn!(path = %path.display(), "unreadable pid file removed");
        return fs::remove_file(&path).map_err(failed);
    };
    match pid_owner(file.pid, cluster).await {
        PidOwner::Server => {
            stop_orphan(file.pid, cluster).await?;
            if !path.exists() {
                return Ok(());
            }
        }
        PidOwner::Other if !is_current_process(file.pid) => {
            tracing::warn!(pid = file.pid, path = %path.display(), "pid file names a dead process or another program");
        }
        PidOwner::Other | PidOwner::None => {}
    }
    // Even if no such process exists now: the number may be given to the next process. In containers, where numbers
    // are low, it often is.
    replace_pid(&path, &text).map_err(failed)
}

fn read_if_exists(path: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        text => text.map(Some),
    }
}

fn is_current_process(pid: i32) -> bool {
    pid == std::process::id().cast_signed()
}

/// Replaces the process number in a pid file by that of this process.
///
/// PostgreSQL treats a file that names its own parent as stale. Removing the file would also remove the reference to
/// the shared memory, by which PostgreSQL notices that processes of a killed server still run.
fn replace_pid(path: &Path, text: &str) -> io::Result<()> {
    let rest = text.split_once('\n').map_or("", |(_, rest)| rest);
    let file =
        rustix::fs::open(path, OFlags::WRONLY | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    File::from(file).write_all(format!("{}\n{rest}", std::process::id()).as_bytes())
}

async fn stop_orphan(pid: i32, cluster: &Path) -> Result<(), Error> {
    let error = || Error::Orphan { path: cluster.to_owned(), pid };
    let process = Pid::from_raw(pid).ok_or_else(error)?;
    tracing::info!(pid, "waiting for an earlier PostgreSQL to stop");
    let start = Instant::now();
    let mut signals =
        [(ORPHAN_INTERRUPTED_AFTER, Signal::INT), (ORPHAN_QUIT_AFTER, Signal::QUIT)].into_iter().peekable();
    while exists(process) && pid_owner(pid, cluster).await == PidOwner::Server {
        if start.elapsed() > ORPHAN_GIVEN_UP_AFTER {
            return Err(error());
        }
        if let Some((_, signal)) = signals.next_if(|(after, _)| start.elapsed() > *after) {
            tracing::warn!(pid, ?signal, "stopping an earlier PostgreSQL");
            // An error means that the process has ended in the meantime.
            let _ = kill_process(process, signal);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

/// File name that no other run has used. Processes of a killed run may still write to the files of that run.
pub fn unique(prefix: &str) -> PathBuf {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{prefix}{}-{}", std::process::id(), now.as_micros()).into()
}

/// Removes files of killed runs where possible. Files that remain take space but do no harm.
pub fn remove_leftovers(dir: &Path, prefix: &str) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Joins the last lines of a program's output into one line for an error message.
pub fn one_line(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(6)..].join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_joins_the_last_six_lines() {
        assert_eq!(one_line("a\n\n  b \r\n"), "a | b");
        assert_eq!(one_line("1\n2\n3\n4\n5\n6\n7\n"), "2 | 3 | 4 | 5 | 6 | 7");
        assert_eq!(one_line(""), "");
    }

    #[test]
    fn a_missing_or_empty_directory_holds_no_cluster() {
        let dir = std::env::temp_dir().join(unique("private-postgres-test-cluster-"));
        assert!(matches!(major(&dir), Ok(None)));
        fs::create_dir(&dir).expect("created");
        assert!(matches!(major(&dir), Ok(None)));
        fs::write(dir.join("file"), "").expect("written");
        assert!(matches!(major(&dir), Err(Error::NotACluster { .. })));
        fs::write(dir.join("PG_VERSION"), "16\n").expect("written");
        assert!(matches!(major(&dir), Ok(Some(16))));
        fs::remove_dir_all(&dir).expect("removed");
    }

    #[test]
    fn replacing_the_pid_keeps_the_other_lines() {
        let path = std::env::temp_dir().join(unique("private-postgres-test-pid-"));
        let text = "1\n/srv\n2\n5432\n/tmp\n\n 3 4\nready   \n";
        fs::write(&path, text).expect("written");
        replace_pid(&path, text).expect("replaced");
        let now = fs::read_to_string(&path).expect("read");
        fs::remove_file(&path).expect("removed");
        assert_eq!(now, text.replacen('1', &std::process::id().to_string(), 1));
    }
}
