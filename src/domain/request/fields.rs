//! Reads untrusted JSON field by field and collects every problem with the path of its field,
//! instead of stopping at the first. Knows nothing of what the fields mean.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::RangeInclusive;

use chrono::{DateTime, Utc};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::problems::{Problems, refuse_nul_in_object};
use crate::domain::json::{self, Object};

/// An object that is being read. Readers take its fields out one by one; [`Fields::close`] reports the rest as unknown.
pub struct Fields<'a> {
    path: String,
    map: Map<String, Value>,
    /// Fields that stay text.
    texts: BTreeMap<String, &'a RawValue>,
}

impl<'a> Fields<'a> {
    pub fn open(value: Value, path: impl Into<String>, problems: &mut Problems) -> Option<Fields<'a>> {
        let path = path.into();
        match value {
            Value::Object(map) => Some(Fields { path, map, texts: BTreeMap::new() }),
            other => {
                problems.add(path, format!("must be an object, not {}", name_of(&other)));
                None
            }
        }
    }

    /// Opens the text of an object. The fields that `keeps_text` selects stay text; [`Fields::text`] takes them.
    pub fn open_text(
        text: &'a RawValue,
        path: impl Into<String>,
        keeps_text: impl Fn(&str) -> bool,
        problems: &mut Problems,
    ) -> Option<Fields<'a>> {
        let (text, path) = (text.get(), path.into());
        if !text.starts_with('{') {
            problems.add(path, format!("must be an object, not {}", name_of_text(text)));
            return None;
        }
        match Object::read(text, keeps_text) {
            Ok(Object { trees: map, texts }) => {
                refuse_nul_in_object(&map, &path, problems);
                Some(Fields { path, map, texts })
            }
            Err(error) => {
                problems.add(path, format!("is not valid JSON: {error}"));
                None
            }
        }
    }

    /// Parses the remaining text fields into trees if they have at most `most` bytes in total. Otherwise drops them and
    /// returns their size.
    pub fn parse_texts(&mut self, most: usize, problems: &mut Problems) -> Result<(), usize> {
        let texts = std::mem::take(&mut self.texts);
        if texts.values().map(|text| text.get().len()).sum::<usize>() > most {
            let size = texts.iter().map(|(name, text)| name.len() + json::compact_len(text.get()) + 4).sum();
            if size > most {
                return Err(size);
            }
        }
        for (name, text) in texts {
            match serde_json::from_str(text.get()) {
                Ok(value) => {
                    self.map.insert(name, value);
                }
                Err(error) => problems.add(self.path(&name), format!("is not valid JSON: {error}")),
            }
        }
        refuse_nul_in_object(&self.map, &self.path, problems);
        Ok(())
    }

    /// Reports every field that was not taken as unknown.
    pub fn close(self, problems: &mut Problems) {
        for name in self.map.keys().chain(self.texts.keys()) {
            problems.add(self.path(name), "unknown field");
        }
    }

    pub fn path(&self, name: &str) -> String {
        format!("{}.{name}", self.path)
    }

    /// Takes the field out; null counts as absent.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|v| !v.is_null())
    }

    /// Takes out those of the fields that are null.
    pub fn drop_nulls(&mut self, names: &[&str]) {
        self.map.retain(|name, value| !value.is_null() || !names.contains(&name.as_str()));
    }

    /// Takes out a field that stayed text; null counts as absent.
    pub fn text(&mut self, name: &str) -> Option<&'a RawValue> {
        self.texts.remove(name).filter(|text| text.get() != "null")
    }

    /// Takes out an array that stayed text. Returns its first items, at most `most` of them, and the number of all.
    pub fn texts(&mut self, name: &str, most: usize, problems: &mut Problems) -> Option<(Vec<&'a RawValue>, usize)> {
        let text = self.text(name)?.get();
        if !text.starts_with('[') {
            problems.add(self.path(name), format!("must be an array, not {}", name_of_text(text)));
            return None;
        }
        let items = json::items(text, most);
        items.map_err(|error| problems.add(self.path(name), format!("is not valid JSON: {error}"))).ok()
    }

    pub fn string(&mut self, name: &str, length: RangeInclusive<usize>, problems: &mut Problems) -> Option<String> {
        let value = self.take(name)?;
        let Value::String(text) = value else {
            problems.add(self.path(name), format!("must be a string, not {}", name_of(&value)));
            return None;
        };
        let count = text.chars().count();
        if length.contains(&count) {
            return Some(text);
        }
        let (low, high) = (length.start(), length.end());
        problems.add(self.path(name), format!("must have {low} to {high} characters, not {count}"));
        None
    }

    pub fn required_string(
        &mut self,
        name: &str,
        length: RangeInclusive<usize>,
        problems: &mut Problems,
    ) -> Option<String> {
        self.require(name, problems);
        self.string(name, length, problems)
    }

    /// Takes out a required string that must not be blank.
    pub fn required_text(
        &mut self,
        name: &str,
        length: RangeInclusive<usize>,
        problems: &mut Problems,
    ) -> Option<String> {
        let text = self.required_string(name, length, problems)?;
        if is_blank(&text) {
            problems.add(self.path(name), "must not be blank");
            return None;
        }
        Some(text)
    }

    pub fn integer<T>(&mut self, name: &str, range: RangeInclusive<T>, problems: &mut Problems) -> Option<T>
    where
        T: TryFrom<i64> + PartialOrd + Display,
    {
        let value = self.take(name)?;
        let number = value.as_i64().and_then(|n| T::try_from(n).ok()).filter(|n| range.contains(n));
        if number.is_none() {
            let (low, high) = (range.start(), range.end());
            problems
                .add(self.path(name), format!("must be a whole number from {low} to {high}, not {}", shown(&value)));
        }
        number
    }

    pub fn boolean(&mut self, name: &str, problems: &mut Problems) -> Option<bool> {
        let value = self.take(name)?;
        if value.as_bool().is_none() {
            problems.add(self.path(name), format!("must be true or false, not {}", name_of(&value)));
        }
        value.as_bool()
    }

    pub fn object(&mut self, name: &str, problems: &mut Problems) -> Option<Value> {
        let value = self.take(name)?;
        if value.is_object() {
            return Some(value);
        }
        problems.add(self.path(name), format!("must be an object, not {}", name_of(&value)));
        None
    }

    pub fn array(&mut self, name: &str, problems: &mut Problems) -> Option<Vec<Value>> {
        match self.take(name)? {
            Value::Array(items) => Some(items),
            other => {
                problems.add(self.path(name), format!("must be an array, not {}", name_of(&other)));
                None
            }
        }
    }

    pub fn timestamp(&mut self, name: &str, problems: &mut Problems) -> Option<DateTime<Utc>> {
        let text = self.string(name, 1..=64, problems)?;
        let parsed = DateTime::parse_from_rfc3339(&text).ok().map(|t| t.with_timezone(&Utc)).filter(representable);
        if parsed.is_none() {
            problems
                .add(self.path(name), format!("must be an RFC 3339 timestamp, not {}", shown(&Value::String(text))));
        }
        parsed
    }

    /// Takes out a field that must be one of a few words, compared exactly.
    pub fn choice<T: Copy>(&mut self, name: &str, choices: &[(&str, T)], problems: &mut Problems) -> Option<T> {
        let value = self.take(name)?;
        self.pick(name, &value, choices, problems)
    }

    /// Checks that a value is one of a few words, compared exactly.
    pub fn pick<T: Copy>(
        &self,
        name: &str,
        value: &Value,
        choices: &[(&str, T)],
        problems: &mut Problems,
    ) -> Option<T> {
        let found = value.as_str().and_then(|text| choices.iter().find(|(word, _)| *word == text));
        if found.is_none() {
            let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
            problems.add(self.path(name), format!("must be one of {}, not {}", words.join(", "), shown(value)));
        }
        found.map(|(_, value)| *value)
    }

    /// Whether the field is present, even if it is null.
    pub fn contains(&self, name: &str) -> bool {
        self.map.contains_key(name) || self.texts.contains_key(name)
    }

    /// Whether the field is present and not null.
    pub fn has(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(|v| !v.is_null()) || self.texts.get(name).is_some_and(|t| t.get() != "null")
    }

    pub fn require(&self, name: &str, problems: &mut Problems) {
        if !self.has(name) {
            problems.add(self.path(name), "is required");
        }
    }
}

