//! What is read without changing anything: a task, a batch, a graph, notifications. Lists have a file of their own.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use sqlx::{FromRow, Postgres, QueryBuilder};
use uuid::Uuid;

use super::lists::Page;
use super::lock::read_status;
use super::{Error, Result, Store, Tx};
use crate::domain::failure::FailureType;
use crate::domain::status::Status;
use crate::domain::view::{
    BasicTask, Batch, Dag, Delivery, DeliveryStatus, Link, RetrySource, StatusCounts, Timestamp, WholeTask,
};
use crate::domain::webhook::{Action, Actions};

pub(super) const BASIC: &str =
    "select t.id, s.name, s.kind, t.status::text as status, t.batch_id, t.priority, t.attempt, t.run,
    t.next_retry_at, t.success, t.failures, t.expected_count, t.created_at, t.started_at, t.ended_at,
    s.dead_end_barrier from task_spec s join task t on t.id = s.id";

#[derive(FromRow)]
pub(super) struct BasicRow {
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

impl BasicRow {
    pub(super) fn into_view(self) -> Result<BasicTask> {
        Ok(BasicTask {
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

pub async fn task(store: &Store, id: Uuid) -> Result<Option<WholeTask>> {
    Ok(whole_tasks(&mut *store.pool.acquire().await?, &[id]).await?.remove(&id))
}

/// As it stands inside a transaction that has just changed it.
pub async fn task_in(tx: &mut Tx, id: Uuid) -> Result<Option<WholeTask>> {
    Ok(whole_tasks(tx.conn(), &[id]).await?.remove(&id))
}

/// The same for many.
pub async fn tasks_in(tx: &mut Tx, ids: &[Uuid]) -> Result<HashMap<Uuid, WholeTask>> {
    whole_tasks(tx.conn(), ids).await
}

async fn whole_tasks(conn: &mut sqlx::PgConnection, ids: &[Uuid]) -> Result<HashMap<Uuid, WholeTask>> {
    let rows = sqlx::query_as!(
        WholeRow,
        r#"select t.id, s.name, s.kind, t.status::text as "status!", t.batch_id, t.priority, t.attempt, t.run,
                  t.next_retry_at, t.success, t.failures, t.expected_count, t.created_at, t.started_at, t.ended_at,
                  s.dead_end_barrier, t.timeout_secs, s.metadata, s.actions, c.action as "cancel?", t.last_updated,
                  t.failure_reason, t.failure_type, s.retry, s.retry_source, t.deferrals, s.run_at, s.rules,
                  s.fair_key
           from task t join task_spec s on s.id = t.id
           left join cancel_action c on c.task_id = t.id and c.run = t.run
           where t.id = any($1)"#,
        ids
    )
    .fetch_all(conn)
    .await?;
    rows.into_iter().map(|row| Ok((row.id, row.into_view()?))).collect()
}

struct WholeRow {
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
    timeout_secs: i32,
    metadata: Option<Value>,
    actions: Option<String>,
    cancel: Option<String>,
    last_updated: DateTime<Utc>,
    failure_reason: Option<String>,
    failure_type: Option<String>,
    retry: Option<String>,
    retry_source: Option<String>,
    deferrals: i32,
    run_at: Option<DateTime<Utc>>,
    rules: Option<String>,
    fair_key: Option<String>,
}

impl WholeRow {
    fn into_view(self) -> Result<WholeTask> {
        let mut actions: Actions = match &self.actions {
            Some(text) => serde_json::from_str(text).map_err(Error::corrupt)?,
            None => Actions::default(),
        };
        actions.cancel = self.cancel.as_deref().map(serde_json::from_str).transpose().map_err(Error::corrupt)?;
        let rules = self.rules.as_deref().map(serde_json::from_str).transpose().map_err(Error::corrupt)?;
        Ok(WholeTask {
            basic: BasicTask {
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
            },
            timeout: self.timeout_secs,
            metadata: self.metadata.unwrap_or_else(|| json!({})),
            actions,
            last_updated: Timestamp(self.last_updated),
            failure_reason: self.failure_reason,
            failure_type: self.failure_type.as_deref().and_then(FailureType::parse),
            retry: self.retry.as_deref().map(serde_json::from_str).transpose().map_err(Error::corrupt)?,
            retry_source: self.retry_source.as_deref().and_then(RetrySource::parse),
            deferrals: self.deferrals,
            run_at: self.run_at.map(Timestamp),
            rules: rules.unwrap_or_default(),
            fair_key: self.fair_key,
        })
    }
}

/// The status and run of a task, to say why a request does not fit.
pub async fn standing(store: &Store, id: Uuid) -> Result<Option<(Status, i32)>> {
    let row = sqlx::query!(r#"select status::text as "status!", run from task where id = $1"#, id)
        .fetch_optional(&store.pool)
        .await?;
    row.map(|row| Ok((read_status(&row.status)?, row.run))).transpose()
}

pub async fn dag(store: &Store, batch_id: Uuid) -> Result<Option<Dag>> {
    let mut query = QueryBuilder::<Postgres>::new(BASIC);
    query.push(" where s.batch_id = ").push_bind(batch_id).push(" order by s.id");
    let rows: Vec<BasicRow> = query.build_query_as().fetch_all(&store.pool).await?;
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
    .fetch_all(&store.pool)
    .await?;
    Ok(Some(Dag { tasks: rows.into_iter().map(BasicRow::into_view).collect::<Result<_>>()?, links }))
}

pub async fn batch_exists(store: &Store, id: Uuid) -> Result<bool> {
    let found = sqlx::query_scalar!("select id from batch where id = $1", id).fetch_optional(&store.pool).await?;
    Ok(found.is_some())
}

pub async fn batch(store: &Store, id: Uuid) -> Result<Option<Batch>> {
    let row = sqlx::query!(
        r#"select b.id, b.total, b.created_at, b.completed_at, b.scope, b.metadata, c.waiting, c.pending, c.claimed,
                  c.running, c.retry_pending, c.paused, c.success, c.failure, c.canceled,
                  c.total_success, c.total_failures, c.total_expected
           from batch b join batch_count c on c.batch_id = b.id
           where b.id = $1"#,
        id
    )
    .fetch_optional(&store.pool)
    .await?;
    Ok(row.map(|row| Batch {
        batch_id: row.id,
        total_tasks: row.total,
        total_success: row.total_success,
        total_failures: row.total_failures,
        total_expected: row.total_expected,
        status_counts: StatusCounts {
            waiting: row.waiting,
            pending: row.pending,
            claimed: row.claimed,
            running: row.running,
            retry_pending: row.retry_pending,
            paused: row.paused,
            success: row.success,
            failure: row.failure,
            canceled: row.canceled,
        },
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
    let rows: Vec<DeliveryRow> = query.build_query_as().fetch_all(&store.pool).await?;
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
