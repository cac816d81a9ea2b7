//! The server's log: a file in the data directory to which the server appends.
//!
//! This module owns the file's name, its size and the lines that error messages quote from it. It must never replace
//! the file while a server writes to it.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use super::cluster::one_line;
use super::data_dir::open_file;
use super::error::Error;

const NAME: &str = "postgres.log";
const SIZE_MAX: u64 = 32 << 20;
const SIZE_KEPT: u64 = 64 << 10;

/// Open log file of one run.
#[derive(Debug)]
pub struct Log(File);

impl Log {
    /// Starts a new log and keeps that of the last run as `postgres.log.1`.
    pub fn begin(dir: &Path) -> Result<Self, Error> {
        let path = dir.join(NAME);
        let _ = fs::rename(&path, path.with_extension("log.1"));
        open_file(dir, NAME).map(Self).map_err(|source| Error::DataDir { path, source })
    }

    /// File handle for a server to write to.
    pub fn handle(&self) -> io::Result<File> {
        self.0.try_clone()
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.0.metadata().map_or(0, |log| log.len())
    }

    /// Errors that the server logged after the first `start` bytes, as one line.
    pub fn errors_since(&self, start: u64) -> String {
        match self.read(start) {
            Ok(text) => error_lines(&String::from_utf8_lossy(&text)),
            Err(error) => format!("cannot read its log: {error}"),
        }
    }

    /// Cuts a log that has grown too long down to its end. The server appends, so it continues at the new end.
    pub fn trim(&self) {
        let size = self.size();
        if size <= SIZE_MAX {
            return;
        }
        let trimmed = self.read(size - SIZE_KEPT).and_then(|end| {
            self.0.set_len(0)?;
            (&self.0).write_all(&end)
        });
        if let Err(error) = trimmed {
            tracing::debug!(%error, "cannot trim PostgreSQL's log");
        }
    }

    fn read(&self, start: u64) -> io::Result<Vec<u8>> {
        let mut text = Vec::new();
        let mut file = &self.0;
        file.seek(SeekFrom::Start(start))?;
        file.take(SIZE_KEPT).read_to_end(&mut text)?;
        Ok(text)
    }
}

/// Lines of a log that report errors, or its last lines if none does.
fn error_lines(log: &str) -> String {
    let errors: Vec<_> = log
        .lines()
        .filter(|line| ["FATAL:", "PANIC:", "ERROR:", "HINT:"].iter().any(|level| line.contains(level)))
        .collect();
    one_line(if errors.is_empty() { log.to_owned() } else { errors.join("\n") }.as_str())
}

#[cfg(test)]
mod tests {
    use super::super::cluster::unique;
    use super::*;

    #[test]
    fn errors_are_preferred_to_other_lines() {
        assert_eq!(error_lines("LOG:  a\nFATAL:  b\nHINT:  c\nLOG:  d\n"), "FATAL:  b | HINT:  c");
        assert_eq!(error_lines("LOG:  a\nx\n"), "LOG:  a | x");
    }

    #[test]
    fn the_last_log_is_kept_and_a_long_one_is_cut() {
        let dir = std::env::temp_dir().join(unique("private-postgres-test-log-"));
        fs::create_dir(&dir).expect("created");
        fs::write(dir.join(NAME), "old").expect("written");
        let log = Log::begin(&dir).expect("started");
        assert_eq!(fs::read(dir.join("postgres.log.1")).expect("kept"), b"old");
        let mut server = log.handle().expect("a handle");
        server.set_len(SIZE_MAX + 1).expect("grown");
        log.trim();
        assert_eq!(log.size(), SIZE_KEPT);
        server.write_all(b"FATAL:  x").expect("appended");
        assert_eq!(log.errors_since(SIZE_KEPT), "FATAL:  x");
        fs::remove_dir_all(&dir).expect("removed");
    }
}
