//! What is read without changing anything: a batch, a graph, notifications. Whole tasks and lists have files of their own.

pub mod idempotency;

use std::collections::HashSet;

use chrono::{DateTime, Utc};
use serde_json::json;
use sqlx::{FromRow, Postgres, QueryBuilder};
use uuid::Uuid;

use super::tasks::list::Page;
use super::tasks::lock::read_status;
use super::{Error, Result, Store, Tx};
use crate::domain::task::status::Status;
use crate::domain::view::{Batch, Dag, Delivery, DeliveryStatus, Link, TaskSummary, Timestamp};
use crate::domain::webhook::Action;

pub(super) const BASIC: &str =
    "select t.id, s.name, s.kind, t.status::text as status, t.batch_id, t.priority, t.attempt, t.run,
    t.next_retry_at, t.success, t.failures, t.expected_count, t.created_at, t.started_at, t.ended_at,
    s.dead_end_barrier from ";

/// Of a row that has a column for each status.
macro_rules! status_counts {
    ($row:ident) => {
        crate::domain::view::StatusCounts {
            waiting: $row.waiting,
            pending: $row.pending,
            claimed: $row.claimed,
            running: $row.running,
            retry_pending: $row.retry_pending,
            paused: $row.paused,
            success: $row.success,
            failure: $row.failure,
            canceled: $row.canceled,
        }
    };
}
pub(super) use status_counts;

#[derive(FromRow)]
pub(super) struct SummaryRow {
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
    pub(super) fn into_view(self) -> Result<TaskSummary> {
        Ok(TaskSummary {
            id: self.id,
            name: self.name,
            kind: self.kind,
            status: read_status(&self.status)?,
            batch_id: self.batch_id,
            priority: self.priority,
            attempt: self.attempt,
            run: self.run,
            next_retry_at: self.next_retry_at.map(Timestamp),
            success: self.success,
            failures: self.failures,
            expected_count: self.expected_count,
            created_at: Timestamp(self.created_at),
            started_at: self.started_at.map(Timestamp),
            ended_at: self.ended_at.map(Timestamp),
            dead_end_barrier: self.dead_end_barrier,
        })
    }
}

/// The status and run of a task, to say why a request does not fit.
pub async fn status_and_run(store: &Store, id: Uuid) -> Result<Option<(Status, i32)>> {
    let looking = sqlx::query!(r#"select status::text as "status!", run from task where id = $1"#, id);
    let row = store.reading(async |tx| Ok(looking.fetch_optional(tx.conn().await?).await?)).await?;
    row.map(|row| Ok((read_status(&row.status)?, row.run))).transpose()
}

/// About how much the graph of a batch is in an answer.
pub async fn dag_bytes(store: &Store, batch_id: Uuid) -> Result<i64> {
    let adding = sqlx::query_scalar!(
        r#"select coalesce((
               select sum(octet_length(name) + octet_length(kind) + 450) from task_spec where batch_id = $1
           ), 0)::bigint + 140 * (
               select count(*) from task_spec s join link l on l.parent_id = s.id where s.batch_id = $1
           ) as "bytes!""#,
        batch_id
    );
    store.listing(async |tx| Ok(adding.fetch_one(tx.conn().await?).await?)).await
}

pub async fn dag(store: &Store, batch_id: Uuid) -> Result<Option<Dag>> {
    store.listing(async |tx| dag_in(tx, batch_id).await).await
}

async fn dag_in(tx: &mut Tx, batch_id: Uuid) -> Result<Option<Dag>> {
    let mut query = QueryBuilder::<Postgres>::new(BASIC);
    query.push("task_spec s join task t on t.id = s.id where s.batch_id = ").push_bind(batch_id).push(" order by s.id");
    let rows: Vec<SummaryRow> = query.build_query_as().fetch_all(tx.conn().await?).await?;
    if rows.is_empty() {
        return Ok(None);
    }
    let links = sqlx::query_as!(
        Link,
        r#"select l.parent_id as "parent_id!", l.child_id as "child_id!", l.requires_success as "requires_success!"
           from task_spec s join link l on l.parent_id = s.id where s.batch_id = $1
           union
           select l.parent_id, l.child_id, l.requires_success
           from task_spec s join link l on l.child_id = s.id where s.batch_id = $1
           order by 2, 1"#,
        batch_id
    )
    .fetch_all(tx.conn().await?)
    .await?;
    Ok(Some(Dag { tasks: rows.into_iter().map(SummaryRow::into_view).collect::<Result<_>>()?, links }))
}

