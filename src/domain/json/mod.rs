//! JSON that is kept as text, and the size of JSON. A parsed tree takes up to 16 times the memory of its text, so
//! values that the service only passes on are never parsed into one. This module knows nothing of what the values
//! mean.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::io;

use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::ser::Formatter;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::request::problems::{ProblemCode, Problems, refuse_nul};

/// The deepest nesting of a value that the service passes on. Below the parser's own limit of 128, which leaves room
/// for the levels around the value.
const MAX_DEPTH: usize = 120;

/// One JSON value as its text, without whitespace between tokens.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RawJson(Box<RawValue>);

impl RawJson {
    pub fn get(&self) -> &str {
        self.0.get()
    }

    /// Reads a value of a request. Refuses values that a tree could not hold or PostgreSQL could not store.
    pub fn read_text(text: &RawValue, path: impl fmt::Display, problems: &mut Problems) -> Option<RawJson> {
        let text = text.get();
        let mut parser = serde_json::Deserializer::from_str(text);
        if let Err(error) = Validator(MAX_DEPTH).deserialize(&mut parser) {
            let mut found = Problems::default();
            if let Ok(tree) = serde_json::from_str(text) {
                refuse_nul(&tree, &path, &mut found);
            }
            if found.is_empty() {
                found.add(path, ProblemCode::TooLarge, error);
            }
            problems.append(found);
            return None;
        }
        RawValue::from_string(compact(text)).map(RawJson).ok()
    }
}

impl From<RawJson> for String {
    fn from(json: RawJson) -> String {
        String::from(Box::<str>::from(json.0))
    }
}

impl PartialEq for RawJson {
    fn eq(&self, other: &RawJson) -> bool {
        self.get() == other.get()
    }
}

/// Validates a value without keeping it. Holds how many more levels of nesting are allowed.
struct Validator(usize);

impl Validator {
    fn levels_left<E: serde::de::Error>(&self) -> Result<usize, E> {
        self.0.checked_sub(1).ok_or_else(|| E::custom(format!("must not be nested deeper than {MAX_DEPTH} levels")))
    }
}

impl<'de> DeserializeSeed<'de> for Validator {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Validator {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<(), E> {
        if text.contains('\0') { Err(E::custom("must not contain NUL characters")) } else { Ok(()) }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let levels = self.levels_left()?;
        while items.next_element_seed(Validator(levels))?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        let levels = self.levels_left()?;
        while entries.next_key_seed(Validator(levels))?.is_some() {
            entries.next_value_seed(Validator(levels))?;
        }
        Ok(())
    }
}

/// A JSON object. Most of its fields are parsed into trees; selected fields stay text.
#[derive(Default)]
pub struct Object<'a> {
    pub trees: Map<String, Value>,
    pub texts: BTreeMap<String, &'a RawValue>,
}

