//! The list of tasks, newest first. The rows of a page are found by indexes alone, before anything is joined. So a page
//! costs what is on it, however deep it is and however rare the tasks it asks for. Nothing here counts
//! rows or locks them.

use std::collections::BTreeSet;

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::Value;
use sqlx::{Postgres, QueryBuilder};
use uuid::Uuid;

use super::row::{SUMMARY, SummaryRow};
use crate::domain::task::status::Status;
use crate::domain::view::TaskSummary;
use crate::store::ledger::status_counts;
use crate::store::page::Page;
use crate::store::{Result, Store};

/// Up to this many tasks, all tasks in a status are read and sorted; more are searched from the newest on.
const FEW: i64 = 20_000;
/// How much later than `created_at` the time in a task's id may be, because transactions overlap.
const OVERLAP: TimeDelta = TimeDelta::seconds(60);

/// The conditions of a list. Empty or `None` means no condition.
#[derive(Debug, Default)]
pub struct TaskFilter {
    pub statuses: Vec<Status>,
    pub kind: Option<String>,
    pub name: Option<String>,
    pub batch_id: Option<Uuid>,
    pub metadata: Option<Value>,
    pub timeout: Option<i32>,
    pub created_after: Option<DateTime<Utc>>,
    pub created_before: Option<DateTime<Utc>>,
}

/// Reads a page of the list, newest first.
pub async fn tasks(store: &Store, filter: &TaskFilter, page: Page<Uuid>, limit: i64) -> Result<Vec<TaskSummary>> {
    let offset = if let Page::Offset(offset) = page { offset } else { 0 };
    let mut query = QueryBuilder::<Postgres>::new(format!("{SUMMARY}(select id from ("));
    let mut next = "(";
    for path in access_paths(store, &filter.statuses).await? {
        for hash in path.kind_hashes(filter) {
            query.push(next);
            next = " union all (";
            path.push(&mut query, filter.needs_spec());
            if let (Some(hash), Some(kind)) = (hash, &filter.kind) {
                query.push(hash).push_bind(kind.clone()).push(")");
            }
            narrow(&mut query, filter, page);
            query.push(" order by s.id desc limit ").push_bind(limit.saturating_add(offset)).push(")");
        }
    }
    query.push(") found order by id desc limit ").push_bind(limit).push(" offset ").push_bind(offset);
    // Rows are looked up one by one: a plan for any page joined whole tables of some size.
    query.push(
        ") page cross join lateral (select * from task_spec where id = page.id offset 0) s
         cross join lateral (select * from task where id = page.id offset 0) t order by page.id desc",
    );
    let planned = query.build_query_as().persistent(filter.metadata.is_none());
    let rows: Vec<SummaryRow> = store.listing(async |tx| Ok(planned.fetch_all(tx.conn().await?).await?)).await?;
    rows.into_iter().map(SummaryRow::into_view).collect()
}

/// How a query finds the tasks of one status. In the query, `s` is the table with the id: `task_spec`, or `task` where
/// no condition needs the specification.
enum AccessPath {
    /// Any status.
    Any,
    /// Reads from the newest task on, by an index on the id where the status has one.
    InOrder(Status),
    /// Reads all tasks that meet a condition with an index, in any order.
    All(&'static str),
}

impl AccessPath {
    /// Returns the conditions on the hash of the kind where an index has it, each for a part of the tasks. An instance
    /// of a version before the hash, running beside this one, leaves it 0. The kind itself is compared as well.
    fn kind_hashes(&self, filter: &TaskFilter) -> &'static [Option<&'static str>] {
        match self {
            AccessPath::InOrder(Status::Failure | Status::Canceled) if filter.kind.is_some() => {
                &[Some(" and t.kind_hash = hashtext("), Some(" and t.kind_hash = 0 and 0 <> hashtext(")]
            }
            _ => &[None],
        }
    }

    /// Begins the query. The status is a literal: with a bound value, the planner cannot use a partial index.
    fn push(&self, query: &mut QueryBuilder<Postgres>, with_spec: bool) {
        match (self, with_spec) {
            (AccessPath::Any, _) => query.push("select s.id from task_spec s where true"),
            (AccessPath::InOrder(status), true) => query.push(format!(
                "select s.id from task_spec s join task t on t.id = s.id where t.status = '{}'",
                status.as_str()
            )),
            (AccessPath::InOrder(status), false) => {
                query.push(format!("select s.id from task s where s.status = '{}'", status.as_str()))
            }
            // These tasks are few. A plan for any kind read all tasks of the kind to join them.
            (AccessPath::All(condition), true) => query.push(format!(
                "select s.id from (select id from task where {condition} offset 0) t
                 cross join lateral (select * from task_spec where id = t.id offset 0) s where true"
            )),
            (AccessPath::All(condition), false) => {
                query.push(format!("select s.id from (select id from task where {condition} offset 0) s where true"))
            }
        };
    }
}

