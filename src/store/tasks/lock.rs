//! Every way to take tasks for oneself. Rows are locked in the order of their ids, so that transactions that want
//! the same rows queue up instead of blocking each other; the loops skip what somebody else holds. (Where they are shown
//! afterwards, `whole` does the same.)

use std::collections::HashSet;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::row::task_from_row;
use crate::domain::task::Task;
use crate::domain::task::lifecycle::{Jitter, Moment};
use crate::store::{Result, Tx};

/// Locked rows, and the moment at which decisions about them are made.
pub struct LockedTasks {
    pub tasks: Vec<Task>,
    pub moment: Moment,
}

struct TaskRow {
    id: Uuid,
    batch_id: Uuid,
    kind: String,
    status: String,
    flags: i16,
    attempt: i16,
    run: i32,
    deferrals: i32,
    wait_count: i32,
    timeout_secs: i32,
    claimed_by: Option<Uuid>,
    claimed_run: Option<i32>,
    claim: i32,
    manual_run: Option<i32>,
    slots: Option<Vec<i64>>,
    timeout_at: Option<DateTime<Utc>>,
    next_retry_at: Option<DateTime<Utc>>,
    created_at: DateTime<Utc>,
    last_updated: DateTime<Utc>,
    started_at: Option<DateTime<Utc>>,
    ended_at: Option<DateTime<Utc>>,
    failure_type: Option<String>,
    failure_reason: Option<String>,
    retry: Option<String>,
    now: DateTime<Utc>,
}

macro_rules! lock_tasks {
    ($rest:literal, $($args:expr),*) => {
        sqlx::query_as!(
            TaskRow,
            r#"select t.id, t.batch_id, s.kind, t.status::text as "status!", t.flags, t.attempt, t.run, t.deferrals,
                   t.wait_count, t.timeout_secs, t.claimed_by, t.claimed_run, t.claim, t.manual_run, t.slots, t.timeout_at,
                   t.next_retry_at, t.created_at, t.last_updated, t.started_at, t.ended_at, t.failure_type, t.failure_reason, s.retry,
                   coalesce($1, statement_timestamp()) as "now!"
               from task t join task_spec s on s.id = t.id "#
                + $rest,
            $($args),*
        )
    };
}

pub async fn by_ids(tx: &mut Tx, ids: &[Uuid]) -> Result<LockedTasks> {
    let now = tx.store.clock().param();
    let asked = Instant::now();
    let rows =
        lock_tasks!("where t.id = any($2) order by t.id for update of t", now, ids).fetch_all(tx.conn().await?).await?;
    let waited = asked.elapsed();
    let mut locked = locked(tx, rows)?;
    // The statement's own time is that of its beginning, before the wait.
    if now.is_none() && waited > Duration::from_millis(5) {
        let after = sqlx::query_scalar!(r#"select clock_timestamp() as "now!""#).fetch_one(tx.conn().await?).await?;
        locked.moment.now = locked.moment.now.max(after);
    }
    Ok(locked)
}

/// Those of the tasks that nobody else holds, locked without waiting for the others.
pub async fn unlocked(tx: &mut Tx, ids: &[Uuid]) -> Result<HashSet<Uuid>> {
    let free = sqlx::query_scalar!("select id from task where id = any($1) order by id for update skip locked", ids)
        .fetch_all(tx.conn().await?)
        .await?;
    Ok(free.into_iter().collect())
}

/// The same, read.
pub async fn unlocked_tasks(tx: &mut Tx, ids: &[Uuid]) -> Result<LockedTasks> {
    let now = tx.store.clock().param();
    let rows = lock_tasks!("where t.id = any($2) order by t.id for update of t skip locked", now, ids)
        .fetch_all(tx.conn().await?)
        .await?;
    locked(tx, rows)
}

/// Claimed tasks whose lease ran out and Running ones without a sign of life, the most overdue first. Skips what
/// somebody else holds, and the tasks in `but`.
pub async fn timed_out(tx: &mut Tx, limit: i64, but: &[Uuid]) -> Result<LockedTasks> {
    let now = tx.store.clock().param();
    let rows = lock_tasks!(
        "where t.id in (
             select id from task
             where status in ('claimed', 'running') and timeout_at <= coalesce($1, statement_timestamp())
               and id <> all($3)
             order by timeout_at limit $2 for update skip locked
         ) order by t.id for update of t",
        now,
        limit,
        but
    )
    .fetch_all(tx.conn().await?)
    .await?;
    locked(tx, rows)
}

/// The ids of such tasks, not locked.
pub async fn overdue(tx: &mut Tx, limit: i64, but: &[Uuid]) -> Result<Vec<Uuid>> {
    let now = tx.store.clock().param();
    Ok(sqlx::query_scalar!(
        "select id from task
         where status in ('claimed', 'running') and timeout_at <= coalesce($1, statement_timestamp()) and id <> all($3)
         order by timeout_at limit $2",
        now,
        limit,
        but,
    )
    .fetch_all(tx.conn().await?)
    .await?)
}

/// What is alive of the last `limit` tasks of the batch before `below`, and the first of these, if there are any. From
/// the last one on, so that children go before their parents. The limit comes before the look at each task: without
/// statistics all of a new batch were looked at for every part of it.
pub async fn last_of_batch(
    tx: &mut Tx,
    batch_id: Uuid,
    below: Option<Uuid>,
    limit: i64,
) -> Result<(LockedTasks, Option<Uuid>)> {
    let rows = sqlx::query!(
        r#"select s.id, t.alive as "alive!" from (
               select id from task_spec where batch_id = $1 and id < $2 order by id desc limit $3
           ) s
           cross join lateral (select ended_at is null as alive from task where id = s.id offset 0) t"#,
        batch_id,
        below.unwrap_or(Uuid::max()),
        limit
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let alive: Vec<Uuid> = rows.iter().filter(|row| row.alive).map(|row| row.id).collect();
    Ok((by_ids(tx, &alive).await?, rows.iter().map(|row| row.id).min()))
}

fn locked(tx: &Tx, rows: Vec<TaskRow>) -> Result<LockedTasks> {
    let moment = moment(tx, rows.iter().map(|row| row.now.max(row.last_updated)).max());
    Ok(LockedTasks {
        tasks: rows.into_iter().map(|row| Ok(task_from_row!(row))).collect::<Result<Vec<Task>>>()?,
        moment,
    })
}

/// No decision is made before the last change of any of its tasks: their dates never go back. Without a row there is
/// nothing to decide, whatever time it is.
pub(in crate::store) fn moment(tx: &Tx, now: Option<DateTime<Utc>>) -> Moment {
    let now = now.unwrap_or(DateTime::UNIX_EPOCH);
    Moment { now, jitter: Jitter::Spread(rand::random()), limits: tx.store.retry }
}

/// Seconds until the next deadline or end of a lease; negative when one has passed. The first of an order and not a
/// minimum: planned on an empty table, that was the whole index, added up.
pub async fn next_timeout(tx: &mut Tx) -> Result<Option<f64>> {
    let now = tx.store.clock().param();
    Ok(sqlx::query_scalar!(
        "select extract(epoch from
             (select timeout_at from task where status in ('claimed', 'running') order by timeout_at limit 1)
             - coalesce($1, statement_timestamp()))::double precision",
        now,
    )
    .fetch_one(tx.conn().await?)
    .await?)
}
