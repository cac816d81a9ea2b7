//! The shapes of API answers. The store fills them, and the HTTP layer serializes them.

mod action;
mod batch;
mod delivery;
mod history;
pub mod retry;
mod task;

use std::collections::BTreeMap;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Serialize, Serializer};
use serde_json::Value;
use utoipa::ToSchema;

pub use action::{ActionCondition, ActionTrigger, TaskAction};
pub use batch::{Batch, BatchSummary, ChangedRules, Dag, Link, RetriedBatch, StatusCounts, StoppedBatch};
pub use delivery::{Delivery, DeliveryStatus};
pub use history::{AttemptView, TaskEvent};
pub use retry::{KindPolicy, RetrySource};
pub use task::{RetriedTask, TaskDetails, TaskSummary};

/// A time in RFC 3339 format, in UTC, always with microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ToSchema)]
#[schema(value_type = String, format = DateTime, example = "2026-01-31T12:00:00.000000Z")]
pub struct Timestamp(pub DateTime<Utc>);

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0.to_rfc3339_opts(SecondsFormat::Micros, true))
    }
}

impl From<DateTime<Utc>> for Timestamp {
    fn from(at: DateTime<Utc>) -> Timestamp {
        Timestamp(at)
    }
}

/// A JSON object with the client's own data.
#[derive(Debug, ToSchema)]
pub struct Metadata(#[allow(dead_code, reason = "only its shape is used")] BTreeMap<String, Value>);
