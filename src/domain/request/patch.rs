//! Requests about an existing task: patches, heartbeats and manual retries.

use serde_json::{Value, json};

use super::RequestLimits;
use super::input::{Given, Input, input, null_as_empty, read_body};
use super::problems::{FieldProblem, ProblemCode};
use super::reading::{Place, Reading, Source};
use super::values::{MAX_I32, MetadataInput, Text, Whole, read_word};
use crate::domain::retry::failure::{Failure, FailureType, RetryAfter, Trigger};
use crate::domain::task::status::Status;

input! {
    /// A report of a run, or a change of a task.
    pub struct PatchInput as "TaskPatch" {
        /// The result of the run.
        status: Given<ReportedStatus>,
        /// Why the run failed; required with Failure, refused without it.
        failure_reason: Given<Text<1, 65_536>>,
        /// The class of the failure; `unknown` by default. Allowed only with Failure.
        failure_type: Option<ReportedFailureType>,
        /// With Failure: defers the task by this many seconds, without using up a retry. Refused with the final types
        /// `validation_error` and `authentication_error`.
        retry_after_secs: Given<Whole<1, MAX_I32>>,
        /// Fields merged into the metadata of the task.
        metadata: Option<MetadataInput>,
        /// Added to `success`.
        new_success: Option<Whole<0, MAX_I32>>,
        /// Added to `failures`.
        new_failures: Option<Whole<0, MAX_I32>>,
        /// The number of items that the task expects to process.
        expected_count: Option<Whole<0, MAX_I32>>,
        /// Tasks with a higher priority start first.
        priority: Option<Whole<-1000, 1000>>,
        /// The run that the request is about. The answer is 409 if the task is at another run.
        run: Option<Whole<0, MAX_I32>>,
    }
}

input! {
    /// A heartbeat, with numbers to add to the counters of the task.
    pub struct HeartbeatInput as "Heartbeat" {
        /// Added to `success`.
        new_success: Option<Whole<0, MAX_I32>>,
        /// Added to `failures`.
        new_failures: Option<Whole<0, MAX_I32>>,
    }
}

input! {
    /// The options of a manual retry.
    pub struct ManualRetryInput as "ManualRetry" {
        /// The name of the requester in the audit trail.
        requested_by: Option<Text<1, 255>>,
        /// Whether tasks that failed only because of the retried tasks wait for them again; true by default.
        cascade: Option<bool>,
        /// Whether to only return what would change; false by default.
        dry_run: Option<bool>,
    }
}

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

pub fn read_patch(body: Value, limits: &RequestLimits) -> Result<Patch, Vec<FieldProblem>> {
    read_body(body, limits, |mut input: PatchInput, reading| Patch {
        result: input.result(reading),
        metadata: input.metadata.and_then(|metadata| metadata.0),
        progress: progress(input.new_success, input.new_failures),
        expected_count: input.expected_count.map(Whole::to),
        priority: input.priority.map(Whole::to),
        run: input.run.map(Whole::to),
        proven: false,
    })
}

/// Reads a heartbeat. The other fields of a patch may be null: clients send one shape for both.
pub fn read_heartbeat(body: Value) -> Result<HeartbeatRequest, Vec<FieldProblem>> {
    let mut body = null_as_empty(body);
    if let Some(fields) = body.as_object_mut() {
        fields.retain(|name, value| !value.is_null() || !PatchInput::FIELDS.contains(&name.as_str()));
    }
    read_body(body, &RequestLimits::NONE, |input: HeartbeatInput, _| progress(input.new_success, input.new_failures))
}

pub fn read_retry_request(body: Value) -> Result<RetryRequest, Vec<FieldProblem>> {
    read_body(null_as_empty(body), &RequestLimits::NONE, |input: ManualRetryInput, _| RetryRequest {
        requested_by: input.requested_by.map(|name| name.0),
        cascade: input.cascade.unwrap_or(true),
        dry_run: input.dry_run.unwrap_or(false),
    })
}

type Count = Option<Whole<0, MAX_I32>>;

fn progress(success: Count, failures: Count) -> HeartbeatRequest {
    HeartbeatRequest { success: success.map_or(0, Whole::to), failures: failures.map_or(0, Whole::to) }
}

impl PatchInput {
    /// Takes the result of the run, and checks that the fields of a failure come with one.
    fn result(&mut self, reading: &mut Reading) -> Option<Result<(), Failure>> {
        let status = std::mem::take(&mut self.status);
        let (has_reason, has_wait) = (self.failure_reason.is_given(), self.retry_after_secs.is_given());
        let failure_type = self.failure_type.take().map(|reported| reported.0);
        let mut add = |name, code, message: &str| reading.add(Place::named(name), code, message);
        if !matches!(status, Given::Value(ReportedStatus::Failure)) {
            let given = [
                ("failure_reason", has_reason),
                ("failure_type", failure_type.is_some()),
                ("retry_after_secs", has_wait),
            ];
            for (name, _) in given.into_iter().filter(|(_, given)| *given) {
                add(name, ProblemCode::NotAllowed, "is allowed only with status Failure");
            }
            return status.value().map(|_| Ok(()));
        }
        if !has_reason {
            add("failure_reason", ProblemCode::Required, "is required with status Failure");
        }
        if has_wait && failure_type.is_some_and(FailureType::is_final) {
            add("retry_after_secs", ProblemCode::NotAllowed, "must not be given with a final failure type");
        }
        let secs = std::mem::take(&mut self.retry_after_secs).value();
        Some(Err(Failure {
            trigger: Trigger::Explicit,
            failure_type: failure_type.unwrap_or(FailureType::Unknown),
            reason: std::mem::take(&mut self.failure_reason).value().map_or_else(String::new, |reason| reason.0),
            http_status: None,
            retry_after: secs.map(|secs| RetryAfter::Secs(secs.to())),
        }))
    }
}

/// A result that a worker reports, in any spelling of the status.
#[derive(Clone, Copy, Debug)]
pub enum ReportedStatus {
    Success,
    Failure,
}

impl Input for ReportedStatus {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<ReportedStatus> {
        let value = source.tree(at, reading)?;
        match value.as_str().and_then(Status::parse) {
            Some(Status::Success) => Some(ReportedStatus::Success),
            Some(Status::Failure) => Some(ReportedStatus::Failure),
            _ => {
                reading.add(at, ProblemCode::UnknownValue, "must be Success or Failure");
                None
            }
        }
    }

    fn schema() -> Value {
        json!({"type": "string", "enum": ["Success", "Failure"]})
    }
}

/// A failure type that a worker may report: all but `dependency`.
#[derive(Clone, Copy, Debug)]
pub struct ReportedFailureType(FailureType);

impl ReportedFailureType {
    fn words() -> Vec<&'static str> {
        FailureType::ALL.into_iter().filter(|t| *t != FailureType::Dependency).map(FailureType::as_str).collect()
    }
}

impl Input for ReportedFailureType {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<ReportedFailureType> {
        let words = ReportedFailureType::words();
        let find = |word: &str| {
            let word = words.iter().find(|known| **known == word)?;
            FailureType::ALL.into_iter().find(|failure_type| failure_type.as_str() == *word)
        };
        read_word(source, at, &words, find, reading).map(ReportedFailureType)
    }

    fn schema() -> Value {
        json!({"type": "string", "enum": ReportedFailureType::words()})
    }
}

#[cfg(test)]
#[path = "tests/patch.rs"]
mod tests;
