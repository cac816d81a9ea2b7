//! What may change about an alive task besides its status: counters, priority, metadata, and the time of its last heartbeat.
//! Its deadline is moved by the timeout loop when it has come: moved by every heartbeat, it would cost an entry in every
//! index of the table each time.

use chrono::{DateTime, Utc};
use serde_json::Value;
use uuid::Uuid;

use crate::domain::json::stored_len;
use crate::store::admission::fairness;
use crate::store::tx::settle::SumDeltas;
use crate::store::{Result, Tx};
use crate::wake::Hints;

/// A heartbeat of one task. `None` leaves a value as it is.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    pub id: Uuid,
    /// Only if the task is still at this run.
    pub run: Option<i32>,
    pub success: i64,
    pub failures: i64,
    pub expected_count: Option<i32>,
    pub priority: Option<i16>,
}

/// Writes the heartbeats of all tasks that are alive; answers whose they were. One heartbeat per task at most.
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

/// Adds up the counters of tasks, and of their batches, by one statement: nothing but `run`, `success` and `failures` of
/// the heartbeats is looked at. Answers whose they were. Leaves out tasks that somebody else holds, without waiting for them,
/// and those that occupy slots, which have to be told before the batch is.
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

/// Notes that the worker of a task lives, and nothing else. Waits for nobody.
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

/// Moves the deadlines of tasks that are being executed.
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

/// Merges into the metadata of a task and answers how many bytes it has now, measured as for a new task. What is parked
/// goes back into the queue: its rules may look at other values now. What executes stays counted where it was claimed.
pub async fn merge_metadata(tx: &mut Tx, id: Uuid, metadata: &Value) -> Result<usize> {
    let merged: Value = sqlx::query_scalar!(
        r#"update task_spec set metadata = coalesce(metadata, '{}') || $2 where id = $1 returning metadata as "metadata!""#,
        id,
        metadata,
    )
    .fetch_one(tx.conn().await?)
    .await?;
    let unparked = sqlx::query!("update task set parked_on = null where id = $1 and parked_on is not null", id)
        .execute(tx.conn().await?)
        .await?;
    if unparked.rows_affected() > 0 {
        tx.hint(Hints::START);
    }
    Ok(stored_len(&merged))
}
