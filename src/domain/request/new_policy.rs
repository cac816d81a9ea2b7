//! Reads retry policies and checks them against every limit.

use std::ops::RangeInclusive;

use serde_json::Value;

use super::fields::Fields;
use super::problems::{Problems, refuse_nul};
use crate::domain::retry::RetryLimits;
use crate::domain::retry::failure::Trigger;
use crate::domain::retry::policy::{Delay, Policy, StatusPattern, Strategy};

/// Reads a request whose body is a policy: the default policy of a kind.
pub fn read_default_policy(body: Value, limits: &RetryLimits) -> Result<Policy, Vec<String>> {
    let mut problems = Problems::default();
    refuse_nul(&body, "", &mut problems);
    let policy = read_policy(body, "", limits, &mut problems);
    problems.or(policy)
}

pub(in crate::domain) fn read_policy(
    value: Value,
    path: &str,
    limits: &RetryLimits,
    problems: &mut Problems,
) -> Option<Policy> {
    let mut fields = Fields::open(value, path, problems)?;
    fields.require("max_retries", problems);
    let max_retries = fields.integer("max_retries", 1..=limits.max_retries, problems);
    let strategy = read_strategy(&mut fields, limits, problems);
    let most_jitter = limits.max_delay_secs.cast_signed().saturating_mul(1000);
    let jitter_ms = fields.integer("jitter_ms", 0..=most_jitter, problems);
    let retry_on = read_retry_on(&mut fields, problems);
    let retry_on_status = read_patterns(&mut fields, "retry_on_status", problems);
    let no_retry_on_status = read_patterns(&mut fields, "no_retry_on_status", problems);
    for pattern in retry_on_status.iter().filter(|pattern| no_retry_on_status.contains(pattern)) {
        let text = String::from(*pattern);
        problems.add(fields.path("no_retry_on_status"), format!("\"{text}\" is also in retry_on_status"));
    }
    let expires = fields.integer("expires_after_secs", 1..=i64::from(i32::MAX), problems);
    fields.close(problems);
    Some(Policy {
        max_retries: max_retries?,
        strategy: strategy?,
        jitter_ms: jitter_ms.map_or(Policy::DEFAULT_JITTER_MS, i64::cast_unsigned),
        retry_on,
        retry_on_status,
        no_retry_on_status,
        expires_after_secs: expires.map(i64::cast_unsigned),
    })
}

#[derive(Clone, Copy, PartialEq)]
enum StrategyType {
    Immediate,
    Exponential,
    Fixed,
    Custom,
}

/// The strategy that each field belongs to. A field of another strategy is refused as a mistake.
const STRATEGY_FIELDS: [(&str, StrategyType); 5] = [
    ("initial_delay_secs", StrategyType::Exponential),
    ("backoff_multiplier", StrategyType::Exponential),
    ("max_delay_secs", StrategyType::Exponential),
    ("delay_secs", StrategyType::Fixed),
    ("schedule", StrategyType::Custom),
];

fn read_strategy(fields: &mut Fields, limits: &RetryLimits, problems: &mut Problems) -> Option<Strategy> {
    let words = [
        ("immediate", StrategyType::Immediate),
        ("exponential_backoff", StrategyType::Exponential),
        ("fixed_delay", StrategyType::Fixed),
        ("custom", StrategyType::Custom),
    ];
    let given = fields.has("strategy");
    let named = match fields.choice("strategy", &words, problems) {
        Some(strategy) => strategy,
        None if given => {
            for (field, _) in STRATEGY_FIELDS {
                fields.take(field);
            }
            return None;
        }
        None => StrategyType::Exponential,
    };
    for (field, belongs_to) in STRATEGY_FIELDS {
        if belongs_to != named && fields.take(field).is_some() {
            let name = words.iter().find(|(_, strategy)| *strategy == belongs_to).map_or("", |(name, _)| name);
            problems.add(fields.path(field), format!("is allowed only with strategy {name}"));
        }
    }
    match named {
        StrategyType::Immediate => Some(Strategy::Immediate),
        StrategyType::Exponential => read_backoff(fields, limits, problems),
        StrategyType::Fixed => {
            fields.require("delay_secs", problems);
            let delay = fields.integer("delay_secs", delay_range(limits.max_delay_secs), problems)?;
            Some(Strategy::FixedDelay { delay_secs: delay.cast_unsigned() })
        }
        StrategyType::Custom => read_schedule(fields, limits, problems),
    }
}

