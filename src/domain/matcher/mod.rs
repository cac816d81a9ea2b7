//! Matchers: they find tasks of one kind whose metadata has equal values in the listed fields.

use std::fmt::Write;

use serde_json::{Map, Number, Value};

use super::task::status::Status;

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

#[cfg(test)]
mod tests;
