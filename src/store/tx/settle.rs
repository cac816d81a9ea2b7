//! The statement that writes the sums of a transaction's moves right before its commit: the audit trail, the counts by
//! status, and the counters of batches. Batch counters are the last locks of a transaction, in the order of their ids,
//! so that they are held for the commit only. Only the rows of the same batches may be locked after them.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use crate::domain::task::status::Status;
use crate::store::ledger::events::Trail;
use crate::store::{Result, Tx};

/// A change of the counters of one batch.
#[derive(Default)]
pub(in crate::store) struct BatchDelta {
    pub by_status: [i32; 9],
    pub sums: SumDeltas,
}

impl BatchDelta {
    /// Returns by how much the number of alive tasks grows.
    pub fn alive(&self) -> i32 {
        self.by_status.iter().zip(Status::ALL).filter(|(_, status)| !status.is_terminal()).map(|(n, _)| *n).sum()
    }
}

/// Changes of the sums that a batch keeps of its tasks' counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::store) struct SumDeltas {
    pub success: i64,
    pub failures: i64,
    pub expected: i64,
}

/// The moves of a transaction and their sums.
#[derive(Default)]
pub(in crate::store) struct Moves {
    pub trail: Trail,
    pub total: [i64; 9],
    pub batches: BTreeMap<Uuid, BatchDelta>,
}

/// Writes the sums and returns the changed batches that have no alive task.
pub(in crate::store) async fn settle(tx: &mut Tx, moves: &Moves, now: Option<DateTime<Utc>>) -> Result<Vec<Uuid>> {
    let Moves { trail, total, batches } = moves;
    let total: &[i64] = if total.iter().any(|n| *n != 0) { total } else { &[] };
    if trail.is_empty() && total.is_empty() && batches.is_empty() {
        return Ok(Vec::new());
    }
    let (task_ids, events) = trail.rows();
    macro_rules! event {
        ($event:ident => $value:expr) => {
            &events.iter().map(|$event| $value).collect::<Vec<_>>()[..]
        };
    }
    let ids: Vec<Uuid> = batches.keys().copied().collect();
    let column = |i: usize| -> Vec<i32> { batches.values().map(|delta| delta.by_status[i]).collect() };
    let sum = |of: fn(&SumDeltas) -> i64| -> Vec<i64> { batches.values().map(|delta| of(&delta.sums)).collect() };
    let now = now.or(tx.store.clock().param());
    let (actor, instance) = (tx.actor(), tx.store.instance());
    let rows = sqlx::query!(
        r#"with told as (
               insert into event (at, actor, instance, batch_id, from_status, to_status, cause, run, attempt, reason, task_ids)
               select coalesce($14, clock_timestamp()), $15, $16, u.batch_id, u.from_status, u.to_status, u.cause, u.run, u.attempt, u.reason,
                      ($17::uuid[])[u.first:u.last]
               from unnest($18::int[], $19::int[], $20::uuid[], $21::text[]::task_status[], $22::text[]::task_status[],
                           $23::text[], $24::int[], $25::smallint[], $27::text[])
                   u(first, last, batch_id, from_status, to_status, cause, run, attempt, reason)
               returning 1
           ), shard as materialized (
               select shard from status_count where cardinality($26::bigint[]) > 0
               order by abs(shard - pg_backend_pid() % 16) limit 1 for update skip locked
           ), counted as (
               insert into status_count as s (shard, waiting, pending, claimed, running, retry_pending, paused, success,
                                              failure, canceled)
               select coalesce((select shard from shard), 16 + pg_backend_pid() % 1000), n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9]
               from (select $26::bigint[] as n) total where cardinality(n) > 0
               on conflict (shard) do update set
                   waiting = s.waiting + excluded.waiting, pending = s.pending + excluded.pending,
                   claimed = s.claimed + excluded.claimed, running = s.running + excluded.running,
                   retry_pending = s.retry_pending + excluded.retry_pending, paused = s.paused + excluded.paused,
                   success = s.success + excluded.success, failure = s.failure + excluded.failure,
                   canceled = s.canceled + excluded.canceled
               returning 1
           ), locked as materialized (
               select c.batch_id from batch_count c
               where c.batch_id = any($1) and (select count(*) from told) + (select count(*) from counted) >= 0
               order by c.batch_id for update
           ), d as (
               select * from unnest($1::uuid[], $2::int[], $3::int[], $4::int[], $5::int[], $6::int[], $7::int[],
                                    $8::int[], $9::int[], $10::int[], $11::bigint[], $12::bigint[], $13::bigint[])
                   d(batch_id, waiting, pending, claimed, running, retry_pending, paused, success, failure,
                     canceled, total_success, total_failures, total_expected)
           )
           update batch_count c set
               waiting = c.waiting + d.waiting, pending = c.pending + d.pending, claimed = c.claimed + d.claimed,
               running = c.running + d.running, retry_pending = c.retry_pending + d.retry_pending,
               paused = c.paused + d.paused, success = c.success + d.success, failure = c.failure + d.failure,
               canceled = c.canceled + d.canceled, total_success = c.total_success + d.total_success,
               total_failures = c.total_failures + d.total_failures,
               total_expected = c.total_expected + d.total_expected, updated_at = coalesce($14, clock_timestamp())
           from d
           where c.batch_id = d.batch_id and (select count(*) from locked) >= 0
           returning c.batch_id,
               c.waiting + c.pending + c.claimed + c.running + c.retry_pending + c.paused as "alive!""#,
        &ids,
        &column(0),
        &column(1),
        &column(2),
        &column(3),
        &column(4),
        &column(5),
        &column(6),
        &column(7),
        &column(8),
        &sum(|sums| sums.success),
        &sum(|sums| sums.failures),
        &sum(|sums| sums.expected),
        now,
        actor,
        instance,
        &task_ids,
        event!(e => e.first),
        event!(e => e.last),
        event!(e => e.made.batch_id),
        event!(e => e.made.from.map(Status::as_str)) as &[Option<&str>],
        event!(e => e.made.to.as_str()) as &[&str],
        event!(e => e.made.cause) as &[&str],
        event!(e => e.made.run),
        event!(e => e.made.attempt),
        total,
        event!(e => e.made.reason.as_deref()) as &[Option<&str>],
    )
    .fetch_all(tx.conn().await?)
    .await?;
    Ok(rows.into_iter().filter(|row| row.alive == 0).map(|row| row.batch_id).collect())
}
