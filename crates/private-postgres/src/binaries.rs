//! Search for PostgreSQL's binaries.
//!
//! This module owns the order of the search and the choice by version. It must never choose a server
//! whose major version differs from the cluster's: a server reads only the files of its own major version.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::process::Command;

use super::Settings;
use super::data_dir::DataDir;
use super::error::Error;
use super::fetch;
use super::probe::{Binaries, in_path, leading_number, probe};

/// Directories in which systems and package managers install several versions: parent, prefix of the name before the
/// version, and path below it.
const INSTALLATIONS: [(&str, &str, &str); 6] = [
    ("/usr/lib/postgresql", "", "bin"),
    ("/usr", "pgsql-", "bin"),
    ("/usr/libexec", "postgresql", ""),
    ("/opt/homebrew/opt", "postgresql@", "bin"),
    ("/usr/local/opt", "postgresql@", "bin"),
    ("/Applications/Postgres.app/Contents/Versions", "", "bin"),
];

/// Chooses binaries for a cluster of major version `cluster_major`, or for a new cluster.
pub async fn locate(settings: &Settings, data_dir: &DataDir, cluster_major: Option<u32>) -> Result<Binaries, Error> {
    let version_error = |found: String| Error::Version {
        path: data_dir.path.clone(),
        cluster: cluster_major.unwrap_or_default(),
        found: if found.is_empty() { "none".to_owned() } else { found },
    };
    let fits = |found: &Binaries| cluster_major.is_none_or(|major| major == found.major);

    if let Some(dir) = &settings.bin_dir {
        let found = probe(dir, data_dir).await.map_err(|reason| Error::BinDir { path: dir.clone(), reason })?;
        return if fits(&found) { Ok(found) } else { Err(version_error(found.version)) };
    }

    let mut candidates = Vec::new();
    if settings.search_system {
        candidates.extend(in_path("postgres").and_then(|path| parent_of_real(&path)));
        candidates.extend(configured().await);
        candidates.extend(installations());
    }
    candidates.extend(fetch::cached(&data_dir.path));

    let mut others = Vec::new();
    for dir in candidates {
        match probe(&dir, data_dir).await {
            Ok(found) if fits(&found) => return Ok(found),
            Ok(found) => others.push(found.version),
            Err(reason) => {
                tracing::debug!(dir = %dir.display(), reason, "PostgreSQL skipped");
            }
        }
    }
    let fetchable = cluster_major.is_none_or(|major| major == fetch::MAJOR);
    if !fetchable {
        others.dedup();
        return Err(version_error(others.join(", ")));
    }
    let dir = fetch::fetch(data_dir).await?;
    probe(&dir, data_dir).await.map_err(|reason| Error::NoBinaries { reason })
}

/// Directory of the file that `path` links to: `PATH` may hold a link to `postgres` alone, without the installation.
fn parent_of_real(path: &Path) -> Option<PathBuf> {
    Some(path.canonicalize().ok()?.parent()?.to_owned())
}

async fn configured() -> Option<PathBuf> {
    let output = Command::new(in_path("pg_config")?)
        .arg("--bindir")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(PathBuf::from(text.trim())).filter(|dir| dir.is_absolute())
}

fn installations() -> Vec<PathBuf> {
    let mut found: Vec<(u32, PathBuf)> = Vec::new();
    for (parent, prefix, suffix) in INSTALLATIONS {
        for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if let Some(major) = name.to_str().and_then(|name| version_in(name, prefix)) {
                found.push((major, entry.path().join(suffix)));
            }
        }
    }
    newest_first(found)
}

fn version_in(name: &str, prefix: &str) -> Option<u32> {
    leading_number(name.strip_prefix(prefix)?)
}

/// Sorts by version, newest first. Directories of one version keep their order.
fn newest_first(mut found: Vec<(u32, PathBuf)>) -> Vec<PathBuf> {
    found.sort_by_key(|(major, _)| std::cmp::Reverse(*major));
    found.into_iter().map(|(_, dir)| dir).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_versions_come_first_by_number() {
        let dirs = [(9, "/9"), (14, "/14"), (18, "/18"), (100, "/100")].map(|(major, dir)| (major, PathBuf::from(dir)));
        assert_eq!(newest_first(dirs.to_vec()), ["/100", "/18", "/14", "/9"].map(PathBuf::from));
    }

    #[test]
    fn installations_are_told_by_their_names() {
        assert_eq!(version_in("pgsql-16", "pgsql-"), Some(16));
        assert_eq!(version_in("postgresql@17", "postgresql@"), Some(17));
        assert_eq!(version_in("9.6", ""), Some(9));
        assert_eq!(version_in("postgresql", "postgresql"), None);
        assert_eq!(version_in("bin", "pgsql-"), None);
    }
}