/// Whether PostgreSQL's timestamps can hold the time, with room to add delays.
pub fn representable(at: &DateTime<Utc>) -> bool {
    (0..=253_402_300_799).contains(&at.timestamp())
}

/// Whether a text has no visible character.
pub fn is_blank(text: &str) -> bool {
    text.chars().all(|c| c.is_whitespace() || c.is_control())
}

pub(in crate::domain) fn name_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Names the type of a JSON text, as [`name_of`] does for a parsed value.
fn name_of_text(text: &str) -> &'static str {
    match text.as_bytes().first() {
        Some(b'n') => "null",
        Some(b't' | b'f') => "a boolean",
        Some(b'"') => "a string",
        Some(b'[') => "an array",
        Some(b'{') => "an object",
        _ => "a number",
    }
}

pub(in crate::domain) fn shown(value: &Value) -> String {
    match value {
        Value::Number(number) => number.to_string(),
        Value::String(text) if text.chars().count() <= 40 => format!("\"{text}\""),
        other => name_of(other).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::request::problems::refuse_nul;
    use serde_json::json;

    #[test]
    fn each_problem_names_the_path_of_its_field() {
        let mut problems = Problems::default();
        let value =
            json!({"name": 7, "count": 1.5, "typo": 1, "when": "yesterday", "text": "a\0b", "deep": [{"x": "\0"}]});
        refuse_nul(&value, "[0]", &mut problems);
        let mut fields = Fields::open(value, "[0]", &mut problems).unwrap();
        assert_eq!(fields.string("name", 1..=5, &mut problems), None);
        assert_eq!(fields.integer("count", 0..=9, &mut problems), None);
        assert_eq!(fields.timestamp("when", &mut problems), None);
        assert_eq!(fields.required_string("kind", 1..=5, &mut problems), None);
        fields.take("text");
        fields.take("deep");
        fields.close(&mut problems);
        let mut found = problems.into_vec();
        found.sort();
        assert_eq!(
            found,
            [
                "[0].count: must be a whole number from 0 to 9, not 1.5",
                "[0].deep[0].x: must not contain NUL characters",
                "[0].kind: is required",
                "[0].name: must be a string, not a number",
                "[0].text: must not contain NUL characters",
                "[0].typo: unknown field",
                "[0].when: must be an RFC 3339 timestamp, not \"yesterday\"",
            ]
        );
    }
}
