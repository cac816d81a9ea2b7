//! API keys, their scopes, and the settings of both. Keeps only digests of keys, and must never show a key in an error
//! or a log.

use std::fmt;
use std::path::PathBuf;

use clap::Args;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::config::secret::Secret;

/// The allowed form of an entry, for error messages.
const ENTRY: &str = "must be name:key or name:key:scope, with a name of 1 to 64 letters, digits, '.', '_' or '-', a key of \
                     visible ASCII characters without ',' and ':', and read, write or admin as the scope";
/// Shorter keys can be guessed.
const MIN_SAFE_LENGTH: usize = 16;
/// Paths that `PUBLIC_PATHS` may name. The rest of the API always needs a key.
const PUBLISHABLE: [&str; 4] = ["/", "/docs", "/metrics", "/openapi.json"];

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Access")]
pub struct Access {
    /// API keys, separated by commas; SCOPE is read, write (the default) or admin. Without keys, the API is open and
    /// the service listens on a loopback address only
    #[arg(long, env = "API_KEYS", global = true, hide_env_values = true, value_name = "NAME:KEY[:SCOPE]")]
    pub api_keys: Option<Secret>,
    /// File with the API keys, instead of `API_KEYS`: one on each line, or separated by commas
    #[arg(long, env = "API_KEYS_FILE", global = true, value_name = "FILE")]
    pub api_keys_file: Option<PathBuf>,
    /// Paths that need no key, some of /, /docs, /metrics and /openapi.json, separated by commas
    #[arg(long, env = "PUBLIC_PATHS", global = true, default_value = "", hide_default_value = true, value_parser = paths, value_name = "PATHS")]
    pub public_paths: Paths,
}

impl Access {
    /// Reads the keys from the variable or the file. An error is the one line to print.
    pub fn keys(&self) -> Result<Keys, String> {
        let read = Secret::read("API_KEYS", self.api_keys.as_ref(), self.api_keys_file.as_ref())?;
        let Some((text, at)) = read else { return Ok(Keys::default()) };
        let keys = Keys::parse(&text).map_err(|why| format!("{at}: {why}"))?;
        // A value of separators only must not leave the API open: the setting asks for keys.
        if keys.is_empty() { Err(format!("{at}: must hold at least one key")) } else { Ok(keys) }
    }
}

/// What a key may do. Each scope includes the scopes before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    Read,
    Write,
    Admin,
}

impl Scope {
    fn parse(text: &str) -> Option<Scope> {
        match text {
            "read" => Some(Scope::Read),
            "write" => Some(Scope::Write),
            "admin" => Some(Scope::Admin),
            _ => None,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Scope::Read => "read",
            Scope::Write => "write",
            Scope::Admin => "admin",
        }
    }
}

#[derive(Clone)]
pub struct ApiKey {
    /// The name of the caller in the audit trail.
    pub name: String,
    pub scope: Scope,
    digest: [u8; 32],
    short: bool,
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiKey").field("name", &self.name).field("scope", &self.scope).finish_non_exhaustive()
    }
}

/// All API keys. Several keys may have the same name, so that a key can be replaced without an interruption.
#[derive(Clone, Debug, Default)]
pub struct Keys(Vec<ApiKey>);

impl Keys {
    /// Parses the entries. The error names a bad entry by its number only, as a part of it may be a key.
    fn parse(text: &str) -> Result<Keys, String> {
        let mut keys: Vec<ApiKey> = Vec::new();
        let entries = text.split([',', '\n']).map(str::trim).filter(|entry| !entry.is_empty());
        for (at, entry) in entries.enumerate() {
            let key = read_key(entry).ok_or_else(|| format!("entry {} {ENTRY}", at + 1))?;
            if let Some(same) = keys.iter().position(|other| other.digest == key.digest) {
                return Err(format!("entries {} and {} must not have the same key", same + 1, at + 1));
            }
            keys.push(key);
        }
        Ok(Keys(keys))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Finds the key that a request carries. Compares all digests, each in constant time, so the duration reveals
    /// nothing.
    pub fn find(&self, given: &[u8]) -> Option<&ApiKey> {
        let digest = digest(given);
        let mut found = None;
        for key in &self.0 {
            if key.digest.ct_eq(&digest).into() {
                found = Some(key);
            }
        }
        found
    }

    /// Names of the keys that are short enough to be guessed.
    pub fn short(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter(|key| key.short).map(|key| key.name.as_str())
    }
}

fn read_key(entry: &str) -> Option<ApiKey> {
    let mut parts = entry.split(':');
    let (name, key, scope) = (parts.next()?, parts.next()?, parts.next());
    let scope = scope.map_or(Some(Scope::Write), Scope::parse)?;
    let is_name = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let valid_name = (1..=64).contains(&name.len()) && name.chars().all(is_name);
    // `name:read` lacks its key; "read" must not become one.
    let valid_key = !key.is_empty() && key.chars().all(|c| c.is_ascii_graphic()) && Scope::parse(key).is_none();
    (valid_name && valid_key && parts.next().is_none()).then(|| ApiKey {
        name: name.to_owned(),
        scope,
        digest: digest(key.as_bytes()),
        short: key.len() < MIN_SAFE_LENGTH,
    })
}

fn digest(key: &[u8]) -> [u8; 32] {
    Sha256::digest(key).into()
}

/// Paths that need no key, from `PUBLIC_PATHS`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paths(Vec<&'static str>);

impl Paths {
    /// Whether a path is public. Paths below `/docs` belong to it.
    pub fn contain(&self, path: &str) -> bool {
        let below = |open: &str| open != "/" && path.strip_prefix(open).is_some_and(|rest| rest.starts_with('/'));
        self.0.iter().any(|open| *open == path || below(open))
    }
}

fn paths(text: &str) -> Result<Paths, String> {
    let named = text.split(',').map(str::trim).filter(|path| !path.is_empty());
    let known = |path: &str| PUBLISHABLE.into_iter().find(|open| *open == path);
    let paths: Option<Vec<&str>> = named.map(known).collect();
    paths.map(Paths).ok_or_else(|| format!("must be some of {}, separated by commas", PUBLISHABLE.join(", ")))
}

#[cfg(test)]
mod tests;