fn read_backoff(fields: &mut Fields, limits: &RetryLimits, problems: &mut Problems) -> Option<Strategy> {
    let range = delay_range(limits.max_delay_secs);
    let given_initial = fields.integer("initial_delay_secs", range.clone(), problems).map(i64::cast_unsigned);
    let given_max = fields.integer("max_delay_secs", range, problems).map(i64::cast_unsigned);
    let multiplier = fields.take("backoff_multiplier");
    let backoff_multiplier = multiplier.as_ref().map_or(Some(Policy::DEFAULT_BACKOFF_MULTIPLIER), Value::as_f64);
    if !backoff_multiplier.is_some_and(|m| m.is_finite() && m >= 1.0) {
        problems.add(fields.path("backoff_multiplier"), "must be a number of at least 1.0");
    }
    // A default yields to a given value, never the other way round.
    let max_delay_secs = given_max
        .unwrap_or_else(|| Policy::DEFAULT_MAX_DELAY_SECS.max(given_initial.unwrap_or(0)).min(limits.max_delay_secs));
    let initial_delay_secs = given_initial.unwrap_or(Policy::DEFAULT_INITIAL_DELAY_SECS.min(max_delay_secs));
    if initial_delay_secs > max_delay_secs {
        problems.add(fields.path("initial_delay_secs"), format!("must not exceed max_delay_secs ({max_delay_secs})"));
    }
    Some(Strategy::ExponentialBackoff { initial_delay_secs, backoff_multiplier: backoff_multiplier?, max_delay_secs })
}

fn read_schedule(fields: &mut Fields, limits: &RetryLimits, problems: &mut Problems) -> Option<Strategy> {
    fields.require("schedule", problems);
    let path = fields.path("schedule");
    let items = fields.array("schedule", problems)?;
    if items.is_empty() || items.len() > 1000 {
        problems.add(&path, format!("must have 1 to 1000 entries, not {}", items.len()));
        return None;
    }
    let read = |(i, item)| read_delay(item, &format!("{path}[{i}]"), limits, problems);
    let schedule: Vec<Option<Delay>> = items.into_iter().enumerate().map(read).collect();
    Some(Strategy::Custom { schedule: schedule.into_iter().collect::<Option<_>>()? })
}

/// The name of a unit, its length in seconds, and the constructor of its delays.
type Unit = (&'static str, u64, fn(u64) -> Delay);

fn read_delay(item: Value, path: &str, limits: &RetryLimits, problems: &mut Problems) -> Option<Delay> {
    let mut entry = Fields::open(item, path, problems)?;
    let mut found = None;
    let mut count = 0;
    let units: [Unit; 3] = [("secs", 1, Delay::Secs), ("hours", 3600, Delay::Hours), ("days", 86_400, Delay::Days)];
    for (unit, secs, make) in units {
        count += usize::from(entry.has(unit));
        let most = limits.max_schedule_delay_secs / secs;
        found = entry.integer(unit, delay_range(most), problems).map(|n| make(n.cast_unsigned())).or(found);
    }
    if count != 1 {
        problems.add(path, "must have exactly one of secs, hours and days");
        found = None;
    }
    entry.close(problems);
    found
}

fn read_patterns(fields: &mut Fields, name: &str, problems: &mut Problems) -> Vec<StatusPattern> {
    let path = fields.path(name);
    let mut patterns = Vec::new();
    for (i, item) in fields.array(name, problems).unwrap_or_default().iter().enumerate() {
        match item.as_str().and_then(StatusPattern::parse) {
            Some(pattern) if !patterns.contains(&pattern) => patterns.push(pattern),
            Some(_) => {}
            None => problems.add(format!("{path}[{i}]"), "must be a status such as \"429\" or a class: 3xx, 4xx, 5xx"),
        }
    }
    patterns
}

fn read_retry_on(fields: &mut Fields, problems: &mut Problems) -> Vec<Trigger> {
    let Some(items) = fields.array("retry_on", problems) else { return Trigger::ALL.to_vec() };
    if items.is_empty() {
        problems.add(fields.path("retry_on"), "must not be empty");
    }
    let choices = Trigger::ALL.map(|t| (t.as_str(), t));
    let mut triggers = Vec::new();
    for (i, item) in items.iter().enumerate() {
        if let Some(trigger) = fields.pick(&format!("retry_on[{i}]"), item, &choices, problems)
            && !triggers.contains(&trigger)
        {
            triggers.push(trigger);
        }
    }
    triggers
}

/// Returns the allowed range of a delay: at least 1.
fn delay_range(most: u64) -> RangeInclusive<i64> {
    1..=i64::try_from(most).unwrap_or(i64::MAX)
}

#[cfg(test)]
#[path = "tests/new_policy.rs"]
mod tests;
