//! Admission rules: a task starts only while the executing tasks that its rules count stay below a limit, in number or
//! in remaining work. Blocked tasks are grouped by the slots they wait for (table `parking`), and no claim reads a
//! group before its slots change.

mod admit;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use utoipa::ToSchema;

use super::matcher;
use super::request::fields::Fields;
use super::request::problems::{Problems, refuse_nul};
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

/// A request to replace the rules of all tasks of a kind.
#[derive(Debug, PartialEq)]
pub struct RulesChange {
    pub kind: String,
    pub rules: Vec<Rule>,
}

pub fn read_rules_change(body: Value) -> Result<RulesChange, Vec<String>> {
    let mut problems = Problems::default();
    refuse_nul(&body, "", &mut problems);
    let change = Fields::open(body, "", &mut problems).map(|mut fields| {
        let kind = fields.required_string("kind", 1..=100, &mut problems).unwrap_or_default();
        fields.require("rules", &mut problems);
        let rules = read_rules(&mut fields, &kind, &mut problems);
        fields.close(&mut problems);
        RulesChange { kind, rules }
    });
    problems.or(change)
}

/// Reads the field `rules`. `own_kind` is the kind of matchers that do not specify one.
pub fn read_rules(fields: &mut Fields, own_kind: &str, problems: &mut Problems) -> Vec<Rule> {
    let path = fields.path("rules");
    let items = fields.array("rules", problems).unwrap_or_default();
    if items.len() > MAX_RULES {
        problems.add(path, format!("must have at most {MAX_RULES} entries, not {}", items.len()));
        return Vec::new();
    }
    let read = |(i, item)| read_rule(item, &format!("{path}[{i}]"), own_kind, problems);
    items.into_iter().enumerate().filter_map(read).collect()
}

fn read_rule(value: Value, path: &str, own_kind: &str, problems: &mut Problems) -> Option<Rule> {
    #[derive(Clone, Copy)]
    enum Type {
        Concurrency,
        Capacity,
    }
    let types = [("Concurency", Type::Concurrency), ("Concurrency", Type::Concurrency), ("Capacity", Type::Capacity)];
    let mut fields = Fields::open(value, path, problems)?;
    fields.require("type", problems);
    let kind = fields.choice("type", &types, problems);
    fields.require("matcher", problems);
    let matcher_path = fields.path("matcher");
    let matcher = fields.take("matcher").and_then(|value| read_matcher(value, &matcher_path, own_kind, problems));
    let rule = match kind {
        None => {
            // The type is the problem, so do not report the field of the limit as unknown too.
            for name in ["max_concurency", "max_concurrency", "max_capacity"] {
                fields.take(name);
            }
            None
        }
        Some(Type::Concurrency) => {
            let name = if fields.has("max_concurrency") { "max_concurrency" } else { "max_concurency" };
            fields.require(name, problems);
            let max = fields.integer(name, 1..=i32::MAX, problems);
            matcher.zip(max).map(|(matcher, max)| Rule::Concurrency { max, matcher })
        }
        Some(Type::Capacity) => {
            fields.require("max_capacity", problems);
            let max = fields.integer("max_capacity", 1..=i64::MAX, problems);
            matcher.zip(max).map(|(matcher, max)| Rule::Capacity { max, matcher })
        }
    };
    fields.close(problems);
    rule
}

fn read_matcher(value: Value, path: &str, own_kind: &str, problems: &mut Problems) -> Option<RuleMatcher> {
    let mut fields = Fields::open(value, path, problems)?;
    let kind = fields.string("kind", 1..=100, problems).unwrap_or_else(|| own_kind.to_owned());
    if let Some(status) = fields.take("status")
        && status.as_str().and_then(Status::parse) != Some(Status::Running)
    {
        problems.add(fields.path("status"), "must be Running, which counts Claimed and Running tasks");
    }
    // `RuleTarget::problem` checks whether the tasks that carry the rule have these fields.
    let names = matcher::read_names(&mut fields, |_| true, problems);
    fields.close(problems);
    Some(RuleMatcher { kind, status: Counted::Running, fields: names })
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
