//! The cluster on disk: its version, its first making and the traces that a
//! killed server leaves in it.
//!
//! It must never leave a half-made cluster under the final name, and never
//! clear a trace that still protects the data from two servers at once.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};

use super::binaries::Binaries;
use super::data_dir::DataDir;
use super::error::Error;
use super::process::{PidFile, PidOwner, exists, pid_owner};

/// How a cluster is called while it is being made.
const UNFINISHED: &str = "pgdata.init-";

/// An earlier server that is still there is left alone for a moment, because
/// it is most likely stopping; then it is asked to, first kindly.
const ORPHAN_INTERRUPTED_AFTER: Duration = Duration::from_secs(5);
const ORPHAN_QUIT_AFTER: Duration = Duration::from_secs(25);
const ORPHAN_GIVEN_UP_AFTER: Duration = Duration::from_secs(35);

/// The major version of the cluster, `None` when there is none yet.
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

/// Removes clusters whose making was interrupted.
pub fn remove_unfinished_clusters(dir: &Path) {
    remove_leftovers(dir, UNFINISHED);
}

/// Makes the cluster under a passing name and gives it the final one when it
/// is complete, so that a kill in between leaves nothing that looks usable.
pub async fn initialise(data_dir: &DataDir, binaries: &Binaries, durable: bool) -> Result<(), Error> {
    let failed = |reason: String| Error::Initdb { path: data_dir.path.clone(), reason };
    let io_failed = |error: io::Error| failed(error.to_string());

    let unfinished = data_dir.path.join(unique(UNFINISHED));
    DirBuilder::new().mode(0o700).create(&unfinished).map_err(io_failed)?;
    data_dir.user.own(&unfinished).map_err(io_failed)?;

    tracing::info!("making a PostgreSQL {} cluster in {}", binaries.version, data_dir.path.display());
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
    // Renaming replaces an empty directory, and only an empty one.
    fs::rename(&unfinished, data_dir.cluster()).map_err(io_failed)?;
    if durable {
        File::open(&data_dir.path).and_then(|dir| dir.sync_all()).map_err(io_failed)?;
    }
    Ok(())
}

/// Clears the way for a new server after an earlier one was killed. Only to be
/// called with the lock on the data directory held and no server of this
/// service running.
pub async fn recover(cluster: &Path) -> Result<(), Error> {
    let path = cluster.join("postmaster.pid");
    let failed = |source| Error::DataDir { path: path.clone(), source };
    let Some(text) = read_if_exists(&path).map_err(failed)? else {
        return Ok(());
    };
    let Some(file) = PidFile::parse(&text) else {
        // PostgreSQL refuses to start over an empty file, which a full disk or
        // a power failure leaves behind.
        tracing::warn!("removing the unreadable {}", path.display());
        return fs::remove_file(&path).map_err(failed);
    };
    match pid_owner(file.pid, cluster).await {
        PidOwner::Server => {
            stop_orphan(file.pid, cluster).await?;
            if !path.exists() {
                return Ok(());
            }
        }
        PidOwner::Other if !is_service(file.pid) => tracing::warn!(
            "process {} named by {} is dead or another program; passing over it",
            file.pid,
            path.display()
        ),
        PidOwner::Other | PidOwner::None => {}
    }
    // Also when there is no such process now: the number may go to one that
    // is about to be started, as it does in containers, where they are low.
    replace_pid(&path, &text).map_err(failed)
}

fn read_if_exists(path: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        text => text.map(Some),
    }
}

fn is_service(pid: i32) -> bool {
    pid == std::process::id().cast_signed()
}

/// Puts the service in the place of the process in a pid file. PostgreSQL
/// takes a file that names its own parent for stale. Removing the file instead
/// would also lose the reference to the shared memory, by which PostgreSQL
/// notices that processes of a killed server are still at work.
fn replace_pid(path: &Path, text: &str) -> io::Result<()> {
    let rest = text.split_once('\n').map_or("", |(_, rest)| rest);
    let file =
        rustix::fs::open(path, OFlags::WRONLY | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    File::from(file).write_all(format!("{}\n{rest}", std::process::id()).as_bytes())
}

async fn stop_orphan(pid: i32, cluster: &Path) -> Result<(), Error> {
    let error = || Error::Orphan { path: cluster.to_owned(), pid };
    let process = Pid::from_raw(pid).ok_or_else(error)?;
    tracing::info!("waiting for an earlier PostgreSQL (process {pid}) to end");
    let start = Instant::now();
    let mut signals =
        [(ORPHAN_INTERRUPTED_AFTER, Signal::INT), (ORPHAN_QUIT_AFTER, Signal::QUIT)].into_iter().peekable();
    while exists(process) && pid_owner(pid, cluster).await == PidOwner::Server {
        if start.elapsed() > ORPHAN_GIVEN_UP_AFTER {
            return Err(error());
        }
        if let Some((_, signal)) = signals.next_if(|(after, _)| start.elapsed() > *after) {
            tracing::warn!("stopping an earlier PostgreSQL (process {pid})");
            // It may have ended in between, which is what is wanted.
            let _ = kill_process(process, signal);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

/// A name that no other run has used: a process of a killed service may still
/// be writing to the earlier one.
pub fn unique(prefix: &str) -> PathBuf {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{prefix}{}-{}", std::process::id(), now.as_micros()).into()
}

/// Removes what killed runs have left, as far as possible: leftovers take
/// space but do no harm.
pub fn remove_leftovers(dir: &Path, prefix: &str) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// The last lines of a program's output as one, for an error message.
pub fn one_line(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(6)..].join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_becomes_one_line_of_its_end() {
        assert_eq!(one_line("a\n\n  b \r\n"), "a | b");
        assert_eq!(one_line("1\n2\n3\n4\n5\n6\n7\n"), "2 | 3 | 4 | 5 | 6 | 7");
        assert_eq!(one_line(""), "");
    }

    #[test]
    fn a_missing_or_empty_directory_is_a_cluster_to_be_made() {
        let dir = std::env::temp_dir().join(unique("reprise-test-cluster-"));
        assert!(matches!(major(&dir), Ok(None)));
        fs::create_dir(&dir).expect("made");
        assert!(matches!(major(&dir), Ok(None)));
        fs::write(dir.join("file"), "").expect("written");
        assert!(matches!(major(&dir), Err(Error::NotACluster { .. })));
        fs::write(dir.join("PG_VERSION"), "16\n").expect("written");
        assert!(matches!(major(&dir), Ok(Some(16))));
        fs::remove_dir_all(&dir).expect("removed");
    }

    #[test]
    fn disowning_keeps_all_but_the_process_number() {
        let path = std::env::temp_dir().join(unique("reprise-test-pid-"));
        let text = "1\n/srv\n2\n5432\n/tmp\n\n 3 4\nready   \n";
        fs::write(&path, text).expect("written");
        replace_pid(&path, text).expect("disowned");
        let now = fs::read_to_string(&path).expect("read");
        fs::remove_file(&path).expect("removed");
        assert_eq!(now, text.replacen('1', &std::process::id().to_string(), 1));
    }
}
