//! Secret settings: read from a variable or a file, and never shown.

use std::fmt;
use std::path::PathBuf;

/// A text that is never printed. `Config::validate` checks it, because an error of the command line parser would print
/// it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl From<String> for Secret {
    fn from(text: String) -> Secret {
        Secret(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// Reads the variable `name`, or the file that `{name}_FILE` names. Returns the text and the name of its source for
    /// messages. An empty variable counts as absent, but a named file must not be empty.
    pub fn read(
        name: &str,
        value: Option<&Secret>,
        file: Option<&PathBuf>,
    ) -> Result<Option<(String, String)>, String> {
        let value = value.map(|secret| secret.0.trim()).filter(|text| !text.is_empty());
        let Some(file) = file.filter(|file| !file.as_os_str().is_empty()) else {
            return Ok(value.map(|text| (text.to_owned(), name.to_owned())));
        };
        let at = format!("{name}_FILE={}", file.display());
        if value.is_some() {
            return Err(format!("{at}: must not be set together with {name}"));
        }
        let text = std::fs::read_to_string(file).map_err(|error| format!("{at}: must be a readable file: {error}"))?;
        let text = text.trim();
        if text.is_empty() {
            return Err(format!("{at}: must not be empty"));
        }
        Ok(Some((text.to_owned(), at)))
    }
}
