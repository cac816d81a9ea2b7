//! Locks the tasks about which the domain is to decide. ([`details`](super::details) locks those whose details are
//! shown afterwards.) Rows are always locked in the order of their ids, so that transactions that want the same rows
//! queue up instead of deadlocking; the loops skip locked rows. Nothing here changes a row.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::row::task_from_row;
use crate::domain::task::Task;
use crate::domain::task::lifecycle::{Jitter, Moment};
use crate::store::{Result, Tx};

/// Locked tasks, and the moment at which decisions about them are made.
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

/// Locks tasks, waiting for those that another transaction holds.
pub async fn by_ids(tx: &mut Tx, ids: &[Uuid]) -> Result<LockedTasks> {
    let now = tx.store.clock().param();
    let asked = Instant::now();
    let rows =
        lock_tasks!("where t.id = any($2) order by t.id for update of t", now, ids).fetch_all(tx.conn().await?).await?;
    let waited = asked.elapsed();
    let mut locked = locked(tx, rows)?;
    // The statement's timestamp is that of its beginning, before the wait.
    if now.is_none() && waited > Duration::from_millis(5) {
        let after = sqlx::query_scalar!(r#"select clock_timestamp() as "now!""#).fetch_one(tx.conn().await?).await?;
        locked.moment.now = locked.moment.now.max(after);
    }
    Ok(locked)
}

/// Locks the tasks that no other transaction holds, without waiting, and returns their ids.
pub async fn unlocked(tx: &mut Tx, ids: &[Uuid]) -> Result<HashSet<Uuid>> {
    let unlocked =
        sqlx::query_scalar!("select id from task where id = any($1) order by id for update skip locked", ids)
            .fetch_all(tx.conn().await?)
            .await?;
    Ok(unlocked.into_iter().collect())
}

/// Locks the tasks that no other transaction holds, without waiting, and returns them.
pub async fn unlocked_tasks(tx: &mut Tx, ids: &[Uuid]) -> Result<LockedTasks> {
    let now = tx.store.clock().param();
    let rows = lock_tasks!("where t.id = any($2) order by t.id for update of t skip locked", now, ids)
        .fetch_all(tx.conn().await?)
        .await?;
    locked(tx, rows)
}

/// Locks Claimed tasks whose lease ran out and Running tasks without a heartbeat, the most overdue first. Skips locked
/// tasks and those in `excluded`.
pub async fn timed_out(tx: &mut Tx, limit: i64, excluded: &[Uuid]) -> Result<LockedTasks> {
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
        excluded
    )
    .fetch_all(tx.conn().await?)
    .await?;
    locked(tx, rows)
}

/// Returns the ids of the tasks that [`timed_out`] would lock, including locked ones.
pub async fn overdue(tx: &mut Tx, limit: i64, excluded: &[Uuid]) -> Result<Vec<Uuid>> {
    let now = tx.store.clock().param();
    Ok(sqlx::query_scalar!(
        "select id from task
         where status in ('claimed', 'running') and timeout_at <= coalesce($1, statement_timestamp()) and id <> all($3)
         order by timeout_at limit $2",
        now,
        limit,
        excluded,
    )
    .fetch_all(tx.conn().await?)
    .await?)
}

/// Locks the alive ones among the last `limit` tasks of the batch before `below`. Also returns the first of those
/// tasks, or `None` if there are none. It goes backwards, so that children come before their parents. The limit comes
/// before the lookup of each task: without statistics, every chunk read all tasks of a new batch.
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

/// Returns the moment of a decision. It is not before the last change of any task, so that dates never go back. Without
/// a row there is nothing to decide, and any time will do.
pub(in crate::store) fn moment(tx: &Tx, now: Option<DateTime<Utc>>) -> Moment {
    let now = now.unwrap_or(DateTime::UNIX_EPOCH);
    Moment { now, jitter: Jitter::Spread(rand::random()), limits: tx.store.retry }
}

/// Returns the seconds until the next deadline or end of a lease; negative when one has passed. The query takes the
/// first row in order and not a minimum, whose plan, made on an empty table, read the whole index.
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
