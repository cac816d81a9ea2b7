//! Retry policies: which failures they retry and how long they wait. Plain arithmetic.

use serde::{Deserialize, Serialize};

use super::failure::Trigger;

/// A retry policy with all defaults filled in. Stored and shown as one flat object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Policy {
    pub max_retries: i16,
    #[serde(flatten)]
    pub strategy: Strategy,
    pub jitter_ms: u64,
    pub retry_on: Vec<Trigger>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub retry_on_status: Vec<StatusPattern>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub no_retry_on_status: Vec<StatusPattern>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_after_secs: Option<u64>,
}

/// How the delay grows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "strategy", rename_all = "snake_case")]
pub enum Strategy {
    Immediate,
    ExponentialBackoff {
        initial_delay_secs: u64,
        backoff_multiplier: f64,
        max_delay_secs: u64,
    },
    FixedDelay {
        delay_secs: u64,
    },
    /// One delay per retry; the last one repeats. Never empty.
    Custom {
        schedule: Vec<Delay>,
    },
}

/// A delay as it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Delay {
    Secs(u64),
    Hours(u64),
    Days(u64),
}

impl Delay {
    pub const fn secs(self) -> u64 {
        match self {
            Delay::Secs(secs) => secs,
            Delay::Hours(hours) => hours.saturating_mul(3600),
            Delay::Days(days) => days.saturating_mul(86_400),
        }
    }
}

/// An HTTP status such as `429`, or a class such as `5xx`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum StatusPattern {
    Exact(u16),
    /// The first digit.
    Class(u16),
}

impl StatusPattern {
    pub fn parse(text: &str) -> Option<StatusPattern> {
        if let Some(digit) = text.strip_suffix("xx") {
            let class = [("3", 3), ("4", 4), ("5", 5)].into_iter().find(|(class, _)| *class == digit);
            return class.map(|(_, digit)| StatusPattern::Class(digit));
        }
        let plain = text.len() == 3 && text.bytes().all(|b| b.is_ascii_digit());
        text.parse().ok().filter(|code| plain && (300..600).contains(code)).map(StatusPattern::Exact)
    }
}

impl TryFrom<String> for StatusPattern {
    type Error = String;

    fn try_from(text: String) -> Result<StatusPattern, String> {
        StatusPattern::parse(&text).ok_or(text)
    }
}

impl From<StatusPattern> for String {
    fn from(pattern: StatusPattern) -> String {
        match pattern {
            StatusPattern::Exact(code) => code.to_string(),
            StatusPattern::Class(digit) => format!("{digit}xx"),
        }
    }
}

impl Policy {
    pub const DEFAULT_INITIAL_DELAY_SECS: u64 = 5;
    pub const DEFAULT_BACKOFF_MULTIPLIER: f64 = 2.0;
    pub const DEFAULT_MAX_DELAY_SECS: u64 = 300;
    pub const DEFAULT_JITTER_MS: u64 = 500;

    /// Returns whether the status lists want an HTTP status retried; `None` if neither includes it. An exact pattern
    /// takes precedence over a class.
    pub fn wants_retry_of(&self, status: u16) -> Option<bool> {
        [StatusPattern::Exact(status), StatusPattern::Class(status / 100)].into_iter().find_map(|pattern| {
            let named = |list: &[StatusPattern]| list.contains(&pattern);
            if named(&self.retry_on_status) {
                return Some(true);
            }
            named(&self.no_retry_on_status).then_some(false)
        })
    }

    /// Returns the delay before the retry that follows attempt number `attempt`, without jitter.
    pub fn delay_ms(&self, attempt: i16) -> u64 {
        match &self.strategy {
            Strategy::Immediate => 0,
            Strategy::FixedDelay { delay_secs } => ms(*delay_secs),
            Strategy::Custom { schedule } => {
                let index = usize::try_from(attempt).unwrap_or(0).min(schedule.len().saturating_sub(1));
                schedule.get(index).map_or(0, |delay| ms(delay.secs()))
            }
            Strategy::ExponentialBackoff { initial_delay_secs, backoff_multiplier, max_delay_secs } => {
                let cap = ms(*max_delay_secs);
                // A delay that overflows f64 is infinite and so becomes the cap.
                let delay = precise(ms(*initial_delay_secs)) * backoff_multiplier.powi(i32::from(attempt));
                if delay < precise(cap) { whole(delay) } else { cap }
            }
        }
    }

    /// Explains the delay in words.
    pub fn explain_delay(&self, attempt: i16) -> String {
        match &self.strategy {
            Strategy::Immediate => "immediate".into(),
            Strategy::FixedDelay { delay_secs } => format!("fixed delay of {delay_secs} s"),
            Strategy::Custom { schedule } => {
                let index = usize::try_from(attempt).unwrap_or(0).min(schedule.len().saturating_sub(1));
                format!("entry {} of {} in the schedule", index + 1, schedule.len())
            }
            Strategy::ExponentialBackoff { initial_delay_secs, backoff_multiplier, max_delay_secs } => {
                format!(
                    "backoff of {initial_delay_secs} s × {backoff_multiplier}^{attempt}, at most {max_delay_secs} s"
                )
            }
        }
    }

    /// Returns the jitter for `unit`, a number from 0 up to 1: from 0 to `jitter_ms`, both inclusive.
    pub fn jitter(&self, unit: f64) -> u64 {
        whole(unit.clamp(0.0, 1.0) * precise(self.jitter_ms + 1)).min(self.jitter_ms)
    }
}

const fn ms(secs: u64) -> u64 {
    secs.saturating_mul(1000)
}

// Delays are at most months in milliseconds, far below the largest whole number that f64 holds exactly.
#[allow(clippy::cast_precision_loss)]
const fn precise(value: u64) -> f64 {
    value as f64
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
const fn whole(value: f64) -> u64 {
    value as u64
}

#[cfg(test)]
#[path = "tests/policy.rs"]
mod tests;
