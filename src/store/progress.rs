//! What may change about an alive task besides its status: counters, priority, metadata, and its deadline, which
//! every sign of life moves.

use serde_json::Value;
use uuid::Uuid;

use super::settle::Sums;
use super::{Result, Tx, fairness};
use crate::wake::Hints;

/// A sign of life of one task. `None` leaves a value as it is.
#[derive(Clone, Debug)]
pub struct Sign {
    pub id: Uuid,
    /// Only if the task is still at this run.
    pub run: Option<i32>,
    pub success: i64,
    pub failures: i64,
    pub expected_count: Option<i32>,
    pub priority: Option<i16>,
}

struct Written {
    id: Uuid,
    batch_id: Uuid,
    slots: Option<Vec<i64>>,
    reordered: bool,
    success: i64,
    failures: i64,
    expected: i64,
    more_to_do: i64,
}

macro_rules! write {
    ($lock:literal, $tx:expr, $signs:expr) => {{
        macro_rules! column {
            ($sign:ident => $value:expr) => {
                &$signs.iter().map(|$sign| $value).collect::<Vec<_>>()[..]
            };
        }
        let now = $tx.store.clock().param();
        sqlx::query_as!(
            Written,
            r#"with held as materialized (
             select id, success, failures, expected_count, priority from task where id = any($1) order by id "#
                + $lock
                + r#")
         update task t set success = t.success + u.success, failures = t.failures + u.failures,
             expected_count = coalesce(u.expected_count, t.expected_count), priority = coalesce(u.priority, t.priority),
             timeout_at = case when t.status = 'running'
                               then coalesce($7, now()) + make_interval(secs => t.timeout_secs)
                               else t.timeout_at end,
             last_updated = coalesce($7, now())
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
        .fetch_all($tx.conn())
        .await?
    }};
}

/// Writes the signs of all tasks that are alive; answers whose they were. One sign per task at most.
pub async fn record(tx: &mut Tx, signs: &[Sign]) -> Result<Vec<Uuid>> {
    let written = write!("for update", tx, signs);
    keep_book(tx, written).await
}

/// The same for those that nobody else holds, without waiting for the others.
pub async fn record_free(tx: &mut Tx, signs: &[Sign]) -> Result<Vec<Uuid>> {
    let written = write!("for update skip locked", tx, signs);
    keep_book(tx, written).await
}

async fn keep_book(tx: &mut Tx, written: Vec<Written>) -> Result<Vec<Uuid>> {
    for row in &written {
        tx.summed(row.batch_id, Sums { success: row.success, failures: row.failures, expected: row.expected });
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

/// Merges into the metadata of a task and answers how many bytes it has now, measured as for a new task. What is parked
/// goes back into the queue: its rules may look at other values now. What executes stays counted where it was claimed.
pub async fn merge_metadata(tx: &mut Tx, id: Uuid, metadata: &Value) -> Result<usize> {
    let merged: Value = sqlx::query_scalar!(
        r#"update task_spec set metadata = coalesce(metadata, '{}') || $2 where id = $1 returning metadata as "metadata!""#,
        id,
        metadata,
    )
    .fetch_one(tx.conn())
    .await?;
    let unparked = sqlx::query!("update task set parked_on = null where id = $1 and parked_on is not null", id)
        .execute(tx.conn())
        .await?;
    if unparked.rows_affected() > 0 {
        tx.hint(Hints::START);
    }
    Ok(merged.to_string().len())
}
