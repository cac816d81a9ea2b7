//! Settings that are secrets: read from a variable or from a file, and never shown.

use std::fmt;
use std::path::PathBuf;

/// A text that is shown to nobody. What is wrong with it is found by `validate`, because an error of the parser
/// would print it.
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
    /// What the variable holds, or the file that another one names, and how a message speaks of it. Empty is the same
    /// as absent, but a file that is named must hold something.
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
