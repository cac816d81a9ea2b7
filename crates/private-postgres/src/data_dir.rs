//! The data directory, the lock on it, and the directory of the server's socket.
//!
//! This module must never fall back to another directory if the requested one holds a cluster: an empty database
//! instead of the real one is worse than an error.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::PORT;
use super::error::Error;
use super::package::sha256;
use super::user::RunUser;

/// Longest path of a socket on all supported systems.
const SOCKET_PATH_MAX: usize = 103;

/// A data directory, locked as long as this value lives.
///
/// Child processes do not inherit the lock, so it ends with this process, even if that is killed.
#[derive(Debug)]
pub struct DataDir {
    pub path: PathBuf,
    pub user: RunUser,
    _lock: File,
}

impl DataDir {
    /// Chooses the directory, creates it and locks it.
    pub async fn acquire(app: &str, wanted: &Path) -> Result<Self, Error> {
        let wanted = std::path::absolute(wanted).map_err(data_dir_error(wanted))?;
        if holds_cluster(&wanted) {
            return Self::create_and_lock(&wanted).await;
        }
        let fallbacks = fallbacks(app, &wanted);
        // A cluster created while the requested directory was unreachable stays in use when it becomes reachable.
        if let Some(dir) = fallbacks.iter().find(|dir| holds_cluster(dir) && is_owned_by_process(dir)) {
            return Self::create_and_lock(dir).await.inspect(|_| warn(&wanted, dir));
        }
        let error = match Self::create_and_lock(&wanted).await {
            Err(error @ (Error::DataDir { .. } | Error::Unreachable { .. })) => error,
            outcome => return outcome,
        };
        for dir in &fallbacks {
            if dir.exists() && !is_owned_by_process(dir) {
                continue;
            }
            match Self::create_and_lock(dir).await {
                Err(Error::DataDir { .. } | Error::Unreachable { .. }) => {}
                outcome => return outcome.inspect(|_| warn(&wanted, dir)),
            }
        }
        Err(error)
    }

    async fn create_and_lock(dir: &Path) -> Result<Self, Error> {
        let user = RunUser::choose(&cluster_path(dir))?;
        let unreachable = || Error::Unreachable { path: dir.to_owned(), user: user.name.clone() };
        // Check before creating anything: an unusable location must not keep an empty directory.
        let existing = dir.ancestors().find(|path| path.exists());
        if !user.can_enter(existing.unwrap_or(dir)).await? {
            return Err(unreachable());
        }
        create_dirs(dir).map_err(data_dir_error(dir))?;
        let dir = dir.canonicalize().map_err(data_dir_error(dir))?;
        if !user.can_enter(&dir).await? {
            return Err(unreachable());
        }
        let lock = open_file(&dir, "lock").map_err(data_dir_error(&dir))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { path: dir, user, _lock: lock }),
            Err(Errno::WOULDBLOCK) => Err(Error::Locked { path: dir }),
            Err(errno) => Err(data_dir_error(&dir)(errno.into())),
        }
    }

    /// Directory of the cluster.
    pub fn cluster(&self) -> PathBuf {
        cluster_path(&self.path)
    }

    /// Creates the directory of the socket.
    ///
    /// Its path is short, and only the server's account can enter it: the server trusts every client that can open the
    /// socket.
    pub async fn socket_dir(&self, app: &str) -> Result<PathBuf, Error> {
        let name = format!("{app}-{}", short_hash(&self.path));
        for parent in [std::env::temp_dir(), PathBuf::from("/tmp"), self.path.clone()] {
            if !self.user.can_enter(&parent).await? {
                continue;
            }
            let claimed = socket_dir_names(&parent, &name).into_iter().find(|dir| self.claim_socket_dir(dir).is_ok());
            if let Some(dir) = claimed {
                return Ok(dir);
            }
        }
        Err(Error::SocketDir)
    }

    /// Creates a directory for the socket, or reuses an existing one that belongs to the server's account.
    pub fn claim_socket_dir(&self, dir: &Path) -> io::Result<()> {
        match DirBuilder::new().mode(0o700).create(dir) {
            Ok(()) => self.user.own(dir)?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let found = fs::symlink_metadata(dir)?;
                if !found.is_dir() || found.uid() != self.user.uid {
                    return Err(error);
                }
            }
            Err(error) => return Err(error),
        }
        fs::set_permissions(dir, Permissions::from_mode(0o700))
    }
}

