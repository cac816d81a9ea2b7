//! Rules that let a task start only while others like it leave room: how many execute at once, or how much they still
//! have to do. Blocked tasks are parked by what they wait for, so that nobody looks at them until that changes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use utoipa::ToSchema;

use super::matcher;
use super::request::fields::Fields;
use super::request::problems::{Problems, refuse_nul};
use super::task::status::Status;

/// Rules of one task at most.
pub const MOST_RULES: usize = 10;
/// Longer values are told apart by their hash: keys are indexed.
const LONGEST_KEY: usize = 500;

/// A condition for the start of the task that carries it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type")]
pub enum Rule {
    /// So many tasks that match execute at once at most.
    #[serde(rename = "Concurency")]
    Concurrency {
        #[serde(rename = "max_concurency")]
        #[schema(minimum = 1)]
        max: i32,
        matcher: RuleMatcher,
    },
    /// Tasks that match and execute have together less than this to do (`expected_count − success − failures`).
    Capacity {
        #[serde(rename = "max_capacity")]
        #[schema(minimum = 1)]
        max: i64,
        matcher: RuleMatcher,
    },
}

/// The tasks that a rule counts: of this kind, Claimed or Running, with the same values in these metadata fields.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
pub struct RuleMatcher {
    pub kind: String,
    #[schema(value_type = Status, example = "Running")]
    pub status: Counted,
    /// Sorted, without repetitions.
    pub fields: Vec<String>,
}

/// Only what executes holds a slot.
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

/// What a rule needs to know of the task that is to carry it.
#[derive(Clone, Copy, Debug)]
pub struct RuleTarget<'a> {
    pub metadata: Option<&'a Value>,
    pub has_expected_count: bool,
}

impl RuleTarget<'_> {
    fn has(&self, field: &str) -> bool {
        self.metadata.and_then(|metadata| metadata.get(field)).is_some()
    }

    /// Why the task cannot carry the rule.
    pub fn problem(&self, rule: &Rule) -> Option<String> {
        if let Some(field) = rule.matcher().fields.iter().find(|field| !self.has(field)) {
            return Some(format!("the rule compares \"{field}\", which the task's metadata does not have"));
        }
        let uncounted = matches!(rule, Rule::Capacity { .. }) && !self.has_expected_count;
        uncounted.then(|| "a Capacity rule needs the task's expected_count".into())
    }
}

/// New rules for the tasks of a kind.
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

/// Reads the field `rules`. `own_kind` is the kind of matchers that name none.
pub fn read_rules(fields: &mut Fields, own_kind: &str, problems: &mut Problems) -> Vec<Rule> {
    let path = fields.path("rules");
    let items = fields.array("rules", problems).unwrap_or_default();
    if items.len() > MOST_RULES {
        problems.add(path, format!("must have at most {MOST_RULES} entries"));
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
            // Whatever its limit is called, it is not the name that is wrong.
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
        problems.add(fields.path("status"), "must be Running: what is Claimed or Running is counted");
    }
    // Whether the task has them is seen when it is known which tasks are to carry the rule.
    let names = matcher::read_names(&mut fields, |_| true, problems);
    fields.close(problems);
    Some(RuleMatcher { kind, status: Counted::Running, fields: names })
}

/// The values of these fields as one text: equal exactly when the values are. `None` if a field is not there.
pub fn key_of(fields: &[String], metadata: Option<&Value>) -> Option<String> {
    let text = matcher::key("", fields, metadata)?;
    if text.len() <= LONGEST_KEY {
        return Some(text);
    }
    let hash = Sha256::digest(text.as_bytes());
    Some(hash.iter().fold(String::from("sha256:"), |text, byte| text + &format!("{byte:02x}")))
}

/// What executes of one matcher with one set of values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    pub used: i64,
    pub load: i64,
}

/// How far a slot may be filled for a task to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SlotLimit {
    pub slot: i64,
    pub max_tasks: Option<i32>,
    pub max_load: Option<i64>,
}

impl SlotLimit {
    pub fn is_open(&self, slot: Slot) -> bool {
        self.max_tasks.is_none_or(|max| slot.used < i64::from(max)) && self.max_load.is_none_or(|max| slot.load < max)
    }
}

/// The limits of a task, one per slot, in the order of their slots: of several limits on one slot the lowest counts.
pub fn limits<'a>(rules: impl IntoIterator<Item = (&'a Rule, i64)>) -> Vec<SlotLimit> {
    fn lower<T: Ord + Copy>(limit: &mut Option<T>, max: T) {
        *limit = Some(limit.take().map_or(max, |limit| limit.min(max)));
    }
    let mut limits: BTreeMap<i64, SlotLimit> = BTreeMap::new();
    for (rule, slot) in rules {
        let limit = limits.entry(slot).or_insert(SlotLimit { slot, max_tasks: None, max_load: None });
        match rule {
            Rule::Concurrency { max, .. } => lower(&mut limit.max_tasks, *max),
            Rule::Capacity { max, .. } => lower(&mut limit.max_load, *max),
        }
    }
    limits.into_values().collect()
}

/// A task at the head of the queue, or of its parking.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Candidate {
    /// The slots it would occupy.
    pub takes: Vec<i64>,
    /// What it still has to do.
    pub remaining: i64,
    pub limits: Vec<SlotLimit>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Starts,
    Blocked,
    /// It may start, but so many do already.
    Later,
}

/// Who of the candidates, in their order, starts: at most `room`, each only if all its limits are open after those
/// before it have started. `slots` must hold every slot that is named, and holds afterwards what is executing then.
pub fn admit(candidates: &[Candidate], slots: &mut BTreeMap<i64, Slot>, room: usize) -> Vec<Admission> {
    let mut started = 0;
    let mut verdict = |candidate: &Candidate| {
        let of = |id: i64| slots.get(&id).copied().unwrap_or_default();
        if !candidate.limits.iter().all(|limit| limit.is_open(of(limit.slot))) {
            return Admission::Blocked;
        }
        if started == room {
            return Admission::Later;
        }
        started += 1;
        for id in &candidate.takes {
            let slot = slots.entry(*id).or_default();
            slot.used += 1;
            slot.load += candidate.remaining;
        }
        Admission::Starts
    };
    candidates.iter().map(&mut verdict).collect()
}

#[cfg(test)]
mod tests;
