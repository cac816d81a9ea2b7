//! Deletes finished batches in chunks. Each transaction deletes a bounded number of rows, waits for no row lock, and
//! leaves counters that agree with the rows. So a batch of any size goes in as many transactions as it takes, and a
//! kill in between costs nothing. It never deletes a task that is alive or a notification that is still to be
//! delivered.

use uuid::Uuid;

use super::tx::settle::SumDeltas;
use super::{Actor, Result, Session, Tx};
use crate::domain::task::status::Status;

/// Candidates read at a time. Locked batches are skipped, so there must be more behind them.
const CANDIDATES: i64 = 1000;
/// Events, and notifications, that a transaction may delete for each task that it may delete. A task that was never
/// retried has at most four events, most of them shared with other tasks.
const ROWS_PER_TASK: i64 = 10;

/// The result of one deleting transaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deleted {
    pub tasks: u64,
    /// Something was deleted, so there may be more.
    pub more: bool,
}

struct ExpiredBatch {
    id: Uuid,
    total: i64,
}

/// Deletes up to `limit` tasks of the oldest batches that finished more than `days` days ago, except batches with
/// notifications still to be delivered. A batch of more than `limit` tasks loses its last tasks first: children go
/// before their parents, and the rest of the batch can still be retried.
pub async fn delete_finished(session: &Session, days: u32, limit: i64) -> Result<Deleted> {
    let mut tx = session.begin(Actor::Loop("retention")).await?;
    let found = candidates(&mut tx, days).await?;
    let mut rest = found.as_slice();
    let mut deleted = Deleted::default();
    while !rest.is_empty() && !deleted.more {
        let (chunk, behind) = rest.split_at(fitting(rest, limit));
        rest = behind;
        let ids: Vec<Uuid> = chunk.iter().map(|batch| batch.id).collect();
        deleted = delete_some(&mut tx, &ids, days, limit).await?;
    }
    tx.commit().await?;
    Ok(deleted)
}

/// Returns how many of the first batches have at most `limit` tasks in all; at least one.
fn fitting(batches: &[ExpiredBatch], limit: i64) -> usize {
    let mut tasks = 0;
    let fits = |batch: &&ExpiredBatch| {
        tasks += batch.total;
        tasks <= limit
    };
    batches.iter().take_while(fits).count().max(1)
}

async fn candidates(tx: &mut Tx, days: u32) -> Result<Vec<ExpiredBatch>> {
    let now = tx.store.clock().param();
    Ok(sqlx::query_as!(
        ExpiredBatch,
        r#"select b.id, b.total::bigint as "total!" from batch b
           where b.completed_at < coalesce($1, statement_timestamp()) - make_interval(days => $2)
             and not exists (select from outbox o where o.batch_id = b.id and o.status = 'pending' offset 0)
           order by b.completed_at limit $3"#,
        now,
        i32::try_from(days).unwrap_or(i32::MAX),
        CANDIDATES,
    )
    .fetch_all(tx.conn().await?)
    .await?)
}

async fn delete_some(tx: &mut Tx, batches: &[Uuid], days: u32, limit: i64) -> Result<Deleted> {
    let unlocked = lock(tx, batches, days).await?;
    if unlocked.is_empty() {
        return Ok(Deleted::default());
    }
    let chunks = delete_tasks(tx, &unlocked, limit).await?;
    let rows = delete_history(tx, &unlocked, limit.saturating_mul(ROWS_PER_TASK)).await?;
    let removed = delete_empty(tx, &unlocked).await?;
    let mut tasks = 0;
    let (mut smaller, mut by) = (Vec::new(), Vec::new());
    for chunk in chunks {
        let ended = [Status::Success, Status::Failure, Status::Canceled].into_iter().zip(chunk.ended);
        let mut by_status = [0; 9];
        for (status, count) in ended {
            tx.deleted(status, count.into());
            by_status[status.index()] = -count;
        }
        tasks += u64::try_from(chunk.tasks).unwrap_or(0);
        if removed.binary_search(&chunk.batch_id).is_err() {
            let SumDeltas { success, failures, expected } = chunk.sums;
            let sums = SumDeltas { success: -success, failures: -failures, expected: -expected };
            tx.correct_batch(chunk.batch_id, by_status, sums, false);
            smaller.push(chunk.batch_id);
            by.push(chunk.tasks);
        }
    }
    if !smaller.is_empty() {
        shrink(tx, &smaller, &by).await?;
    }
    Ok(Deleted { tasks, more: tasks > 0 || rows > 0 || !removed.is_empty() })
}

/// Locks the batches that no other transaction holds and that are still to be deleted.
async fn lock(tx: &mut Tx, batches: &[Uuid], days: u32) -> Result<Vec<Uuid>> {
    let now = tx.store.clock().param();
    Ok(sqlx::query_scalar!(
        "select b.id from batch b join batch_count c on c.batch_id = b.id
         where b.id = any($1) and b.completed_at < coalesce($2, statement_timestamp()) - make_interval(days => $3)
         order by b.id for update of b, c skip locked",
        batches,
        now,
        i32::try_from(days).unwrap_or(i32::MAX),
    )
    .fetch_all(tx.conn().await?)
    .await?)
}

/// The deleted tasks of one batch.
struct DeletedChunk {
    batch_id: Uuid,
    tasks: i32,
    /// Tasks deleted in Success, Failure and Canceled.
    ended: [i32; 3],
    sums: SumDeltas,
}