/// Opens or creates a file in the data directory.
///
/// Links are not followed, and a new file belongs to the owner of the directory. So root can use the directory of
/// another user without harm and without locking that user out.
pub fn open_file(dir: &Path, name: &str) -> io::Result<File> {
    let path = dir.join(name);
    let flags = OFlags::RDWR | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let created = match rustix::fs::open(&path, flags | OFlags::CREATE | OFlags::EXCL, mode) {
        Ok(file) => File::from(file),
        Err(Errno::EXIST) => return Ok(rustix::fs::open(&path, flags, mode)?.into()),
        Err(errno) => return Err(errno.into()),
    };
    if rustix::process::geteuid().is_root() {
        let owner = fs::metadata(dir)?;
        std::os::unix::fs::fchown(&created, Some(owner.uid()), Some(owner.gid()))?;
    }
    Ok(created)
}

/// Directory of the cluster in the data directory `dir`.
pub fn cluster_path(dir: &Path) -> PathBuf {
    dir.join("pgdata")
}

fn holds_cluster(dir: &Path) -> bool {
    cluster_path(dir).is_dir()
}

/// Whether `dir` belongs to the account of this process. Any user can create a directory with a predictable name in a
/// shared directory, so only owned ones are safe.
fn is_owned_by_process(dir: &Path) -> bool {
    fs::symlink_metadata(dir).is_ok_and(|found| found.is_dir() && found.uid() == rustix::process::geteuid().as_raw())
}

/// Directories to try if `wanted` is unusable, best first.
fn fallbacks(app: &str, wanted: &Path) -> Vec<PathBuf> {
    let hash = short_hash(wanted);
    let shared = if rustix::process::geteuid().is_root() {
        Some(Path::new("/var/lib").join(app))
    } else {
        let absolute = |name| std::env::var_os(name).map(PathBuf::from);
        absolute("XDG_DATA_HOME")
            .or_else(|| Some(absolute("HOME")?.join(".local/share")))
            .filter(|dir| dir.is_absolute())
            .map(|dir| dir.join(app))
    };
    shared
        .map(|dir| dir.join(&hash))
        .into_iter()
        .chain([std::env::temp_dir().join(format!("{app}-data-{hash}"))])
        .collect()
}

fn warn(wanted: &Path, used: &Path) {
    let temporary = used.starts_with(std::env::temp_dir());
    let caution = if temporary { "; the system may remove files there" } else { "" };
    tracing::warn!(
        requested = %wanted.display(),
        used = %used.display(),
        "PostgreSQL's account cannot use the requested data directory: using another one{caution}"
    );
}

/// Creates the missing directories and lets every account enter them, whatever the umask is. Files that need protection
/// have modes of their own.
pub fn create_dirs(dir: &Path) -> io::Result<()> {
    let missing: Vec<_> = dir.ancestors().take_while(|path| !path.exists()).collect();
    for path in missing.into_iter().rev() {
        match fs::create_dir(path) {
            Ok(()) => fs::set_permissions(path, Permissions::from_mode(0o755))?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Candidates for the socket directory in one parent directory.
///
/// There are several, because another user may own the first. There is none if the path of the socket would be too
/// long or would contain a comma, which separates hosts in a connection URL.
fn socket_dir_names(parent: &Path, name: &str) -> Vec<PathBuf> {
    let fits = |dir: &PathBuf| {
        dir.to_str().is_some_and(|dir| !dir.contains(',') && format!("{dir}/.s.PGSQL.{PORT}").len() <= SOCKET_PATH_MAX)
    };
    let further = (1..10).map(|n| parent.join(format!("{name}-{n}")));
    std::iter::once(parent.join(name)).chain(further).filter(fits).collect()
}

fn short_hash(path: &Path) -> String {
    let mut hash = sha256(path.as_os_str().as_encoded_bytes());
    hash.truncate(12);
    hash
}

fn data_dir_error(path: &Path) -> impl FnOnce(io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::DataDir { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_stable_and_tells_directories_apart() {
        let hash = short_hash(Path::new("/srv/a"));
        assert_eq!(hash.len(), 12);
        assert_eq!(hash, short_hash(Path::new("/srv/a")));
        assert_ne!(hash, short_hash(Path::new("/srv/b")));
    }

    #[test]
    fn socket_directories_have_alternatives() {
        let names = socket_dir_names(Path::new("/tmp"), "app-0");
        assert_eq!(names[0], Path::new("/tmp/app-0"));
        assert_eq!(names[1], Path::new("/tmp/app-0-1"));
    }

    #[test]
    fn a_long_parent_has_no_room_for_a_socket() {
        let parent = format!("/{}", "x".repeat(SOCKET_PATH_MAX));
        assert_eq!(socket_dir_names(Path::new(&parent), "app-0"), Vec::<PathBuf>::new());
    }

    #[test]
    fn a_comma_would_split_the_path_of_a_socket() {
        assert_eq!(socket_dir_names(Path::new("/a,b"), "app-0"), Vec::<PathBuf>::new());
    }

    #[test]
    fn fallbacks_end_in_the_temporary_directory() {
        let last = fallbacks("app", Path::new("/srv/a")).pop().expect("never empty");
        assert!(last.starts_with(std::env::temp_dir()));
    }
}
