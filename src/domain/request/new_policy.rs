//! Retry policies of requests: a union of one object per strategy.

use serde_json::{Value, json};

use super::RequestLimits;
use super::fields::Fields;
use super::input::{Input, Schemas, define_alternative, input, read_body, reference};
use super::limits::{MaxDelay, MaxJitter, MaxRetries, MaxScheduleDays, MaxScheduleHours, MaxScheduleSecs};
use super::problems::{FieldProblem, ProblemCode};
use super::reading::{Place, Reading, Source};
use super::values::{Limited, List, MAX_I32, Whole, read_word};
use crate::domain::retry::failure::Trigger;
use crate::domain::retry::policy::{Delay, Policy, StatusPattern, Strategy};

/// The most delays of a schedule.
const MAX_DELAYS: usize = 1000;

/// Declares the policies of one strategy: its own fields, and those of every policy.
macro_rules! policy {
    (
        $(#[doc = $doc:literal])*
        $type:ident as $name:literal { $( $(#[doc = $field_doc:literal])* $field:ident: $kind:ty, )* }
    ) => {
        input! {
            $(#[doc = $doc])*
            pub struct $type as $name {
                /// The number of retries after the first run.
                max_retries: Limited<MaxRetries>,
                $( $(#[doc = $field_doc])* $field: $kind, )*
                /// The longest random delay added to each delay, in milliseconds; 500 by default.
                jitter_ms: Option<Limited<MaxJitter>>,
                /// The failures that are retried; by default all of them.
                retry_on: Option<List<Trigger, 1, { usize::MAX }>>,
                /// HTTP statuses (`"429"`) or classes (`"5xx"`) of `on_start` answers that are retried, whatever their
                /// failure type.
                retry_on_status: Option<List<StatusPattern, 0, { usize::MAX }>>,
                /// HTTP statuses or classes of `on_start` answers that are not retried, whatever their failure type.
                /// The more exact pattern wins. A pattern must not be in both lists.
                no_retry_on_status: Option<List<StatusPattern, 0, { usize::MAX }>>,
                /// Seconds after the creation of the task past which no retry is scheduled; by default retries do not
                /// expire.
                expires_after_secs: Option<Whole<1, MAX_I32>>,
            }
        }

        impl $type {
            fn policy(self, strategy: Strategy, at: Place, reading: &mut Reading) -> Policy {
                let policy = Policy {
                    max_retries: self.max_retries.to(),
                    strategy,
                    jitter_ms: self.jitter_ms.map_or(Policy::DEFAULT_JITTER_MS, |jitter| jitter.to()),
                    retry_on: self.retry_on.map_or(Trigger::ALL.to_vec(), |list| distinct(list.0)),
                    retry_on_status: self.retry_on_status.map_or(Vec::new(), |list| distinct(list.0)),
                    no_retry_on_status: self.no_retry_on_status.map_or(Vec::new(), |list| distinct(list.0)),
                    expires_after_secs: self.expires_after_secs.map(|secs| secs.to()),
                };
                for pattern in policy.retry_on_status.iter().filter(|p| policy.no_retry_on_status.contains(p)) {
                    let message = format!("\"{}\" is also in retry_on_status", String::from(*pattern));
                    reading.add(at.field("no_retry_on_status"), ProblemCode::NotAllowed, message);
                }
                policy
            }
        }
    };
}

policy! {
    /// Retries at once, after jitter alone.
    ImmediateInput as "ImmediateRetry" {}
}

policy! {
    /// Retries after delays that grow by a factor: `initial_delay_secs × backoff_multiplier^attempt`, at most
    /// `max_delay_secs`. The default strategy.
    ExponentialBackoffInput as "ExponentialBackoffRetry" {
        /// The first delay; 5 by default. It must not exceed `max_delay_secs`.
        initial_delay_secs: Option<Limited<MaxDelay>>,
        /// The factor by which each further delay grows; 2 by default.
        backoff_multiplier: Option<Factor>,
        /// The longest delay; 300 by default.
        max_delay_secs: Option<Limited<MaxDelay>>,
    }
}

policy! {
    /// Retries after the same delay every time.
    FixedDelayInput as "FixedDelayRetry" {
        /// The delay.
        delay_secs: Limited<MaxDelay>,
    }
}

policy! {
    /// Retries after the delays of a schedule.
    CustomInput as "CustomRetry" {
        /// One delay per retry, of which the last one repeats.
        schedule: List<Delay, 1, MAX_DELAYS>,
    }
}

/// A retry policy of a request.
#[derive(Debug)]
pub struct PolicyInput(pub Policy);

/// A strategy: its word, the name of its schema, and the names of its fields.
struct Alternative {
    word: &'static str,
    schema: &'static str,
    fields: &'static [&'static str],
}

const ALTERNATIVES: [Alternative; 4] = [
    Alternative { word: "immediate", schema: "ImmediateRetry", fields: ImmediateInput::FIELDS },
    Alternative {
        word: "exponential_backoff",
        schema: "ExponentialBackoffRetry",
        fields: ExponentialBackoffInput::FIELDS,
    },
    Alternative { word: "fixed_delay", schema: "FixedDelayRetry", fields: FixedDelayInput::FIELDS },
    Alternative { word: "custom", schema: "CustomRetry", fields: CustomInput::FIELDS },
];

impl Input for PolicyInput {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<PolicyInput> {
        let mut fields = Fields::open(source, at, |_| false, reading)?;
        let word = match fields.take("strategy").filter(|word| !word.is_null()) {
            None => "exponential_backoff",
            Some(word) => {
                let find = |word: &str| ALTERNATIVES.iter().map(|own| own.word).find(|known| *known == word);
                read_word(word, at.field("strategy"), &ALTERNATIVES.map(|own| own.word), find, reading)?
            }
        };
        refuse_fields_of_others(word, &mut fields, at, reading);
        let policy = match word {
            "immediate" => ImmediateInput::read_fields(fields, reading).policy(Strategy::Immediate, at, reading),
            "fixed_delay" => {
                let input = FixedDelayInput::read_fields(fields, reading);
                let strategy = Strategy::FixedDelay { delay_secs: input.delay_secs.to() };
                input.policy(strategy, at, reading)
            }
            "custom" => {
                let mut input = CustomInput::read_fields(fields, reading);
                let strategy = Strategy::Custom { schedule: std::mem::take(&mut input.schedule.0) };
                input.policy(strategy, at, reading)
            }
            _ => {
                let input = ExponentialBackoffInput::read_fields(fields, reading);
                let strategy = input.strategy(at, reading);
                input.policy(strategy, at, reading)
            }
        };
        Some(PolicyInput(policy))
    }

    fn schema() -> Value {
        reference("RetryPolicyInput")
    }

    fn define(schemas: &mut Schemas) {
        let [immediate, exponential, fixed, custom] = ALTERNATIVES.map(|own| (own.schema, own.word));
        define_alternative::<ImmediateInput>(immediate.0, "strategy", immediate.1, true, schemas);
        define_alternative::<ExponentialBackoffInput>(exponential.0, "strategy", exponential.1, false, schemas);
        define_alternative::<FixedDelayInput>(fixed.0, "strategy", fixed.1, true, schemas);
        define_alternative::<CustomInput>(custom.0, "strategy", custom.1, true, schemas);
        let schema = json!({
            "description": "A retry policy: one object per strategy. Without `strategy`, it is exponential_backoff.",
            "oneOf": ALTERNATIVES.map(|own| reference(own.schema)),
        });
        schemas.insert("RetryPolicyInput".into(), schema);
    }
}

/// Takes out fields that only other strategies have. Null counts as absent; any other value is a mistake.
fn refuse_fields_of_others(word: &str, fields: &mut Fields, at: Place, reading: &mut Reading) {
    let own = ALTERNATIVES.iter().find(|own| own.word == word).map_or(&[][..], |own| own.fields);
    for other in &ALTERNATIVES {
        for name in other.fields.iter().filter(|name| !own.contains(name)) {
            if fields.take(name).is_some_and(|value| !value.is_null()) {
                let message = format!("is allowed only with strategy {}", other.word);
                reading.add(at.field(name), ProblemCode::NotAllowed, message);
            }
        }
    }
}

impl ExponentialBackoffInput {
    fn strategy(&self, at: Place, reading: &mut Reading) -> Strategy {
        let limit = reading.limits.retry.max_delay_secs;
        let given_initial: Option<u64> = self.initial_delay_secs.as_ref().map(Limited::to);
        let given_max: Option<u64> = self.max_delay_secs.as_ref().map(Limited::to);
        // A default yields to a given value, never the other way round.
        let max_delay_secs =
            given_max.unwrap_or_else(|| Policy::DEFAULT_MAX_DELAY_SECS.max(given_initial.unwrap_or(0)).min(limit));
        let initial_delay_secs = given_initial.unwrap_or(Policy::DEFAULT_INITIAL_DELAY_SECS.min(max_delay_secs));
        if initial_delay_secs > max_delay_secs {
            let message = format!("must not exceed max_delay_secs ({max_delay_secs})");
            reading.add(at.field("initial_delay_secs"), ProblemCode::NotAllowed, message);
        }
        let backoff_multiplier = self.backoff_multiplier.map_or(Policy::DEFAULT_BACKOFF_MULTIPLIER, |factor| factor.0);
        Strategy::ExponentialBackoff { initial_delay_secs, backoff_multiplier, max_delay_secs }
    }
}

/// A factor by which delays grow.
#[derive(Clone, Copy, Debug)]
pub struct Factor(f64);

impl Input for Factor {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<Factor> {
        let value = source.tree(at, reading)?;
        let factor = value.as_f64().filter(|factor| factor.is_finite() && *factor >= 1.0);
        if factor.is_none() {
            let code = if value.is_number() { ProblemCode::OutOfRange } else { ProblemCode::WrongType };
            reading.add(at, code, "must be a number of at least 1.0");
        }
        factor.map(Factor)
    }

    fn schema() -> Value {
        json!({"type": "number", "format": "double", "minimum": 1})
    }
}

input! {
    /// A delay in seconds.
    pub struct DelaySecsInput as "DelaySecs" {
        secs: Limited<MaxScheduleSecs>,
    }
}

input! {
    /// A delay in hours.
    pub struct DelayHoursInput as "DelayHours" {
        hours: Limited<MaxScheduleHours>,
    }
}

input! {
    /// A delay in days.
    pub struct DelayDaysInput as "DelayDays" {
        days: Limited<MaxScheduleDays>,
    }
}

impl Input for Delay {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<Delay> {
        let mut fields = Fields::open(source, at, |_| false, reading)?;
        fields.drop_nulls();
        let given: Vec<&str> =
            ["secs", "hours", "days"].into_iter().filter(|unit| fields.get(unit).is_some()).collect();
        match given.as_slice() {
            ["secs"] => Some(Delay::Secs(DelaySecsInput::read_fields(fields, reading).secs.to())),
            ["hours"] => Some(Delay::Hours(DelayHoursInput::read_fields(fields, reading).hours.to())),
            ["days"] => Some(Delay::Days(DelayDaysInput::read_fields(fields, reading).days.to())),
            _ => {
                reading.add(at, ProblemCode::WrongCount, "must have exactly one of secs, hours and days");
                None
            }
        }
    }

    fn schema() -> Value {
        reference("Delay")
    }

    fn define(schemas: &mut Schemas) {
        DelaySecsInput::define(schemas);
        DelayHoursInput::define(schemas);
        DelayDaysInput::define(schemas);
        let schema = json!({
            "description": "A delay in one unit.",
            "oneOf": [reference("DelaySecs"), reference("DelayHours"), reference("DelayDays")],
        });
        schemas.insert("Delay".into(), schema);
    }
}

impl Input for StatusPattern {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<StatusPattern> {
        let value = source.tree(at, reading)?;
        let pattern = value.as_str().and_then(StatusPattern::parse);
        if pattern.is_none() {
            let message = "must be a status such as \"429\" or a class: 3xx, 4xx, 5xx";
            reading.add(at, ProblemCode::Malformed, message);
        }
        pattern
    }

    fn schema() -> Value {
        json!({"type": "string", "pattern": "^[345](xx|[0-9][0-9])$", "examples": ["429", "5xx"]})
    }
}

impl Input for Trigger {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<Trigger> {
        let find = |word: &str| Trigger::ALL.into_iter().find(|trigger| trigger.as_str() == word);
        read_word(source, at, &Trigger::ALL.map(Trigger::as_str), find, reading)
    }

    fn schema() -> Value {
        reference("RetryTrigger")
    }
}

/// Returns the values in their order, each once.
fn distinct<T: PartialEq>(values: Vec<T>) -> Vec<T> {
    let mut kept = Vec::with_capacity(values.len());
    for value in values {
        if !kept.contains(&value) {
            kept.push(value);
        }
    }
    kept
}

/// Reads a request whose body is a policy: the default policy of a kind.
pub fn read_default_policy(body: Value, limits: &RequestLimits) -> Result<Policy, Vec<FieldProblem>> {
    read_body(body, limits, |PolicyInput(policy), _| policy)
}

#[cfg(test)]
#[path = "tests/new_policy.rs"]
mod tests;
