//! Task details: everything that the API shows of a task. They are read on their own, or together with the lock of a
//! task that is about to change, which saves a second read. Nothing here writes.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use uuid::Uuid;

use super::lock::{LockedTasks, moment};
use super::row::{read_status, summary_from_row, task_from_row};
use crate::domain::task::Task;
use crate::domain::task::status::Status;
use crate::domain::view::{RetrySource, TaskAction, TaskDetails, Timestamp};
use crate::domain::webhook::Actions;
use crate::store::{Error, Result, Store, Tx};

/// The most bytes of actions and metadata of a task that is read together with others.
const SMALL: i32 = 16 * 1024;

/// Reads the details of the tasks `$2`, without actions and metadata where these have more than `$3` bytes.
macro_rules! task_details {
    ($rest:literal, $($args:expr),*) => {
        sqlx::query_as!(
            DetailsRow,
            r#"select t.id, s.name, s.kind, t.status::text as "status!", t.batch_id, t.priority, t.attempt, t.run,
                   t.next_retry_at, t.success, t.failures, t.expected_count, t.created_at, t.started_at, t.ended_at,
                   s.dead_end_barrier, t.timeout_secs, f.fits as "fits!",
                   case when f.fits then s.metadata end as metadata, case when f.fits then s.actions end as actions,
                   c.action as "cancel?", t.last_updated,
                   t.failure_reason, t.failure_type, s.retry, s.retry_source, t.deferrals, s.run_at, s.rules, s.fair_key,
                   t.flags, t.wait_count, t.claimed_by, t.claimed_run, t.claim, t.manual_run, t.slots, t.timeout_at,
                   coalesce($1, statement_timestamp()) as "now!"
               from task t join task_spec s on s.id = t.id
               cross join lateral (
                   select coalesce(octet_length(s.actions), 0) + coalesce(pg_column_size(s.metadata), 0) <= $3 as fits
               ) f
               left join cancel_action c on c.task_id = t.id and c.run = t.run
               where t.id = any($2)"#
                + $rest,
            $($args),*
        )
    };
}

struct DetailsRow {
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
    fits: bool,
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
    flags: i16,
    wait_count: i32,
    claimed_by: Option<Uuid>,
    claimed_run: Option<i32>,
    claim: i32,
    manual_run: Option<i32>,
    slots: Option<Vec<i64>>,
    timeout_at: Option<DateTime<Utc>>,
    now: DateTime<Utc>,
}

/// Reads the details of a task.
pub async fn task(store: &Store, id: Uuid) -> Result<Option<TaskDetails>> {
    store.reading(async |tx| task_in(tx, id).await).await
}

/// Reads the details of a task inside a transaction, which may just have changed it.
pub async fn task_in(tx: &mut Tx, id: Uuid) -> Result<Option<TaskDetails>> {
    read(tx, &[id], i32::MAX).await.map(|mut tasks| tasks.remove(&id))
}

/// Reads the details of many tasks, except those of more than 16 KiB: together they might take too much memory.
pub async fn small_tasks_in(tx: &mut Tx, ids: &[Uuid]) -> Result<HashMap<Uuid, TaskDetails>> {
    read(tx, ids, SMALL).await
}

async fn read(tx: &mut Tx, ids: &[Uuid], most: i32) -> Result<HashMap<Uuid, TaskDetails>> {
    let rows =
        task_details!(" /* read task details */", None::<DateTime<Utc>>, ids, most).fetch_all(tx.conn().await?).await?;
    let rows = rows.into_iter().filter(|row| row.fits);
    rows.map(|row| row.into_parts().map(|(_, view)| (view.basic.id, view))).collect()
}

/// Locks the tasks that no other transaction holds, without waiting, and returns them with the details of the small
/// ones.
pub async fn lock_unlocked(tx: &mut Tx, ids: &[Uuid]) -> Result<(LockedTasks, HashMap<Uuid, TaskDetails>)> {
    let now = tx.store.clock().param();
    let rows = task_details!(" order by t.id for update of t skip locked /* lock task details */", now, ids, SMALL)
        .fetch_all(tx.conn().await?)
        .await?;
    let moment = moment(tx, rows.iter().map(|row| row.now.max(row.last_updated)).max());
    let (mut tasks, mut views) = (Vec::with_capacity(rows.len()), HashMap::with_capacity(rows.len()));
    for row in rows {
        let fits = row.fits;
        let (task, view) = row.into_parts()?;
        if fits {
            views.insert(task.id, view);
        }
        tasks.push(task);
    }
    Ok((LockedTasks { tasks, moment }, views))
}

impl DetailsRow {
    fn into_parts(self) -> Result<(Task, TaskDetails)> {
        let mut row = self;
        let mut actions: Actions = match &row.actions {
            Some(text) => serde_json::from_str(text).map_err(Error::corrupt)?,
            None => Actions::default(),
        };
        actions.cancel = row.cancel.as_deref().map(serde_json::from_str).transpose().map_err(Error::corrupt)?;
        let rules = row.rules.as_deref().map(serde_json::from_str).transpose().map_err(Error::corrupt)?;
        let task = task_from_row!(row);
        let view = TaskDetails {
            timeout: row.timeout_secs,
            metadata: row.metadata.take().unwrap_or_else(|| json!({})),
            actions: TaskAction::list(actions),
            last_updated: Timestamp(row.last_updated),
            failure_reason: row.failure_reason.take(),
            failure_type: task.failure_type,
            retry: task.retry.clone(),
            retry_source: row.retry_source.as_deref().and_then(RetrySource::parse),
            deferrals: row.deferrals,
            run_at: row.run_at.map(Timestamp),
            rules: rules.unwrap_or_default(),
            fair_key: row.fair_key.take(),
            basic: summary_from_row!(row),
        };
        Ok((task, view))
    }
}

/// Reads the status and run of a task, to explain why a request does not fit.
pub async fn status_and_run(store: &Store, id: Uuid) -> Result<Option<(Status, i32)>> {
    let looking = sqlx::query!(r#"select status::text as "status!", run from task where id = $1"#, id);
    let row = store.reading(async |tx| Ok(looking.fetch_optional(tx.conn().await?).await?)).await?;
    row.map(|row| Ok((read_status(&row.status)?, row.run))).transpose()
}

/// Returns which of the ids belong to a task.
pub async fn existing(tx: &mut Tx, ids: &[Uuid]) -> Result<HashSet<Uuid>> {
    let found = sqlx::query_scalar!("select id from task where id = any($1)", ids).fetch_all(tx.conn().await?).await?;
    Ok(found.into_iter().collect())
}