/// Deletes the last tasks of batches and all that belongs to them. A batch with a locked or alive task among them is
/// skipped: most likely it is being retried. Rows are looked up by arrays of keys, because joined with the chunk,
/// tables were read whole.
async fn delete_tasks(tx: &mut Tx, batches: &[Uuid], limit: i64) -> Result<Vec<DeletedChunk>> {
    let rows = sqlx::query!(
        r#"with wanted as materialized (
               select id, batch_id from task_spec where batch_id = any($1) order by batch_id desc, id desc limit $2
           ), held as materialized (
               select t.id, t.status, t.success, t.failures, t.expected_count
               from wanted w join task_spec s on s.id = w.id join task t on t.id = w.id for update of s, t skip locked
           ), busy as materialized (
               select w.batch_id from wanted w left join held h on h.id = w.id
               where h.status not in ('success', 'failure', 'canceled')
                  or h.id is null and exists (select from task t where t.id = w.id)
           ), gone as materialized (
               select w.id, w.batch_id, h.status, h.success, h.failures, h.expected_count
               from wanted w left join held h on h.id = w.id where w.batch_id not in (select batch_id from busy)
           ),
           spec as (delete from task_spec where id = any(array(select id from gone))),
           task as (delete from task where id = any(array(select id from gone))),
           link as (
               delete from link where parent_id = any(array(select id from gone))
                                   or child_id = any(array(select id from gone))
           ),
           attempt as (delete from attempt where task_id = any(array(select id from gone))),
           cancel as (delete from cancel_action where task_id = any(array(select id from gone)))
           select batch_id, count(*)::int as "tasks!",
                  count(*) filter (where status = 'success')::int as "success!",
                  count(*) filter (where status = 'failure')::int as "failure!",
                  count(*) filter (where status = 'canceled')::int as "canceled!",
                  coalesce(sum(success), 0)::bigint as "sum_success!",
                  coalesce(sum(failures), 0)::bigint as "sum_failures!",
                  coalesce(sum(expected_count), 0)::bigint as "sum_expected!"
           from gone group by batch_id"#,
        batches,
        limit,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let chunks = rows.into_iter().map(|row| DeletedChunk {
        batch_id: row.batch_id,
        tasks: row.tasks,
        ended: [row.success, row.failure, row.canceled],
        sums: SumDeltas { success: row.sum_success, failures: row.sum_failures, expected: row.sum_expected },
    });
    Ok(chunks.collect())
}

/// Deletes events and notifications of batches that have no tasks any more, and returns how many. While a batch has
/// tasks they can be retried, and an event may belong to many of them.
async fn delete_history(tx: &mut Tx, batches: &[Uuid], limit: i64) -> Result<i64> {
    Ok(sqlx::query_scalar!(
        r#"with empty as materialized (
               select b.id from unnest($1::uuid[]) b(id)
               where not exists (select from task_spec s where s.batch_id = b.id offset 0)
           ), event as (
               delete from event where seq = any(array(
                   select e.seq from event e where e.batch_id = any(array(select id from empty)) limit $2
                   for update skip locked))
               returning 1
           ), sent as (
               delete from outbox where id = any(array(
                   select o.id from outbox o
                   where o.batch_id = any(array(select id from empty)) and o.status <> 'pending' limit $2
                   for update skip locked))
               returning 1
           )
           select (select count(*) from event) + (select count(*) from sent) as "rows!""#,
        batches,
        limit,
    )
    .fetch_one(tx.conn().await?)
    .await?)
}

/// Deletes the batches of which nothing is left, and returns their ids in order. `offset 0` makes each check an index
/// lookup, even if the plan was made while the tables were nearly empty.
async fn delete_empty(tx: &mut Tx, batches: &[Uuid]) -> Result<Vec<Uuid>> {
    let mut removed = sqlx::query_scalar!(
        r#"with batch as (
               delete from batch b where b.id = any($1)
                 and not exists (select from task_spec s where s.batch_id = b.id offset 0)
                 and not exists (select from event e where e.batch_id = b.id offset 0)
                 and not exists (select from outbox o where o.batch_id = b.id offset 0)
               returning b.id
           )
           delete from batch_count c using batch b where c.batch_id = b.id returning c.batch_id"#,
        batches,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    removed.sort_unstable();
    Ok(removed)
}

/// Reduces the totals of batches by the deleted tasks.
async fn shrink(tx: &mut Tx, batches: &[Uuid], by: &[i32]) -> Result<()> {
    sqlx::query!(
        "update batch b set total = b.total - u.tasks from unnest($1::uuid[], $2::int[]) u(id, tasks) where b.id = u.id",
        batches,
        by,
    )
    .execute(tx.conn().await?)
    .await?;
    Ok(())
}

/// Deletes up to `limit` rows of statistics that are more than `days` days old.
pub async fn forget_stats(session: &Session, days: u32, limit: i64) -> Result<u64> {
    let mut tx = session.begin(Actor::Loop("retention")).await?;
    let now = tx.store.clock().param();
    let forgotten = sqlx::query!(
        "delete from retry_stat where ctid = any(array(
             select ctid from retry_stat where bucket < coalesce($1, statement_timestamp()) - make_interval(days => $2)
             order by bucket limit $3 for update skip locked))",
        now,
        i32::try_from(days).unwrap_or(i32::MAX),
        limit,
    )
    .execute(tx.conn().await?)
    .await?
    .rows_affected();
    tx.commit().await?;
    Ok(forgotten)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_batches_go_together_and_large_ones_alone() {
        let batches = |totals: &[i64]| -> Vec<ExpiredBatch> {
            totals.iter().map(|total| ExpiredBatch { id: Uuid::nil(), total: *total }).collect()
        };
        assert_eq!(fitting(&batches(&[4, 5, 1, 1]), 10), 3);
        assert_eq!(fitting(&batches(&[11, 1]), 10), 1);
        assert_eq!(fitting(&batches(&[1, 11]), 10), 1);
        assert_eq!(fitting(&batches(&[0, 0, 10]), 10), 3);
    }
}