async fn access_paths(store: &Store, statuses: &[Status]) -> Result<Vec<AccessPath>> {
    if statuses.is_empty() {
        return Ok(vec![AccessPath::Any]);
    }
    let counts = status_counts::by_status(store).await?;
    let mut paths = Vec::new();
    for status in statuses.iter().collect::<BTreeSet<_>>() {
        let conditions: &[&str] = match status {
            Status::Claimed => &["status = 'claimed'"],
            Status::Running => &["status = 'running'"],
            Status::RetryPending => &["status = 'retry_pending'"],
            Status::Pending => &[
                "status = 'pending' and not_before is null and parked_on is null",
                "status = 'pending' and not_before is not null",
                "status = 'pending' and parked_on is not null and not_before is null",
            ],
            Status::Waiting | Status::Paused | Status::Success | Status::Failure | Status::Canceled => &[],
        };
        if conditions.is_empty() || counts[status.index()] > FEW {
            paths.push(AccessPath::InOrder(*status));
        } else {
            paths.extend(conditions.iter().map(|condition| AccessPath::All(condition)));
        }
    }
    Ok(paths)
}

impl TaskFilter {
    fn needs_spec(&self) -> bool {
        let texts = self.kind.is_some() || self.name.is_some() || self.metadata.is_some();
        let times = self.timeout.is_some() || self.created_after.is_some() || self.created_before.is_some();
        texts || times || self.batch_id.is_some()
    }
}

/// Adds the conditions of the filter and of the page.
fn narrow(query: &mut QueryBuilder<Postgres>, filter: &TaskFilter, page: Page<Uuid>) {
    if let Some(kind) = &filter.kind {
        query.push(" and s.kind = ").push_bind(kind.clone());
    }
    if let Some(name) = &filter.name {
        query.push(" and s.name = ").push_bind(name.clone());
    }
    if let Some(batch_id) = filter.batch_id {
        query.push(" and s.batch_id = ").push_bind(batch_id);
    }
    contains(query, "s.metadata", filter.metadata.as_ref());
    if let Some(timeout) = filter.timeout {
        query.push(" and s.timeout_secs = ").push_bind(timeout);
    }
    if let Some(after) = filter.created_after {
        query.push(" and s.created_at > ").push_bind(after);
        query.push(" and s.id >= ").push_bind(first_id(after));
    }
    if let Some(before) = filter.created_before {
        query.push(" and s.created_at < ").push_bind(before);
        query.push(" and s.id < ").push_bind(first_id(before + OVERLAP));
    }
    if let Page::After(id) = page {
        query.push(" and s.id < ").push_bind(id);
    }
}

/// Returns the smallest id that can have been made at that time: an id begins with the milliseconds.
fn first_id(at: DateTime<Utc>) -> Uuid {
    let millis = u64::try_from(at.timestamp_millis()).unwrap_or(0).min((1 << 48) - 1);
    Uuid::from_u128(u128::from(millis) << 80)
}

/// Adds the condition that a column contains `metadata`. The empty object adds none: rows without metadata, which are
/// stored as null, contain it too.
///
/// The query must not be kept prepared. Only with the value at hand can the planner tell a rare value, for which it
/// takes the index, from a common one, for which it reads from the newest row on. A plan for any value does the latter,
/// and reads everything to find nothing.
pub(in crate::store) fn contains(query: &mut QueryBuilder<Postgres>, column: &str, metadata: Option<&Value>) {
    if let Some(metadata) = metadata.filter(|m| m.as_object().is_some_and(|m| !m.is_empty())) {
        query.push(format!(" and {column} @> ")).push_bind(metadata.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_come_after_the_first_id_of_their_time() {
        let at = |millis| DateTime::from_timestamp_millis(millis).unwrap();
        let made = |millis: u64| {
            let (secs, nanos) = (millis / 1000, u32::try_from(millis % 1000 * 1_000_000).unwrap());
            Uuid::new_v7(uuid::Timestamp::from_unix(uuid::NoContext, secs, nanos))
        };
        let now = 1_767_225_600_123;
        assert!(first_id(at(now)) < made(1_767_225_600_123) && made(1_767_225_600_123) < first_id(at(now + 1)));
        assert_eq!(first_id(at(-5)), Uuid::nil());
        assert!(first_id(DateTime::<Utc>::MAX_UTC) > made(1_767_225_600_123));
    }
}
