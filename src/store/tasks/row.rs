//! The only mappings from a row to a [`Task`](crate::domain::task::Task) and to its summary. No other file may build
//! either from columns.

use chrono::{DateTime, Utc};
use sqlx::FromRow;
use uuid::Uuid;

use crate::domain::retry::policy::Policy;
use crate::domain::task::status::Status;
use crate::domain::view::TaskSummary;
use crate::store::{Error, Result};

/// Builds a task from a row of `task` joined with `task_spec`. It is a macro because each checked query has a row type
/// of its own. The expression returns early with an error if the row is corrupt.
macro_rules! task_from_row {
    ($row:ident) => {
        crate::domain::task::Task {
            id: $row.id,
            batch_id: $row.batch_id,
            kind: $row.kind.clone(),
            status: crate::store::tasks::row::read_status(&$row.status)?,
            flags: crate::domain::task::Flags($row.flags),
            attempt: $row.attempt,
            run: $row.run,
            deferrals: $row.deferrals,
            wait_count: $row.wait_count,
            timeout_secs: $row.timeout_secs,
            claimed_by: $row.claimed_by,
            claimed_run: $row.claimed_run,
            claim: $row.claim,
            manual_run: $row.manual_run,
            slots: $row.slots.unwrap_or_default(),
            timeout_at: $row.timeout_at,
            next_retry_at: $row.next_retry_at,
            created_at: $row.created_at,
            last_updated: $row.last_updated,
            started_at: $row.started_at,
            ended_at: $row.ended_at,
            failure_type: $row.failure_type.as_deref().and_then(crate::domain::retry::failure::FailureType::parse),
            failure_reason: $row.failure_reason.clone(),
            retry: crate::store::tasks::row::read_policy($row.id, $row.retry.as_deref())?,
        }
    };
}
pub(in crate::store) use task_from_row;

/// Builds a task summary from a row that has its columns.
macro_rules! summary_from_row {
    ($row:ident) => {
        crate::domain::view::TaskSummary {
            id: $row.id,
            name: $row.name,
            kind: $row.kind,
            status: crate::store::tasks::row::read_status(&$row.status)?,
            batch_id: $row.batch_id,
            priority: $row.priority,
            attempt: $row.attempt,
            run: $row.run,
            next_retry_at: $row.next_retry_at.map(crate::domain::view::Timestamp),
            success: $row.success,
            failures: $row.failures,
            expected_count: $row.expected_count,
            created_at: crate::domain::view::Timestamp($row.created_at),
            started_at: $row.started_at.map(crate::domain::view::Timestamp),
            ended_at: $row.ended_at.map(crate::domain::view::Timestamp),
            dead_end_barrier: $row.dead_end_barrier,
        }
    };
}
pub(in crate::store) use summary_from_row;

/// The columns of a [`SummaryRow`], of `task` as `t` and `task_spec` as `s`.
pub(in crate::store) const SUMMARY: &str =
    "select t.id, s.name, s.kind, t.status::text as status, t.batch_id, t.priority, t.attempt, t.run,
    t.next_retry_at, t.success, t.failures, t.expected_count, t.created_at, t.started_at, t.ended_at,
    s.dead_end_barrier from ";

/// The row of a task summary.
#[derive(FromRow)]
pub(in crate::store) struct SummaryRow {
    id: Uuid,
    name: String,
    kind: String,
    status: String,
    batch_id: Uuid,
    priority: i16,
    attempt: i16,
    run: i32,
    next_retry_at: Option<DateTime<Utc>>,
    success: i64,
    failures: i64,
    expected_count: Option<i32>,
    created_at: DateTime<Utc>,
    started_at: Option<DateTime<Utc>>,
    ended_at: Option<DateTime<Utc>>,
    dead_end_barrier: bool,
}

impl SummaryRow {
    pub(in crate::store) fn into_view(self) -> Result<TaskSummary> {
        Ok(summary_from_row!(self))
    }
}

pub(in crate::store) fn read_status(text: &str) -> Result<Status> {
    Status::parse(text).ok_or_else(|| Error::corrupt(format!("status {text}")))
}

pub(in crate::store) fn read_policy(task_id: Uuid, text: Option<&str>) -> Result<Option<Policy>> {
    let policy = text.map(serde_json::from_str).transpose();
    policy.map_err(|error| Error::corrupt(format!("retry policy of task {task_id}: {error}")))
}
