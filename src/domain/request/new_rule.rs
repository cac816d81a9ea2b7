//! The rules of requests.

use serde_json::{Value, json};

use super::RequestLimits;
use super::fields::Fields;
use super::input::{FieldInput, Input, Schemas, define_alternative, input, read_body, reference};
use super::new_matcher::FieldNames;
use super::problems::{FieldProblem, ProblemCode};
use super::reading::{Place, Reading, Source};
use super::values::{Label, List, MAX_I32, Text, Whole, read_word};
use crate::domain::rules::{Counted, MAX_RULES, Rule, RuleMatcher};
use crate::domain::task::status::Status;

/// The rules of a task.
pub type RuleList = List<RuleInput, 0, MAX_RULES>;

input! {
    /// New rules for the tasks of a kind that have not ended.
    pub struct RulesInput as "RulesInput" {
        /// The kind of the tasks.
        kind: Label<100>,
        /// The new rules; an empty list removes all rules.
        rules: RuleList,
    }
}

input! {
    /// Starts the task only while fewer than `max_concurrency` matching tasks execute. The spelling `Concurency` with
    /// `max_concurency` is accepted as well, and is the one of answers.
    pub struct ConcurrencyInput as "ConcurrencyRuleInput" {
        /// The most matching tasks that execute at once.
        max_concurrency: Whole<1, MAX_I32>,
        matcher: RuleMatcherInput,
    }
}

input! {
    /// The older spelling of [`ConcurrencyInput`].
    pub struct ConcurencyInput as "ConcurencyRuleInput" {
        max_concurency: Whole<1, MAX_I32>,
        matcher: RuleMatcherInput,
    }
}

input! {
    /// Starts the task only while the matching tasks that execute have less than `max_capacity` left to do in total.
    /// What a task has left is `expected_count − success − failures`.
    pub struct CapacityInput as "CapacityRuleInput" {
        /// The work left above which no task starts.
        max_capacity: Whole<1, { i64::MAX }>,
        matcher: RuleMatcherInput,
    }
}

input! {
    /// Selects the tasks of a kind whose metadata fields have the same values as those of the task with the rule.
    pub struct RuleMatcherInput as "RuleMatcherInput" {
        /// The kind of the matching tasks; by default the task's own kind.
        kind: Option<Text<1, 100>>,
        /// Always `Running`, which includes Claimed tasks.
        status: Option<Counted>,
        /// Names of top-level metadata fields.
        fields: Option<FieldNames>,
    }
}

/// A rule that is not yet tied to a task.
#[derive(Debug)]
pub enum RuleInput {
    Concurrency(i32, RuleMatcherInput),
    Capacity(i64, RuleMatcherInput),
}

impl RuleInput {
    /// Completes the rule of a task of this kind.
    pub fn rule(self, own_kind: &str) -> Rule {
        let matcher = |matcher: RuleMatcherInput| RuleMatcher {
            kind: matcher.kind.map_or_else(|| own_kind.to_owned(), |kind| kind.0),
            status: Counted::Running,
            fields: matcher.fields.unwrap_or_default().sorted(),
        };
        match self {
            RuleInput::Concurrency(max, of) => Rule::Concurrency { max, matcher: matcher(of) },
            RuleInput::Capacity(max, of) => Rule::Capacity { max, matcher: matcher(of) },
        }
    }
}

impl Input for RuleInput {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<RuleInput> {
        #[derive(Clone, Copy)]
        enum Type {
            Concurrency,
            Capacity,
        }
        let mut fields = Fields::open(source, at, |_| false, reading)?;
        let find = |word: &str| match word {
            "Concurrency" | "Concurency" => Some(Type::Concurrency),
            "Capacity" => Some(Type::Capacity),
            _ => None,
        };
        let word = fields.take("type").filter(|word| !word.is_null());
        if word.is_none() {
            reading.add(at.field("type"), ProblemCode::Required, "is required");
        }
        let place = at.field("type");
        let rule = word.and_then(|word| read_word(word, place, &["Concurrency", "Capacity"], find, reading));
        let Some(rule) = rule else {
            // Without a type, only the matcher can be checked.
            RuleMatcherInput::take_from(&mut fields, "matcher", reading);
            return None;
        };
        match rule {
            Type::Capacity => {
                let rule = CapacityInput::read_fields(fields, reading);
                Some(RuleInput::Capacity(rule.max_capacity.0, rule.matcher))
            }
            Type::Concurrency if fields.get("max_concurency").is_some() => {
                let rule = ConcurencyInput::read_fields(fields, reading);
                Some(RuleInput::Concurrency(rule.max_concurency.to(), rule.matcher))
            }
            Type::Concurrency => {
                let rule = ConcurrencyInput::read_fields(fields, reading);
                Some(RuleInput::Concurrency(rule.max_concurrency.to(), rule.matcher))
            }
        }
    }

    fn schema() -> Value {
        reference("RuleInput")
    }

    fn define(schemas: &mut Schemas) {
        define_alternative::<ConcurrencyInput>("ConcurrencyRuleInput", "type", "Concurrency", true, schemas);
        define_alternative::<CapacityInput>("CapacityRuleInput", "type", "Capacity", true, schemas);
        let schema = json!({
            "description": "A limit on executing tasks: the task starts only while the matching tasks leave room.",
            "oneOf": [reference("ConcurrencyRuleInput"), reference("CapacityRuleInput")],
            "discriminator": {"propertyName": "type", "mapping": {
                "Concurrency": "#/components/schemas/ConcurrencyRuleInput",
                "Capacity": "#/components/schemas/CapacityRuleInput",
            }},
        });
        schemas.insert("RuleInput".into(), schema);
    }
}

impl Input for Counted {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<Counted> {
        let value = source.tree(at, reading)?;
        let is_running = value.as_str().and_then(Status::parse) == Some(Status::Running);
        if !is_running {
            let message = "must be Running, which counts Claimed and Running tasks";
            reading.add(at, ProblemCode::UnknownValue, message);
        }
        is_running.then_some(Counted::Running)
    }

    fn schema() -> Value {
        json!({"type": "string", "const": "Running"})
    }
}

/// A request to replace the rules of all tasks of a kind.
#[derive(Debug, PartialEq)]
pub struct RulesChange {
    pub kind: String,
    pub rules: Vec<Rule>,
}

pub fn read_rules_change(body: Value) -> Result<RulesChange, Vec<FieldProblem>> {
    read_body(body, &RequestLimits::NONE, |RulesInput { kind, rules }, _| {
        let rules = rules.0.into_iter().map(|rule| rule.rule(&kind.0)).collect();
        RulesChange { kind: kind.0, rules }
    })
}

#[cfg(test)]
#[path = "tests/new_rule.rs"]
mod tests;
