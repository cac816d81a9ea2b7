//! The types of values in requests. Each type states its limits once: its reader checks them, and its schema describes
//! them.

use std::marker::PhantomData;

use chrono::{DateTime, Utc};
use serde_json::{Value, json};

use super::RequestLimits;
use super::fields::{name_of, name_of_text, not_a, shown};
use super::input::{Input, Schemas, reference};
use super::problems::ProblemCode;
use super::reading::{Place, Reading, Source};
use crate::domain::json;

/// The largest 32-bit number.
pub const MAX_I32: i64 = i32::MAX as i64;

/// A text of `MIN` to `MAX` characters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Text<const MIN: usize, const MAX: usize>(pub String);

impl<const MIN: usize, const MAX: usize> Input for Text<MIN, MAX> {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<Self> {
        let text = match source.tree(at, reading)? {
            Value::String(text) => text,
            other => {
                not_a("a string", name_of(&other), at, reading);
                return None;
            }
        };
        let count = text.chars().count();
        if (MIN..=MAX).contains(&count) {
            return Some(Text(text));
        }
        let allowed = if MIN == 0 { format!("at most {MAX}") } else { format!("{MIN} to {MAX}") };
        reading.add(at, ProblemCode::WrongLength, format!("must have {allowed} characters, not {count}"));
        None
    }

    fn schema() -> Value {
        json!({"type": "string", "minLength": MIN, "maxLength": MAX})
    }
}

/// A text of 1 to `MAX` characters, at least one of them visible.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Label<const MAX: usize>(pub String);

impl<const MAX: usize> Input for Label<MAX> {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<Self> {
        let Text(text) = Text::<1, MAX>::read(source, at, reading)?;
        if is_blank(&text) {
            reading.add(at, ProblemCode::Blank, "must not be blank");
            return None;
        }
        Some(Label(text))
    }

    fn schema() -> Value {
        json!({"type": "string", "minLength": 1, "maxLength": MAX, "pattern": "[^\\s\\u0000-\\u001f\\u007f-\\u009f]"})
    }
}

/// Whether a text has no visible character.
pub fn is_blank(text: &str) -> bool {
    text.chars().all(|c| c.is_whitespace() || c.is_control())
}

/// A whole number from `MIN` to `MAX`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Whole<const MIN: i64, const MAX: i64>(pub i64);

impl<const MIN: i64, const MAX: i64> Whole<MIN, MAX> {
    /// The number as a smaller type. `MIN` and `MAX` keep it in range.
    pub fn to<T: TryFrom<i64> + Default>(self) -> T {
        T::try_from(self.0).unwrap_or_default()
    }
}

impl<const MIN: i64, const MAX: i64> Input for Whole<MIN, MAX> {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<Self> {
        read_whole(source, at, MIN, MAX, reading).map(Whole)
    }

    fn schema() -> Value {
        let mut schema = json!({"type": "integer", "format": "int64", "minimum": MIN});
        if MAX <= MAX_I32 {
            schema["format"] = json!("int32");
        }
        if MAX < i64::MAX {
            schema["maximum"] = json!(MAX);
        }
        schema
    }
}

fn read_whole(source: Source, at: Place, least: i64, most: i64, reading: &mut Reading) -> Option<i64> {
    let value = source.tree(at, reading)?;
    let number = value.as_i64().or_else(|| whole(value.as_f64()?)).filter(|number| (least..=most).contains(number));
    if number.is_none() {
        let code = if value.is_number() { ProblemCode::OutOfRange } else { ProblemCode::WrongType };
        reading.add(at, code, format!("must be a whole number from {least} to {most}, not {}", shown(&value)));
    }
    number
}

/// The whole number that a float such as `5.0` stands for. Floats hold whole numbers exactly up to 2^53.
#[allow(clippy::cast_possible_truncation, reason = "checked")]
fn whole(number: f64) -> Option<i64> {
    (number.fract() == 0.0 && number.abs() <= 9_007_199_254_740_992.0).then_some(number as i64)
}

/// A limit from the configuration.
pub trait Limit {
    /// The name of the setting.
    const NAME: &'static str;
    const LEAST: i64;

    fn most(limits: &RequestLimits) -> i64;
}

/// A whole number up to a limit from the configuration.
#[derive(Debug, PartialEq, Eq)]
pub struct Limited<L>(pub i64, PhantomData<L>);

impl<L> Limited<L> {
    /// The number as another type; the limits keep it in range.
    pub fn to<T: TryFrom<i64> + Default>(&self) -> T {
        T::try_from(self.0).unwrap_or_default()
    }
}

impl<L> Default for Limited<L> {
    fn default() -> Limited<L> {
        Limited(0, PhantomData)
    }
}

impl<L: Limit> Input for Limited<L> {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<Self> {
        let most = L::most(reading.limits);
        read_whole(source, at, L::LEAST, most, reading).map(|number| Limited(number, PhantomData))
    }

