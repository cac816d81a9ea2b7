//! Where the private PostgreSQL lives: its data directory, the lock on it and
//! the directory of its socket.
//!
//! It must never fall back to another directory when the wanted one already
//! holds a cluster: an empty database in place of the real one is worse than
//! an error.

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

/// The shortest limit among the supported systems for the path of a socket.
const SOCKET_PATH_MAX: usize = 103;

/// A data directory, locked for as long as this value lives. The lock is not
/// passed on to child processes, so it ends with the service however it dies.
#[derive(Debug)]
pub struct DataDir {
    pub path: PathBuf,
    pub user: RunUser,
    _lock: File,
}

impl DataDir {
    /// Chooses the directory, makes it and locks it.
    pub async fn acquire(wanted: &Path) -> Result<Self, Error> {
        let wanted = std::path::absolute(wanted).map_err(data_dir_error(wanted))?;
        if holds_cluster(&wanted) {
            return Self::create_and_lock(&wanted).await;
        }
        let fallbacks = fallbacks(&wanted);
        // A cluster made while the wanted directory was out of reach stays the
        // one in use when it comes into reach later.
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
        // Look before making anything, so that no empty directory is left
        // behind in a place that turns out to be of no use.
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

    /// The directory of the cluster itself.
    pub fn cluster(&self) -> PathBuf {
        cluster_path(&self.path)
    }

    /// Makes the directory of the socket: short, and closed to everyone but
    /// the server's account, because whoever can open the socket is trusted.
    pub async fn socket_dir(&self) -> Result<PathBuf, Error> {
        let name = format!("reprise-{}", short_hash(&self.path));
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

    /// Makes one directory for the socket, or takes it over if it is there and
    /// belongs to the server's account.
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

/// Opens a file of the service in the data directory. Links are not followed
/// and a new file goes to the owner of the directory, so that root can work on
/// somebody's directory without harm and without locking them out.
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

pub fn cluster_path(dir: &Path) -> PathBuf {
    dir.join("pgdata")
}

fn holds_cluster(dir: &Path) -> bool {
    cluster_path(dir).is_dir()
}

/// Directories with predictable names are used only when they are the
/// service's own, since anyone may have made one in a shared place.
fn is_owned_by_process(dir: &Path) -> bool {
    fs::symlink_metadata(dir).is_ok_and(|found| found.is_dir() && found.uid() == rustix::process::geteuid().as_raw())
}

/// The places to try when the wanted one is of no use, the best first.
fn fallbacks(wanted: &Path) -> Vec<PathBuf> {
    let hash = short_hash(wanted);
    let shared = if rustix::process::geteuid().is_root() {
        Some(PathBuf::from("/var/lib/reprise"))
    } else {
        let absolute = |name| std::env::var_os(name).map(PathBuf::from);
        absolute("XDG_DATA_HOME")
            .or_else(|| Some(absolute("HOME")?.join(".local/share")))
            .filter(|dir| dir.is_absolute())
            .map(|dir| dir.join("reprise"))
    };
    shared
        .map(|dir| dir.join(&hash))
        .into_iter()
        .chain([std::env::temp_dir().join(format!("reprise-data-{hash}"))])
        .collect()
}

fn warn(wanted: &Path, used: &Path) {
    let caution = if used.starts_with(std::env::temp_dir()) { ", where the system may remove it" } else { "" };
    tracing::warn!(
        "the account of PostgreSQL cannot use the data directory {}: the data is in {} instead{caution} (REPRISE_DATA_DIR chooses another place)",
        wanted.display(),
        used.display()
    );
}

/// Makes the missing directories passable whatever the umask is; what needs
/// protection inside is closed by itself.
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

/// The names to try in one parent: several, because somebody else may sit on
/// the first, but none when the socket's path would be too long, or holds a
/// comma, which separates hosts in what clients are given.
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
        let names = socket_dir_names(Path::new("/tmp"), "reprise-0");
        assert_eq!(names[0], Path::new("/tmp/reprise-0"));
        assert_eq!(names[1], Path::new("/tmp/reprise-0-1"));
    }

    #[test]
    fn long_parents_are_no_place_for_a_socket() {
        let parent = format!("/{}", "x".repeat(SOCKET_PATH_MAX));
        assert_eq!(socket_dir_names(Path::new(&parent), "reprise-0"), Vec::<PathBuf>::new());
    }

    #[test]
    fn a_comma_would_split_the_path_of_a_socket() {
        assert_eq!(socket_dir_names(Path::new("/a,b"), "reprise-0"), Vec::<PathBuf>::new());
    }

    #[test]
    fn fallbacks_end_in_the_temporary_directory() {
        let last = fallbacks(Path::new("/srv/a")).pop().expect("never empty");
        assert!(last.starts_with(std::env::temp_dir()));
    }
}
