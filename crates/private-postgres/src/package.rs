//! Preparation of a fetched package.
//!
//! This module verifies the archive and sets the links and modes of the unpacked files. It must never create or change
//! a file outside the package.

use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use sha2::{Digest as _, Sha256};

/// Returns the archive in `dir` with the extension `ending`. Fails unless its checksum is `sum`.
pub async fn verified(dir: &Path, ending: &str, sum: &'static str) -> Result<PathBuf, String> {
    let archive = fs::read_dir(dir)
        .map_err(|error| error.to_string())?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|found| found == ending))
        .ok_or("the client downloaded no archive")?;
    let path = archive.clone();
    let actual = tokio::task::spawn_blocking(move || fs::read(path).map(|bytes| sha256(&bytes)))
        .await
        .map_err(|error| error.to_string())?
        .map_err(|error| error.to_string())?;
    if actual == sum { Ok(archive) } else { Err(format!("the archive has the SHA-256 {actual}, expected {sum}")) }
}

/// SHA-256 in lower-case hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Creates the links that the package lists in a file, because npm packages cannot contain links.
pub fn create_links(package: &Path) -> io::Result<()> {
    let list = fs::read(package.join("native/pg-symlinks.json"))?;
    let list: Vec<serde_json::Value> = serde_json::from_slice(&list)?;
    for link in list {
        let (Some(source), Some(target)) = (link["source"].as_str(), link["target"].as_str()) else {
            return Err(io::Error::other("an entry has no source or no target"));
        };
        let to = relative_link(source, target)
            .ok_or_else(|| io::Error::other(format!("{target} leads outside the package")))?;
        let at = package.join(target);
        let _ = fs::remove_file(&at);
        std::os::unix::fs::symlink(to, at)?;
    }
    Ok(())
}

/// Content of a link at `target` that leads to `source`, both relative to the package.
///
/// The link is relative, because the package is moved afterwards.
fn relative_link(source: &str, target: &str) -> Option<PathBuf> {
    let inside = |path: &str| {
        let path = Path::new(path);
        path.components().all(|part| matches!(part, Component::Normal(_)))
    };
    if !inside(source) || !inside(target) {
        return None;
    }
    let depth = Path::new(target).components().count().checked_sub(1)?;
    let mut to: PathBuf = std::iter::repeat_n("..", depth).collect();
    to.push(source);
    Some(to)
}

/// Makes all files readable, and executable those in a `bin` directory or with an executable bit.
///
/// Extraction applies the umask, and not every extractor applies the recorded mode.
pub fn make_accessible(dir: &Path) -> io::Result<()> {
    fs::set_permissions(dir, Permissions::from_mode(0o755))?;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            make_accessible(&entry.path())?;
        } else if kind.is_file() {
            let runs = entry.metadata()?.permissions().mode() & 0o100 != 0 || dir.ends_with("bin");
            let mode = if runs { 0o755 } else { 0o644 };
            fs::set_permissions(entry.path(), Permissions::from_mode(mode))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_lower_case_hexadecimal() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(sha256(b""), empty);
    }

    #[test]
    fn links_are_relative_to_their_own_directory() {
        assert_eq!(
            relative_link("native/lib/libpq.so.5.18", "native/lib/libpq.so"),
            Some(PathBuf::from("../../native/lib/libpq.so.5.18"))
        );
        assert_eq!(relative_link("a", "b"), Some(PathBuf::from("a")));
    }

    #[test]
    fn links_stay_inside_the_package() {
        assert_eq!(relative_link("../x", "native/lib/y"), None);
        assert_eq!(relative_link("x", "/etc/passwd"), None);
        assert_eq!(relative_link("x", "native/../../y"), None);
    }
}
