//! The version and location of PostgreSQL's binaries in a directory. Servers older than 14 are refused.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::data_dir::DataDir;

const OLDEST_MAJOR: u32 = 14;

/// A directory with a usable `postgres` and `initdb`.
#[derive(Debug, Clone)]
pub struct Binaries {
    pub dir: PathBuf,
    pub version: String,
    pub major: u32,
}

/// Asks the binaries in `dir` for their version.
///
/// The call runs under the server's account, which proves that this account can reach and load the binaries.
pub async fn probe(dir: &Path, data_dir: &DataDir) -> Result<Binaries, String> {
    let dir = dir.canonicalize().map_err(|error| error.to_string())?;
    for name in ["postgres", "initdb"] {
        if !dir.join(name).is_file() {
            return Err(format!("`{name}` is missing"));
        }
    }
    let output = data_dir
        .user
        .command(dir.join("postgres"))
        .arg("--version")
        .output()
        .await
        .map_err(|error| format!("user {} cannot run `postgres`: {error}", data_dir.user.name))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let Some((version, major)) = parse_version(&text) else {
        let cause = super::cluster::one_line(&String::from_utf8_lossy(&output.stderr));
        return Err(format!("`postgres --version` failed: {cause}"));
    };
    if major < OLDEST_MAJOR {
        return Err(format!("PostgreSQL {version} is too old; the minimum is {OLDEST_MAJOR}"));
    }
    Ok(Binaries { dir, version, major })
}

/// Parses `postgres (PostgreSQL) 15.14 (Debian …)` and `… 18beta1`.
fn parse_version(text: &str) -> Option<(String, u32)> {
    let version = text.split_once("(PostgreSQL)")?.1.split_whitespace().next()?;
    Some((version.to_owned(), leading_number(version)?))
}

/// The number that `text` starts with.
pub fn leading_number(text: &str) -> Option<u32> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

/// First executable called `name` in `PATH`.
pub fn in_path(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?)
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(name))
        .find(|path| fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_what_the_server_says() {
        let of = |text| parse_version(text).map(|(version, major)| format!("{version}={major}"));
        assert_eq!(of("postgres (PostgreSQL) 15.14 (Debian 15.14-0+deb12u1)\n").as_deref(), Some("15.14=15"));
        assert_eq!(of("postgres (PostgreSQL) 18beta1").as_deref(), Some("18beta1=18"));
        assert_eq!(of("postgres (EnterpriseDB) 15.1"), None);
        assert_eq!(of(""), None);
    }
}
