//! The matchers of `dedupe_strategy`, and the lists of metadata fields that matchers compare.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::input::{Input, input};
use super::problems::ProblemCode;
use super::reading::{Place, Reading, Source};
use super::values::{List, Text, read_word};
use crate::domain::matcher::DedupeMatcher;
use crate::domain::task::status::Status;

const MAX_MATCHERS: usize = 10;
const MAX_FIELDS: usize = 20;
/// The most characters of a field name.
const MAX_NAME_CHARS: usize = 255;

/// The matchers of a new task.
pub type DedupeStrategy = List<DedupeMatcherInput, 0, MAX_MATCHERS>;

input! {
    /// Selects existing tasks of a kind and status whose named metadata fields have the same values as those of the new
    /// task.
    pub struct DedupeMatcherInput as "DedupeMatcher" {
        /// The kind of the matching tasks; by default the task's own kind.
        kind: Option<Text<1, 100>>,
        /// The status of the matching tasks; by default any status of a task that has not ended.
        status: Option<Status>,
        /// Names of top-level metadata fields. The new task must have them.
        fields: Option<FieldNames>,
    }
}

impl DedupeMatcherInput {
    /// Completes the matcher of a task of this kind and with this metadata.
    pub fn matcher(self, kind: &str, metadata: Option<&Value>, at: Place, reading: &mut Reading) -> DedupeMatcher {
        let names = self.fields.unwrap_or_default();
        for (i, name) in &names.0 {
            if metadata.and_then(|metadata| metadata.get(name)).is_none() {
                let at = at.field("fields");
                let message = format!("the metadata of the task has no field \"{name}\"");
                reading.add(at.item(*i), ProblemCode::MissingMetadataField, message);
            }
        }
        DedupeMatcher {
            kind: self.kind.map_or_else(|| kind.to_owned(), |kind| kind.0),
            status: self.status,
            fields: names.sorted(),
        }
    }
}

/// Names of metadata fields, each once and with its position in the list.
#[derive(Debug, Default)]
pub struct FieldNames(Vec<(usize, String)>);

impl FieldNames {
    pub fn sorted(self) -> Vec<String> {
        let mut names: Vec<String> = self.0.into_iter().map(|(_, name)| name).collect();
        names.sort_unstable();
        names
    }
}

impl Input for FieldNames {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<FieldNames> {
        let List(names) = List::<FieldName, 0, MAX_FIELDS>::read(source, at, reading)?;
        let mut seen = BTreeSet::new();
        for (i, name) in names.iter().enumerate() {
            if let Some(name) = &name.0
                && !seen.insert(name)
            {
                reading.add(at.item(i), ProblemCode::NotUnique, format!("\"{name}\" is named twice"));
            }
        }
        Some(FieldNames(names.into_iter().enumerate().filter_map(|(i, name)| Some((i, name.0?))).collect()))
    }

    fn schema() -> Value {
        let mut schema = List::<FieldName, 0, MAX_FIELDS>::schema();
        schema["uniqueItems"] = json!(true);
        schema
    }
}

/// The name of a metadata field; `None` if it has a problem, so that it keeps its position in the list.
struct FieldName(Option<String>);

impl Input for FieldName {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<FieldName> {
        Some(FieldName(Text::<0, MAX_NAME_CHARS>::read(source, at, reading).map(|name| name.0)))
    }

    fn schema() -> Value {
        Text::<0, MAX_NAME_CHARS>::schema()
    }
}

/// Reads a status in either spelling, in any letter case.
impl Input for Status {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<Status> {
        let names = Status::ALL.map(|status| format!("{status:?}"));
        read_word(source, at, &names.each_ref().map(String::as_str), Status::parse, reading)
    }

    fn schema() -> Value {
        super::input::reference("Status")
    }
}

#[cfg(test)]
#[path = "tests/new_matcher.rs"]
mod tests;
