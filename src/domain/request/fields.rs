//! The fields of an object of a request, taken out one by one. Knows nothing of what they mean.

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::problems::{ProblemCode, refuse_nul_in_object};
use super::reading::{Place, Reading, Source};
use crate::domain::json::{self, Object};

/// An object that is being read. Readers take its fields out; [`Fields::close`] reports the rest as unknown.
#[derive(Debug)]
pub struct Fields<'a> {
    at: Place<'a>,
    map: Map<String, Value>,
    /// Fields that stay text.
    texts: BTreeMap<String, &'a RawValue>,
}

impl<'a> Fields<'a> {
    /// Opens an object. If it is text, the fields that `keeps_text` selects stay text.
    pub fn open(
        source: Source<'a>,
        at: Place<'a>,
        keeps_text: impl Fn(&str) -> bool,
        reading: &mut Reading,
    ) -> Option<Fields<'a>> {
        let text = match source {
            Source::Tree(Value::Object(map)) => return Some(Fields { at, map, texts: BTreeMap::new() }),
            Source::Tree(other) => {
                not_a("an object", name_of(&other), at, reading);
                return None;
            }
            Source::Text(text) => text.get(),
        };
        if !text.starts_with('{') {
            not_a("an object", name_of_text(text), at, reading);
            return None;
        }
        match Object::read(text, keeps_text) {
            Ok(Object { trees: map, texts }) => {
                refuse_nul_in_object(&map, at, &mut reading.problems);
                Some(Fields { at, map, texts })
            }
            Err(error) => {
                reading.add(at, ProblemCode::Malformed, format!("is not valid JSON: {error}"));
                None
            }
        }
    }

    /// Parses the text fields, except those that `keeps_text` selects, into trees if they have at most `most` bytes in
    /// total. Otherwise drops them and returns their size.
    pub fn parse_texts(
        &mut self,
        keeps_text: impl Fn(&str) -> bool,
        most: usize,
        reading: &mut Reading,
    ) -> Result<(), usize> {
        let (kept, texts) = std::mem::take(&mut self.texts).into_iter().partition(|(name, _)| keeps_text(name));
        self.texts = kept;
        let texts: BTreeMap<String, &RawValue> = texts;
        if texts.values().map(|text| text.get().len()).sum::<usize>() > most {
            let size = texts.iter().map(|(name, text)| name.len() + json::compact_len(text.get()) + 4).sum();
            if size > most {
                return Err(size);
            }
        }
        for (name, text) in texts {
            if let Some(value) = Source::Text(text).tree(self.at.field(&name), reading) {
                self.map.insert(name, value);
            }
        }
        refuse_nul_in_object(&self.map, self.at, &mut reading.problems);
        Ok(())
    }

    /// Reports every field that was not taken as unknown, unless the request is read leniently.
    pub fn close(self, reading: &mut Reading) {
        for name in self.map.keys().chain(self.texts.keys()).filter(|_| reading.strict) {
            reading.problems.add(self.at.field(name), ProblemCode::UnknownField, "unknown field");
        }
    }

    pub const fn at(&self) -> Place<'a> {
        self.at
    }

    /// Takes out a field, which may be null.
    pub fn take(&mut self, name: &str) -> Option<Source<'a>> {
        let text = || self.texts.remove(name).map(Source::Text);
        self.map.remove(name).map(Source::Tree).or_else(text)
    }

    /// Drops all fields that are null.
    pub fn drop_nulls(&mut self) {
        self.map.retain(|_, value| !value.is_null());
    }

    /// Returns a field without taking it out. A field that stayed text is not found.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }
}

/// Adds the problem that a value has another type than the one that is wanted.
pub fn not_a(wanted: &str, found: &str, at: Place, reading: &mut Reading) {
    reading.add(at, ProblemCode::WrongType, format!("must be {wanted}, not {found}"));
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
pub(in crate::domain) fn name_of_text(text: &str) -> &'static str {
    match text.as_bytes().first() {
        Some(b'n') => "null",
        Some(b't' | b'f') => "a boolean",
        Some(b'"') => "a string",
        Some(b'[') => "an array",
        Some(b'{') => "an object",
        _ => "a number",
    }
}

/// A value as messages show it.
pub(in crate::domain) fn shown(value: &Value) -> String {
    match value {
        Value::Number(number) => number.to_string(),
        Value::String(text) if text.chars().count() <= 40 => format!("\"{text}\""),
        other => name_of(other).into(),
    }
}
