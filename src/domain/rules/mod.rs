//! Admission rules: a task starts only while the executing tasks that its rules count stay below a limit, in number or
//! in remaining work. Blocked tasks are grouped by the slots they wait for (table `parking`), and no claim reads a
//! group before its slots change.

mod admit;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use utoipa::ToSchema;

use super::matcher;
use super::task::status::Status;

pub use admit::{Admission, Candidate, Slot, SlotLimit, admit, limits};

/// The most rules of one task.
pub const MAX_RULES: usize = 10;
/// The most bytes of a key. Longer keys are replaced by their hash, because keys are indexed.
const MAX_KEY_BYTES: usize = 500;

/// A condition for the start of a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type")]
pub enum Rule {
    /// Starts the task only while fewer than `max_concurency` matching tasks execute.
    #[serde(rename = "Concurency")]
    Concurrency {
        #[serde(rename = "max_concurency")]
        #[schema(minimum = 1)]
        max: i32,
        matcher: RuleMatcher,
    },
    /// Starts the task only while the matching tasks that execute have less than `max_capacity` left to do in total.
    /// What a task has left is `expected_count − success − failures`.
    Capacity {
        #[serde(rename = "max_capacity")]
        #[schema(minimum = 1)]
        max: i64,
        matcher: RuleMatcher,
    },
}

/// The tasks that a rule counts: Claimed or Running tasks of this kind with the same values in these metadata fields.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
pub struct RuleMatcher {
    pub kind: String,
    #[schema(value_type = Status, example = "Running")]
    pub status: Counted,
    /// Sorted, without duplicates.
    pub fields: Vec<String>,
}

/// The status that rules count. Only tasks that execute occupy a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Counted {
    #[default]
    Running,
}

impl Rule {
    pub fn matcher(&self) -> &RuleMatcher {
        match self {
            Rule::Concurrency { matcher, .. } | Rule::Capacity { matcher, .. } => matcher,
        }
    }
}

/// The facts about a task that decide whether it can carry a rule.
#[derive(Clone, Copy, Debug)]
pub struct RuleTarget<'a> {
    pub metadata: Option<&'a Value>,
    pub has_expected_count: bool,
}

impl RuleTarget<'_> {
    fn has(&self, field: &str) -> bool {
        self.metadata.and_then(|metadata| metadata.get(field)).is_some()
    }

    /// Returns why the task cannot carry the rule.
    pub fn problem(&self, rule: &Rule) -> Option<String> {
        if let Some(field) = rule.matcher().fields.iter().find(|field| !self.has(field)) {
            return Some(format!("the rule compares \"{field}\", but the metadata of the task has no such field"));
        }
        let uncounted = matches!(rule, Rule::Capacity { .. }) && !self.has_expected_count;
        uncounted.then(|| "a Capacity rule requires expected_count".into())
    }
}

/// Returns the values of these fields as one text, or `None` if a field is missing. Texts are equal exactly when the
/// values are.
pub fn key_of(fields: &[String], metadata: Option<&Value>) -> Option<String> {
    let text = matcher::key("", fields, metadata)?;
    if text.len() <= MAX_KEY_BYTES {
        return Some(text);
    }
    let hash = Sha256::digest(text.as_bytes());
    Some(hash.iter().fold(String::from("sha256:"), |text, byte| text + &format!("{byte:02x}")))
}

#[cfg(test)]
mod tests;