/// Those of the tasks that are there.
pub async fn existing(tx: &mut Tx, ids: &[Uuid]) -> Result<HashSet<Uuid>> {
    let found = sqlx::query_scalar!("select id from task where id = any($1)", ids).fetch_all(tx.conn().await?).await?;
    Ok(found.into_iter().collect())
}

pub async fn batch_exists(store: &Store, id: Uuid) -> Result<bool> {
    let looking = sqlx::query_scalar!("select id from batch where id = $1", id);
    let found = store.reading(async |tx| Ok(looking.fetch_optional(tx.conn().await?).await?)).await?;
    Ok(found.is_some())
}

pub async fn batch(store: &Store, id: Uuid) -> Result<Option<Batch>> {
    let looking = sqlx::query!(
        r#"select b.id, b.total, b.created_at, b.completed_at, b.scope, b.metadata, c.waiting as "waiting!",
                  c.pending as "pending!", c.claimed as "claimed!", c.running as "running!",
                  c.retry_pending as "retry_pending!", c.paused as "paused!", c.success as "success!",
                  c.failure as "failure!", c.canceled as "canceled!", c.total_success as "total_success!",
                  c.total_failures as "total_failures!", c.total_expected as "total_expected!"
           from batch b join batch_counts c on c.batch_id = b.id
           where b.id = $1"#,
        id
    );
    let row = store.reading(async |tx| Ok(looking.fetch_optional(tx.conn().await?).await?)).await?;
    Ok(row.map(|row| Batch {
        batch_id: row.id,
        total_tasks: row.total,
        total_success: row.total_success,
        total_failures: row.total_failures,
        total_expected: row.total_expected,
        status_counts: status_counts!(row),
        scope: row.scope,
        metadata: row.metadata.unwrap_or_else(|| json!({})),
        created_at: Timestamp(row.created_at),
        completed_at: row.completed_at.map(Timestamp),
    }))
}

#[derive(Debug, Default)]
pub struct DeliveryFilter {
    pub id: Option<i64>,
    pub status: Option<DeliveryStatus>,
    pub task_id: Option<Uuid>,
    pub batch_id: Option<Uuid>,
}

/// Newest first.
pub async fn deliveries(store: &Store, filter: &DeliveryFilter, page: Page<i64>, limit: i64) -> Result<Vec<Delivery>> {
    let mut query = QueryBuilder::<Postgres>::new(
        "select id, task_id, batch_id, trigger, condition, run, action, status::text as status, attempts, last_status,
                last_error, next_attempt_at, created_at, updated_at from outbox where true",
    );
    if let Some(id) = filter.id {
        query.push(" and id = ").push_bind(id);
    }
    if let Some(status) = filter.status {
        query.push(" and status = ").push_bind(status.as_str()).push("::delivery_status");
    }
    if let Some(task_id) = filter.task_id {
        query.push(" and task_id = ").push_bind(task_id);
    }
    if let Some(batch_id) = filter.batch_id {
        query.push(" and batch_id = ").push_bind(batch_id);
    }
    if let Page::After(id) = page {
        query.push(" and id < ").push_bind(id);
    }
    query.push(" order by id desc limit ").push_bind(limit);
    if let Page::Offset(offset) = page {
        query.push(" offset ").push_bind(offset);
    }
    let rows: Vec<DeliveryRow> =
        store.listing(async |tx| Ok(query.build_query_as().fetch_all(tx.conn().await?).await?)).await?;
    rows.into_iter().map(DeliveryRow::into_view).collect()
}

#[derive(FromRow)]
struct DeliveryRow {
    id: i64,
    task_id: Option<Uuid>,
    batch_id: Uuid,
    trigger: String,
    condition: String,
    run: i32,
    action: String,
    status: String,
    attempts: i32,
    last_status: Option<i32>,
    last_error: Option<String>,
    next_attempt_at: DateTime<Utc>,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
}

impl DeliveryRow {
    fn into_view(self) -> Result<Delivery> {
        let action: Action = serde_json::from_str(&self.action).map_err(Error::corrupt)?;
        let status = DeliveryStatus::parse(&self.status).ok_or_else(|| Error::corrupt(&self.status))?;
        Ok(Delivery {
            id: self.id,
            task_id: self.task_id,
            batch_id: self.batch_id,
            trigger: self.trigger,
            condition: self.condition,
            run: self.run,
            url: action.params.url,
            status,
            attempts: self.attempts,
            last_status: self.last_status,
            last_error: self.last_error,
            next_attempt_at: (status == DeliveryStatus::Pending).then_some(Timestamp(self.next_attempt_at)),
            created_at: Timestamp(self.created_at),
            updated_at: Timestamp(self.updated_at),
        })
    }
}
