//! Deferred changes of batch counters. Every move of a task changes the counters of its batch, but a transaction that
//! holds that row must not hold up the tasks. A transaction that defers ([`Tx::defers`]) stores its change in
//! `batch_delta` instead of waiting, and a loop adds it once the row is unlocked. Readers add both up (view
//! `batch_counts`).
//!
//! A change that increases the number of alive tasks is never deferred. So the row never counts fewer alive tasks than
//! there are, and a batch never completes too early.

use std::collections::{BTreeMap, HashSet};

use uuid::Uuid;

use super::settle::{BatchDelta, SumDeltas};
use crate::store::{Actor, Result, Session, Tx};
use crate::wake::Hints;

/// The most batches that one transaction merges.
const LIMIT: i64 = 100;

/// Removes the batches whose counters another transaction holds from `batches` and stores their changes.
pub(in crate::store) async fn defer(
    tx: &mut Tx,
    batches: &mut BTreeMap<Uuid, BatchDelta>,
    hints: &mut Hints,
) -> Result<()> {
    let deferrable: Vec<Uuid> = batches.iter().filter(|(_, delta)| delta.alive() <= 0).map(|(id, _)| *id).collect();
    if deferrable.is_empty() {
        return Ok(());
    }
    let unlocked: HashSet<Uuid> = sqlx::query_scalar!(
        "select batch_id from batch_count where batch_id = any($1) order by batch_id for update skip locked",
        &deferrable
    )
    .fetch_all(tx.conn().await?)
    .await?
    .into_iter()
    .collect();
    let busy = deferrable.into_iter().filter(|id| !unlocked.contains(id));
    let busy: Vec<(Uuid, BatchDelta)> = busy.filter_map(|id| batches.remove_entry(&id)).collect();
    if !busy.is_empty() {
        hints.add(Hints::COUNTERS);
        store(tx, &busy).await?;
    }
    Ok(())
}

/// Stores changes of batch counters, to be merged later.
pub(in crate::store) async fn store(tx: &mut Tx, batches: &[(Uuid, BatchDelta)]) -> Result<()> {
    let text = |delta: &BatchDelta| {
        let SumDeltas { success, failures, expected } = delta.sums;
        let by_status = delta.by_status.iter().map(|n| i64::from(*n));
        let all: Vec<String> = by_status.chain([success, failures, expected]).map(|n| n.to_string()).collect();
        format!("{{{}}}", all.join(","))
    };
    sqlx::query!(
        "insert into batch_delta (batch_id, deltas)
         select u.batch_id, u.deltas::bigint[] from unnest($1::uuid[], $2::text[]) u(batch_id, deltas)",
        &batches.iter().map(|(id, _)| *id).collect::<Vec<_>>(),
        &batches.iter().map(|(_, delta)| text(delta)).collect::<Vec<_>>(),
    )
    .execute(tx.conn().await?)
    .await?;
    Ok(())
}

/// The result of merging deferred changes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Merged {
    pub batches: u64,
    /// Whether changes are left because another transaction holds their batch.
    pub left: bool,
    /// The last batch of this chunk, if there may be more behind it.
    pub last: Option<Uuid>,
}

/// Merges deferred changes into the unlocked counters of the batches after `after`. Each batch is found by one index
/// lookup.
pub async fn merge(session: &Session, after: Uuid) -> Result<Merged> {
    let mut tx = session.begin(Actor::Loop("counters")).await?;
    let waiting = sqlx::query_scalar!(
        r#"with recursive waiting(id) as (
               (select batch_id from batch_delta where batch_id > $2 order by batch_id limit 1)
               union all
               select (select d.batch_id from batch_delta d where d.batch_id > w.id order by d.batch_id limit 1)
               from waiting w where w.id is not null
           )
           select id as "id!" from waiting where id is not null limit $1"#,
        LIMIT,
        after,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    if waiting.is_empty() {
        tx.rollback().await?;
        return Ok(Merged::default());
    }
    let unlocked = sqlx::query_scalar!(
        "select b.id from batch b join batch_count c on c.batch_id = b.id where b.id = any($1)
         order by b.id for update skip locked",
        &waiting
    )
    .fetch_all(tx.conn().await?)
    .await?;
    // Changes of a batch that was deleted meanwhile are deleted too.
    let rows = sqlx::query!(
        r#"with gone as (
               delete from batch_delta d where d.batch_id = any($1) or d.batch_id = any($2) and not exists (
                   select from batch_count c where c.batch_id = d.batch_id
               )
               returning d.batch_id, d.deltas
           )
           select batch_id as "batch_id!", array[
               sum(deltas[1]), sum(deltas[2]), sum(deltas[3]), sum(deltas[4]), sum(deltas[5]), sum(deltas[6]),
               sum(deltas[7]), sum(deltas[8]), sum(deltas[9]), sum(deltas[10]), sum(deltas[11]), sum(deltas[12])
           ]::bigint[] as "sums!" from gone group by 1 order by 1"#,
        &unlocked,
        &waiting,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    for row in rows.iter().filter(|row| unlocked.contains(&row.batch_id)) {
        let at = |i: usize| row.sums.get(i).copied().unwrap_or(0);
        let by_status = std::array::from_fn(|i| i32::try_from(at(i)).unwrap_or(0));
        let sums = SumDeltas { success: at(9), failures: at(10), expected: at(11) };
        tx.correct_batch(row.batch_id, by_status, sums, false);
    }
    tx.commit().await?;
    let full = i64::try_from(waiting.len()).is_ok_and(|count| count == LIMIT);
    let last = waiting.last().copied().filter(|_| full);
    Ok(Merged { batches: rows.len() as u64, left: unlocked.len() < waiting.len(), last })
}
