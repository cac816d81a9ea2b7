//! Changes of alive tasks besides their status: counters, priority, metadata, and the time of the last heartbeat. A
//! heartbeat must not move the deadline, which would cost an entry in every index of the table each time; the timeout
//! loop moves it when it has come.

use chrono::{DateTime, Utc};
use serde_json::Value;
use uuid::Uuid;

use crate::domain::json::stored_len;
use crate::store::rules::fairness;
use crate::store::tx::settle::SumDeltas;
use crate::store::{Result, Tx};
use crate::wake::Hints;

/// A heartbeat of one task. `None` leaves a value as it is.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    pub id: Uuid,
    /// The run that the heartbeat belongs to. It is ignored if the task is at another run.
    pub run: Option<i32>,
    pub success: i64,
    pub failures: i64,
    pub expected_count: Option<i32>,
    pub priority: Option<i16>,
}

/// Writes the heartbeats of alive tasks and returns the ids of those tasks. Takes at most one heartbeat per task.
pub async fn record(tx: &mut Tx, heartbeats: &[Heartbeat]) -> Result<Vec<Uuid>> {
    macro_rules! column {
        ($heartbeat:ident => $value:expr) => {
            &heartbeats.iter().map(|$heartbeat| $value).collect::<Vec<_>>()[..]
        };
    }
    let now = tx.store.clock().param();
    let written = sqlx::query!(
        r#"with held as materialized (
             select id, success, failures, expected_count, priority from task where id = any($1) order by id for update
         )
         update task t set success = t.success + u.success, failures = t.failures + u.failures,
             expected_count = coalesce(u.expected_count, t.expected_count), priority = coalesce(u.priority, t.priority),
             last_updated = greatest(t.last_updated, coalesce($7, clock_timestamp()))
         from unnest($1::uuid[], $2::int[], $3::bigint[], $4::bigint[], $5::int[], $6::smallint[])
             u(id, run, success, failures, expected_count, priority)
         join held h on h.id = u.id
         where t.id = u.id and t.ended_at is null and (u.run is null or u.run = t.run)
         returning t.id, t.batch_id, t.slots, t.priority <> h.priority as "reordered!", u.success as "success!",
             u.failures as "failures!", coalesce(u.expected_count - coalesce(h.expected_count, 0), 0)::bigint as "expected!",
             greatest(0, coalesce(t.expected_count - t.success - t.failures, 0))
             - greatest(0, coalesce(h.expected_count - h.success - h.failures, 0)) as "more_to_do!""#,
        column!(s => s.id),
        column!(s => s.run) as &[Option<i32>],
        column!(s => s.success),
        column!(s => s.failures),
        column!(s => s.expected_count) as &[Option<i32>],
        column!(s => s.priority) as &[Option<i16>],
        now,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    for row in &written {
        tx.summed(row.batch_id, SumDeltas { success: row.success, failures: row.failures, expected: row.expected });
        if row.more_to_do != 0 {
            for slot in row.slots.iter().flatten() {
                tx.slot(*slot, 0, row.more_to_do);
            }
        }
        if row.reordered {
            fairness::rejoin(tx, row.id).await?;
        }
    }
    Ok(written.into_iter().map(|row| row.id).collect())
}

/// Adds to the counters of tasks and of their batches in one statement, and returns the ids of those tasks. It reads
/// only `run`, `success` and `failures` of the heartbeats. It skips tasks that another transaction holds, and tasks
/// that occupy slots, because slots are locked before batches.
pub async fn add_without_slots(tx: &mut Tx, heartbeats: &[Heartbeat]) -> Result<Vec<Uuid>> {
    let mut sorted: Vec<&Heartbeat> = heartbeats.iter().collect();
    sorted.sort_unstable_by_key(|heartbeat| heartbeat.id);
    macro_rules! column {
        ($heartbeat:ident => $value:expr) => {
            &sorted.iter().map(|$heartbeat| $value).collect::<Vec<_>>()[..]
        };
    }
    let now = tx.store.clock().param();
    Ok(sqlx::query_scalar!(
        r#"/* heartbeats */ with held as materialized (
               select u.id, u.success, u.failures
               from unnest($1::uuid[], $2::int[], $3::bigint[], $4::bigint[]) u(id, run, success, failures)
               cross join lateral (
                   select from task where id = u.id and ended_at is null and slots is null
                       and (u.run is null or u.run = run)
                   for update skip locked
               ) t
           ), counted as (
               update task t set success = t.success + h.success, failures = t.failures + h.failures,
                   last_updated = greatest(t.last_updated, coalesce($5, clock_timestamp()))
               from held h where t.id = h.id
               returning t.id, t.batch_id, h.success, h.failures
           ), sums as materialized (
               select batch_id, sum(success)::bigint as success, sum(failures)::bigint as failures from counted
               group by batch_id having sum(success) <> 0 or sum(failures) <> 0
           ), batches as materialized (
               select batch_id from batch_count where batch_id = any(array(select batch_id from sums))
               order by batch_id for update
           ), summed as (
               update batch_count c set total_success = c.total_success + s.success,
                   total_failures = c.total_failures + s.failures, updated_at = coalesce($5, clock_timestamp())
               from sums s where c.batch_id = s.batch_id and (select count(*) from batches) >= 0
           )
           select id as "id!" from counted"#,
        column!(s => s.id),
        column!(s => s.run) as &[Option<i32>],
        column!(s => s.success),
        column!(s => s.failures),
        now,
    )
    .fetch_all(tx.conn().await?)
    .await?)
}

/// Records the time of a heartbeat and nothing else. Skips a locked task instead of waiting.
pub async fn touch(tx: &mut Tx, id: Uuid, run: Option<i32>) -> Result<()> {
    let now = tx.store.clock().param();
    sqlx::query!(
        "update task t set last_updated = greatest(t.last_updated, coalesce($3, statement_timestamp()))
         from (select id from task where id = $1 for update skip locked) h
         where t.id = h.id and t.ended_at is null and ($2::int is null or t.run = $2)",
        id,
        run,
        now,
    )
    .execute(tx.conn().await?)
    .await?;
    Ok(())
}

/// Moves the deadlines of executing tasks.
pub async fn put_off(tx: &mut Tx, deadlines: &[(Uuid, DateTime<Utc>)]) -> Result<()> {
    let (ids, at): (Vec<Uuid>, Vec<DateTime<Utc>>) = deadlines.iter().copied().unzip();
    sqlx::query!(
        "update task t set timeout_at = u.at from unnest($1::uuid[], $2::timestamptz[]) u(id, at)
         where t.id = u.id and t.status in ('claimed', 'running')",
        &ids,
        &at,
    )
    .execute(tx.conn().await?)
    .await?;
    Ok(())
}

/// Merges into the metadata of a task and returns its new size in bytes, measured as for a new task. A blocked task
/// returns to the queue, because its rules may read other values now. An executing task stays counted in the slots of
/// its claim.
pub async fn merge_metadata(tx: &mut Tx, id: Uuid, metadata: &Value) -> Result<usize> {
    let merged: Value = sqlx::query_scalar!(
        r#"update task_spec set metadata = coalesce(metadata, '{}') || $2 where id = $1 returning metadata as "metadata!""#,
        id,
        metadata,
    )
    .fetch_one(tx.conn().await?)
    .await?;
    let unblocked = sqlx::query!("update task set parked_on = null where id = $1 and parked_on is not null", id)
        .execute(tx.conn().await?)
        .await?;
    if unblocked.rows_affected() > 0 {
        tx.hint(Hints::START);
    }
    Ok(stored_len(&merged))
}