    fn schema() -> Value {
        json!({"type": "integer", "format": "int64", "minimum": L::LEAST, "x-limit": L::NAME})
    }
}

impl Input for bool {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<bool> {
        let value = source.tree(at, reading)?;
        if value.as_bool().is_none() {
            not_a("true or false", name_of(&value), at, reading);
        }
        value.as_bool()
    }

    fn schema() -> Value {
        json!({"type": "boolean"})
    }
}

/// A time in RFC 3339 format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time(pub DateTime<Utc>);

impl Input for Time {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<Time> {
        let Text(text) = Text::<0, { usize::MAX }>::read(source, at, reading)?;
        let parsed = parse_time(&text);
        if parsed.is_none() {
            let shown = shown(&Value::String(text));
            reading.add(at, ProblemCode::Malformed, format!("must be an RFC 3339 timestamp, not {shown}"));
        }
        parsed.map(Time)
    }

    fn schema() -> Value {
        json!({"type": "string", "format": "date-time"})
    }
}

/// Parses an RFC 3339 timestamp. A time before 1970 counts as 1970: it is past either way, and delays can be added to it
/// and subtracted from it in PostgreSQL.
pub fn parse_time(text: &str) -> Option<DateTime<Utc>> {
    let at = DateTime::parse_from_rfc3339(text).ok()?.with_timezone(&Utc);
    Some(at.max(DateTime::UNIX_EPOCH)).filter(|at| at.timestamp() <= 253_402_300_799)
}

/// A list of at most `MAX` entries.
#[derive(Debug, PartialEq)]
pub struct List<T, const MIN: usize, const MAX: usize>(pub Vec<T>);

impl<T, const MIN: usize, const MAX: usize> Default for List<T, MIN, MAX> {
    fn default() -> Self {
        List(Vec::new())
    }
}

impl<T: Input, const MIN: usize, const MAX: usize> Input for List<T, MIN, MAX> {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<Self> {
        let items = read_array(source, at, reading)?;
        if !(MIN..=MAX).contains(&items.len()) {
            let allowed = match (MIN, MAX) {
                (0, most) => format!("at most {most} entries"),
                (1, usize::MAX) => "at least one entry".to_owned(),
                (least, most) => format!("{least} to {most} entries"),
            };
            reading.add(at, ProblemCode::WrongCount, format!("must have {allowed}, not {}", items.len()));
            return None;
        }
        Some(List(read_items(items, at, reading)))
    }

    fn schema() -> Value {
        let mut schema = json!({"type": "array", "items": T::schema()});
        if MIN > 0 {
            schema["minItems"] = json!(MIN);
        }
        if MAX < usize::MAX {
            schema["maxItems"] = json!(MAX);
        }
        schema
    }

    fn define(schemas: &mut Schemas) {
        T::define(schemas);
    }
}

pub fn read_array(source: Source, at: Place, reading: &mut Reading) -> Option<Vec<Value>> {
    match source.tree(at, reading)? {
        Value::Array(items) => Some(items),
        other => {
            not_a("an array", name_of(&other), at, reading);
            None
        }
    }
}

/// Reads the entries of a list. Entries with problems are left out.
pub fn read_items<T: Input>(items: Vec<Value>, at: Place, reading: &mut Reading) -> Vec<T> {
    let read = |(i, item)| T::read(Source::Tree(item), at.item(i), reading);
    items.into_iter().enumerate().filter_map(read).collect()
}

/// The metadata of a task or batch: an object of limited size. Empty metadata counts as none.
#[derive(Debug, Default, PartialEq)]
pub struct MetadataInput(pub Option<Value>);

impl Input for MetadataInput {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<MetadataInput> {
        if let Source::Text(text) = &source
            && !text.get().starts_with('{')
        {
            not_a("an object", name_of_text(text.get()), at, reading);
            return None;
        }
        let metadata = source.tree(at, reading)?;
        let Some(object) = metadata.as_object() else {
            not_a("an object", name_of(&metadata), at, reading);
            return None;
        };
        let (empty, size) = (object.is_empty(), json::stored_len(&metadata));
        if size > reading.limits.metadata_bytes {
            let most = reading.limits.metadata_bytes;
            reading.add(at, ProblemCode::TooLarge, format!("must have at most {most} bytes, not {size}"));
        }
        Some(MetadataInput((!empty).then_some(metadata)))
    }

    fn schema() -> Value {
        reference("Metadata")
    }
}

/// Reads one of a few words, compared by `find`.
pub fn read_word<T>(
    source: Source,
    at: Place,
    words: &[&str],
    find: impl FnOnce(&str) -> Option<T>,
    reading: &mut Reading,
) -> Option<T> {
    let value = source.tree(at, reading)?;
    let found = value.as_str().and_then(find);
    if found.is_none() {
        let code = if value.is_string() { ProblemCode::UnknownValue } else { ProblemCode::WrongType };
        reading.add(at, code, format!("must be one of {}, not {}", words.join(", "), shown(&value)));
    }
    found
}