impl<'a> Object<'a> {
    /// Reads an object. `keeps_text` selects the fields that stay text. If a name occurs twice, the last value counts.
    pub fn read(text: &'a str, keeps_text: impl Fn(&str) -> bool) -> serde_json::Result<Object<'a>> {
        serde_json::Deserializer::from_str(text).deserialize_map(Entries(keeps_text))
    }
}

struct Entries<Keep>(Keep);

impl<'de, Keep: Fn(&str) -> bool> Visitor<'de> for Entries<Keep> {
    type Value = Object<'de>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Object<'de>, A::Error> {
        let mut object = Object::default();
        while let Some(name) = entries.next_key::<String>()? {
            if (self.0)(&name) {
                object.texts.insert(name, entries.next_value()?);
            } else {
                object.trees.insert(name, entries.next_value()?);
            }
        }
        Ok(object)
    }
}

/// Returns the first items of an array, at most `most` of them, and the number of all its items.
pub fn items(text: &str, most: usize) -> serde_json::Result<(Vec<&RawValue>, usize)> {
    serde_json::Deserializer::from_str(text).deserialize_seq(Items(most))
}

struct Items(usize);

impl<'de> Visitor<'de> for Items {
    type Value = (Vec<&'de RawValue>, usize);

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let (mut kept, mut count) = (Vec::new(), 0);
        while kept.len() < self.0 {
            let Some(item) = items.next_element()? else { return Ok((kept, count)) };
            kept.push(item);
            count += 1;
        }
        while items.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok((kept, count))
    }
}

/// Sets a field of an object: removes every field of that name and appends the new value. Returns `None` if the text is
/// not an object.
pub fn with_field(object: &str, name: &str, value: &str) -> Option<String> {
    if !object.starts_with('{') {
        return None;
    }
    let fields = serde_json::Deserializer::from_str(object).deserialize_map(Pairs).ok()?;
    let mut text = String::with_capacity(object.len() + name.len() + value.len() + 4);
    text.push('{');
    for (field, value) in fields.into_iter().filter(|(field, _)| field != name) {
        let _ = write!(text, "{}:{},", Value::String(field), value.get());
    }
    let _ = write!(text, "{}:{value}}}", Value::from(name));
    Some(text)
}

struct Pairs;

impl<'de> Visitor<'de> for Pairs {
    type Value = Vec<(String, &'de RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut pairs = Vec::new();
        while let Some(pair) = entries.next_entry()? {
            pairs.push(pair);
        }
        Ok(pairs)
    }
}

/// Writes a request in a form that does not depend on whitespace or the order of fields: the text of its tree. Holds at
/// most one item of an array in memory as a tree.
pub fn write_canonical(text: &str, out: &mut impl io::Write) -> io::Result<()> {
    match text.trim_start().as_bytes().first() {
        Some(b'[') => {
            let (items, _) = items(text, usize::MAX)?;
            write_list(out, *b"[]", items, |out, item| write_tree(item.get(), out))
        }
        Some(b'{') => {
            let object = Object::read(text, |_| true)?;
            write_list(out, *b"{}", object.texts, |out, (name, value)| {
                write!(out, "{}:", Value::String(name))?;
                match value.get().as_bytes().first() {
                    Some(b'[') => {
                        let (items, _) = items(value.get(), usize::MAX)?;
                        write_list(out, *b"[]", items, |out, item| write_tree(item.get(), out))
                    }
                    _ => write_tree(value.get(), out),
                }
            })
        }
        _ => write_tree(text, out),
    }
}

fn write_list<W: io::Write, T>(
    out: &mut W,
    [open, close]: [u8; 2],
    items: impl IntoIterator<Item = T>,
    write: impl Fn(&mut W, T) -> io::Result<()>,
) -> io::Result<()> {
    out.write_all(&[open])?;
    for (i, item) in items.into_iter().enumerate() {
        if i > 0 {
            out.write_all(b",")?;
        }
        write(out, item)?;
    }
    out.write_all(&[close])
}

fn write_tree(text: &str, out: &mut impl io::Write) -> io::Result<()> {
    Ok(serde_json::to_writer(out, &serde_json::from_str::<Value>(text)?)?)
}

/// Removes whitespace between tokens.
fn compact(text: &str) -> String {
    let mut kept = Vec::with_capacity(text.len());
    kept.extend(significant_bytes(text));
    // Only ASCII bytes are removed, so the text stays valid UTF-8.
    String::from_utf8(kept).unwrap_or_default()
}

/// Returns the number of bytes of a JSON text without whitespace between tokens.
pub fn compact_len(text: &str) -> usize {
    significant_bytes(text).count()
}

fn significant_bytes(text: &str) -> impl Iterator<Item = u8> {
    let (mut in_string, mut escaped) = (false, false);
    text.bytes().filter(move |byte| {
        let keep = in_string || !byte.is_ascii_whitespace();
        in_string ^= *byte == b'"' && !escaped;
        escaped = in_string && *byte == b'\\' && !escaped;
        keep
    })
}

/// Returns the number of bytes of a value that is stored as jsonb, without whitespace. PostgreSQL writes numbers out:
/// `1e308` has 309 digits.
pub fn stored_len(value: &Value) -> usize {
    let mut count = ByteCounter(0);
    let mut serializer = serde_json::Serializer::with_formatter(&mut count, PlainNumbers);
    // Counting never fails.
    let _ = value.serialize(&mut serializer);
    count.0
}

struct ByteCounter(usize);

impl io::Write for ByteCounter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes numbers without exponents.
struct PlainNumbers;

impl Formatter for PlainNumbers {
    fn write_f64<W: ?Sized + io::Write>(&mut self, out: &mut W, value: f64) -> io::Result<()> {
        // `serde_json` writes whole numbers below 1e16 with `.0`, which PostgreSQL keeps, and larger ones with an
        // exponent.
        if value.fract() == 0.0 && value.abs() < 1e16 { write!(out, "{value:.1}") } else { write!(out, "{value}") }
    }
}

#[cfg(test)]
mod tests;
