//! The account that runs PostgreSQL.
//!
//! PostgreSQL refuses to run as root, so a process of root runs its server under an unprivileged account. PostgreSQL's
//! binaries must only be run through [`RunUser::command`], even to ask for their version.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Stdio;

use tokio::process::Command;

use super::error::Error;

/// Variables that the server inherits. The rest of the environment may hold secrets, and `PG…` variables meant for
/// clients.
const KEPT_VARIABLES: [&str; 5] =
    ["PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "TMPDIR"];

/// An account, and whether this process has to switch to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunUser {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    switch: bool,
}

impl RunUser {
    /// Chooses the account of this process or, for root, the owner of an existing cluster, else `postgres`, else
    /// `nobody`.
    pub fn choose(cluster: &Path) -> Result<Self, Error> {
        let uid = rustix::process::geteuid().as_raw();
        if uid != 0 {
            return Ok(Self { name: uid.to_string(), uid, gid: rustix::process::getegid().as_raw(), switch: false });
        }
        let accounts = fs::read_to_string("/etc/passwd").unwrap_or_default();
        if let Ok(owner) = fs::symlink_metadata(cluster)
            && owner.uid() != 0
        {
            let known = find_account(&accounts, |account| account.uid == owner.uid());
            return Ok(known.unwrap_or(Self {
                name: owner.uid().to_string(),
                uid: owner.uid(),
                gid: owner.gid(),
                switch: true,
            }));
        }
        ["postgres", "nobody"]
            .into_iter()
            .find_map(|name| find_account(&accounts, |account| account.name == name))
            .ok_or_else(|| Error::User { reason: "there is no account `postgres` or `nobody` to run it".to_owned() })
    }

    /// Prepares a command that runs under this account, in `/`, with a minimal environment and no input. Switching the
    /// account also drops the supplementary groups.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir("/")
            .stdin(Stdio::null())
            .env_clear()
            .envs(KEPT_VARIABLES.iter().filter_map(|name| Some((name, std::env::var_os(name)?))))
            // Otherwise initdb compares hundreds of files to find the name of the time zone.
            .env("TZ", "UTC")
            .env("LC_ALL", "C")
            .kill_on_drop(true);
        if self.switch {
            command.uid(self.uid).gid(self.gid);
        }
        command
    }

    /// Gives a directory that this process created to this account.
    pub fn own(&self, path: &Path) -> std::io::Result<()> {
        if self.switch {
            std::os::unix::fs::lchown(path, Some(self.uid), Some(self.gid))?;
        }
        Ok(())
    }

    /// Whether this account can enter `dir`. The check tries it, because mode bits do not show access lists and mounts.
    pub async fn can_enter(&self, dir: &Path) -> Result<bool, Error> {
        if !self.switch {
            return Ok(true);
        }
        self.command("/bin/sh")
            .args(["-c", "cd \"$1\"", "sh"])
            .arg(dir)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .await
            .map(|status| status.success())
            .map_err(|source| Error::User {
                reason: format!("this process cannot switch to the account {} ({source})", self.name),
            })
    }
}

/// Finds an account in the text of `/etc/passwd`, never one with root's id. Some systems write ids as negative numbers.
fn find_account(accounts: &str, wanted: impl Fn(&RunUser) -> bool) -> Option<RunUser> {
    let id = |text: &str| text.parse::<u32>().ok().or_else(|| text.parse::<i32>().ok().map(i32::cast_unsigned));
    let parse = |line: &str| {
        let mut fields = line.split(':');
        Some(RunUser {
            name: fields.next()?.to_owned(),
            uid: id(fields.nth(1)?)?,
            gid: id(fields.next()?)?,
            switch: true,
        })
    };
    accounts.lines().filter_map(parse).find(|account| account.uid != 0 && wanted(account))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCOUNTS: &str = "root:x:0:0:root:/root:/bin/bash\n\
        nobody:*:-2:-2:Nobody:/var/empty:/usr/bin/false\n\
        broken\n\
        postgres:x:101:104:,,,:/var/lib/postgresql:/bin/bash\n";

    fn named(name: &str) -> Option<RunUser> {
        find_account(ACCOUNTS, |account| account.name == name)
    }

    #[test]
    fn accounts_are_found_by_their_whole_name() {
        let found = named("postgres").expect("listed");
        assert_eq!((found.uid, found.gid), (101, 104));
        assert_eq!(named("post"), None);
    }

    #[test]
    fn negative_ids_wrap() {
        let found = named("nobody").expect("listed");
        assert_eq!(found.uid, u32::MAX - 1);
    }

    #[test]
    fn root_is_never_chosen() {
        assert_eq!(named("root"), None);
    }
}
