//! Matchers: they find tasks of one kind whose metadata has equal values in the listed fields.

use std::collections::BTreeSet;
use std::fmt::Write;

use serde_json::{Map, Number, Value};

use super::request::fields::{Fields, name_of, shown};
use super::request::problems::Problems;
use super::task::status::Status;

const MAX_MATCHERS: usize = 10;
const MAX_FIELDS: usize = 20;
/// The most characters of a field name.
const MAX_NAME_CHARS: usize = 255;

/// A matcher of a `dedupe_strategy`: a task that it finds is the existing task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DedupeMatcher {
    pub kind: String,
    /// `None` matches every status in which a task is alive.
    pub status: Option<Status>,
    /// Sorted, without duplicates. The metadata of the task that carries the matcher has all of them.
    pub fields: Vec<String>,
}

impl DedupeMatcher {
    pub fn accepts(&self, status: Status) -> bool {
        self.status.map_or(!status.is_terminal(), |wanted| wanted == status)
    }
}

/// Returns the values of these fields, or `None` if one is missing.
pub fn values(fields: &[String], metadata: Option<&Value>) -> Option<Map<String, Value>> {
    fields.iter().map(|name| Some((name.clone(), metadata?.get(name)?.clone()))).collect()
}

/// Returns a text that is the same for all tasks of the kind with equal values in these fields, or `None` if one is
/// missing. Values are equal if PostgreSQL considers them equal: the order of fields does not matter, and 1 equals 1.0.
pub fn key(kind: &str, fields: &[String], metadata: Option<&Value>) -> Option<String> {
    let mut text = Value::from(kind).to_string();
    for name in fields {
        let value = metadata?.get(name)?;
        let _ = write!(text, ",{}:", Value::from(name.as_str()));
        write_value(&mut text, value);
    }
    Some(text)
}

fn write_value(text: &mut String, value: &Value) {
    match value {
        Value::Number(number) => text.push_str(&normalized(number)),
        Value::Array(items) => {
            text.push('[');
            for item in items {
                write_value(text, item);
                text.push(',');
            }
            text.push(']');
        }
        Value::Object(map) => {
            text.push('{');
            for (name, item) in map {
                let _ = write!(text, "{}:", Value::from(name.as_str()));
                write_value(text, item);
                text.push(',');
            }
            text.push('}');
        }
        other => text.push_str(&other.to_string()),
    }
}

/// Returns the shortest form of a number: `15e-1` for 1.5 and 1.50, `1e2` for 100 and 1e2.
fn normalized(number: &Number) -> String {
    let text = number.to_string();
    let (sign, text) = text.strip_prefix('-').map_or(("", text.as_str()), |rest| ("-", rest));
    let (digits, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let digits = format!("{whole}{fraction}");
    let kept = digits.trim_end_matches('0');
    let dropped = i64::try_from(digits.len() - kept.len()).unwrap_or(0) - i64::try_from(fraction.len()).unwrap_or(0);
    match kept.trim_start_matches('0') {
        "" => "0".into(),
        kept => format!("{sign}{kept}e{}", exponent.parse::<i64>().unwrap_or(0) + dropped),
    }
}

/// Reads the matchers of a new task of this kind and with this metadata.
pub fn read_strategy(
    fields: &mut Fields,
    kind: &str,
    metadata: Option<&Value>,
    problems: &mut Problems,
) -> Vec<DedupeMatcher> {
    let path = fields.path("dedupe_strategy");
    let items = fields.array("dedupe_strategy", problems).unwrap_or_default();
    if items.len() > MAX_MATCHERS {
        problems.add(path, format!("must have at most {MAX_MATCHERS} entries, not {}", items.len()));
        return Vec::new();
    }
    let read = |(i, item)| read_matcher(item, &format!("{path}[{i}]"), kind, metadata, problems);
    items.into_iter().enumerate().filter_map(read).collect()
}

/// Reads a matcher. `kind` and `metadata` are those of the task that carries it.
pub fn read_matcher(
    value: Value,
    path: &str,
    kind: &str,
    metadata: Option<&Value>,
    problems: &mut Problems,
) -> Option<DedupeMatcher> {
    let mut fields = Fields::open(value, path, problems)?;
    let matcher = DedupeMatcher {
        kind: fields.string("kind", 1..=100, problems).unwrap_or_else(|| kind.to_owned()),
        status: read_status(&mut fields, problems),
        fields: read_names(&mut fields, |name| metadata.and_then(|m| m.get(name)).is_some(), problems),
    };
    fields.close(problems);
    Some(matcher)
}

fn read_status(fields: &mut Fields, problems: &mut Problems) -> Option<Status> {
    let value = fields.take("status")?;
    let status = value.as_str().and_then(Status::parse);
    if status.is_none() {
        let names = Status::ALL.map(|status| format!("{status:?}")).join(", ");
        problems.add(fields.path("status"), format!("must be one of {names}, not {}", shown(&value)));
    }
    status
}

/// Reads the field `fields`: sorted names of metadata fields.
pub fn read_names(fields: &mut Fields, exists: impl Fn(&str) -> bool, problems: &mut Problems) -> Vec<String> {
    let path = fields.path("fields");
    let items = fields.array("fields", problems).unwrap_or_default();
    if items.len() > MAX_FIELDS {
        problems.add(path, format!("must have at most {MAX_FIELDS} entries, not {}", items.len()));
        return Vec::new();
    }
    let mut names = BTreeSet::new();
    for (i, item) in items.into_iter().enumerate() {
        let path = format!("{path}[{i}]");
        match item {
            Value::String(name) if name.chars().count() > MAX_NAME_CHARS => {
                problems
                    .add(path, format!("must have at most {MAX_NAME_CHARS} characters, not {}", name.chars().count()));
            }
            Value::String(name) if !exists(&name) => {
                problems.add(path, format!("the metadata of the task has no field \"{name}\""));
            }
            Value::String(name) if names.contains(&name) => problems.add(path, format!("\"{name}\" is named twice")),
            Value::String(name) => {
                names.insert(name);
            }
            other => problems.add(path, format!("must be a string, not {}", name_of(&other))),
        }
    }
    names.into_iter().collect()
}

#[cfg(test)]
mod tests;
