//! Readers of requests about an existing task: patches, heartbeats and manual retries.

use serde_json::Value;

use super::fields::Fields;
use super::new_task::{RequestLimits, read_metadata};
use super::problems::{Problems, refuse_nul};
use crate::domain::retry::failure::{Failure, FailureType, RetryAfter, Trigger};
use crate::domain::task::status::Status;

/// The fields of a `PATCH` that a `PUT` does not have. Clients that send one shape for both set them to null.
const PATCH_ONLY: [&str; 8] =
    ["status", "failure_reason", "failure_type", "retry_after_secs", "metadata", "expected_count", "priority", "run"];

/// The changes that `PATCH /task/{id}` asks for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Patch {
    pub result: Option<Result<(), Failure>>,
    pub metadata: Option<Value>,
    pub progress: HeartbeatRequest,
    pub expected_count: Option<i32>,
    pub priority: Option<i16>,
    pub run: Option<i32>,
    /// Whether the request carried the token of that run, which Reprise reveals only in the calls for that run.
    pub proven: bool,
}

/// The amounts that a worker adds to the counters of its task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeartbeatRequest {
    pub success: i64,
    pub failures: i64,
}

/// The options of a manual retry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetryRequest {
    pub requested_by: Option<String>,
    /// Whether to revive the tasks that failed only because of the retried ones.
    pub cascade: bool,
    /// Whether to only report what would change.
    pub dry_run: bool,
}

pub fn read_patch(body: Value, limits: &RequestLimits) -> Result<Patch, Vec<String>> {
    let mut problems = Problems::default();
    refuse_nul(&body, "", &mut problems);
    let patch = Fields::open(body, "", &mut problems).map(|mut fields| {
        let result = read_result(&mut fields, &mut problems);
        let patch = Patch {
            result,
            metadata: read_metadata(&mut fields, limits, &mut problems),
            progress: read_counters(&mut fields, &mut problems),
            expected_count: fields.integer("expected_count", 0..=i32::MAX, &mut problems),
            priority: fields.integer("priority", -1000..=1000, &mut problems),
            run: fields.integer("run", 0..=i32::MAX, &mut problems),
            proven: false,
        };
        fields.close(&mut problems);
        patch
    });
    problems.or(patch)
}

pub fn read_progress(body: Value) -> Result<HeartbeatRequest, Vec<String>> {
    let mut problems = Problems::default();
    let progress = Fields::open(null_as_empty(body), "", &mut problems).map(|mut fields| {
        let progress = read_counters(&mut fields, &mut problems);
        fields.drop_nulls(&PATCH_ONLY);
        fields.close(&mut problems);
        progress
    });
    problems.or(progress)
}

pub fn read_retry_request(body: Value) -> Result<RetryRequest, Vec<String>> {
    let mut problems = Problems::default();
    refuse_nul(&body, "", &mut problems);
    let request = Fields::open(null_as_empty(body), "", &mut problems).map(|mut fields| {
        let request = RetryRequest {
            requested_by: fields.string("requested_by", 1..=255, &mut problems),
            cascade: fields.boolean("cascade", &mut problems).unwrap_or(true),
            dry_run: fields.boolean("dry_run", &mut problems).unwrap_or(false),
        };
        fields.close(&mut problems);
        request
    });
    problems.or(request)
}

/// Turns null into an empty object: a body that may be left out may also be null.
fn null_as_empty(body: Value) -> Value {
    if body.is_null() { Value::Object(serde_json::Map::new()) } else { body }
}

fn read_result(fields: &mut Fields, problems: &mut Problems) -> Option<Result<(), Failure>> {
    let status = fields.take("status");
    let has_reason = fields.has("failure_reason");
    let reason = fields.string("failure_reason", 1..=65_536, problems);
    let types: Vec<(&str, FailureType)> =
        FailureType::ALL.iter().filter(|t| **t != FailureType::Dependency).map(|t| (t.as_str(), *t)).collect();
    let failure_type = fields.choice("failure_type", &types, problems);
    let has_wait = fields.has("retry_after_secs");
    let retry_after = fields.integer("retry_after_secs", 1..=i64::from(i32::MAX), problems);
    let parsed = status.as_ref().map(|s| s.as_str().and_then(Status::parse));
    match parsed {
        Some(Some(Status::Failure)) => {
            if !has_reason {
                problems.add("failure_reason", "is required with status Failure");
            }
            if has_wait && failure_type.is_some_and(FailureType::is_final) {
                problems.add("retry_after_secs", "must not be given with a final failure type");
            }
            return Some(Err(Failure {
                trigger: Trigger::Explicit,
                failure_type: failure_type.unwrap_or(FailureType::Unknown),
                reason: reason.unwrap_or_default(),
                http_status: None,
                retry_after: retry_after.map(|secs| RetryAfter::Secs(secs.cast_unsigned())),
            }));
        }
        Some(Some(Status::Success)) | None => {}
        Some(_) => problems.add("status", "must be Success or Failure"),
    }
    let given =
        [("failure_reason", has_reason), ("failure_type", failure_type.is_some()), ("retry_after_secs", has_wait)];
    for (name, given) in given {
        if given {
            problems.add(name, "is allowed only with status Failure");
        }
    }
    parsed.map(|_| Ok(()))
}

fn read_counters(fields: &mut Fields, problems: &mut Problems) -> HeartbeatRequest {
    let most = i64::from(i32::MAX);
    HeartbeatRequest {
        success: fields.integer("new_success", 0..=most, problems).unwrap_or(0),
        failures: fields.integer("new_failures", 0..=most, problems).unwrap_or(0),
    }
}

#[cfg(test)]
#[path = "tests/patch.rs"]
mod tests;
