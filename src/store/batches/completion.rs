//! The completion of batches and their reopening. Only the commit of a [`Tx`] calls it, after the counters are settled;
//! it never counts tasks itself.

use std::collections::BTreeSet;

use uuid::Uuid;

use crate::store::tx::deferred;
use crate::store::tx::settle::BatchDelta;
use crate::store::{Result, Tx};
use crate::wake::Hints;

/// Reopens the batches in which a task came back to life, and completes the `finished` ones, which have no alive task.
/// Returns the completed ones.
pub(in crate::store) async fn settle(
    tx: &mut Tx,
    reopened: &BTreeSet<Uuid>,
    finished: Vec<Uuid>,
    hints: &mut Hints,
) -> Result<Vec<Uuid>> {
    if !reopened.is_empty() {
        reopen(tx, reopened).await?;
    }
    if finished.is_empty() {
        return Ok(finished);
    }
    let finished = if tx.defers() { completable(tx, &finished, hints).await? } else { finished };
    if complete(tx, &finished).await? {
        hints.add(Hints::DELIVER);
    }
    Ok(finished)
}

/// Marks batches as complete and enqueues their `on_batch_complete` notifications. Returns whether there are any.
async fn complete(tx: &mut Tx, ids: &[Uuid]) -> Result<bool> {
    let now = tx.store.clock().param();
    let added = sqlx::query!(
        "with done as (
             update batch b set completed_at = coalesce($2, statement_timestamp()), completions = b.completions + 1
             where b.id = any($1) and b.completed_at is null
             returning b.id, b.completions - 1 as completion, b.on_complete, b.total, b.scope, b.metadata
         )
         insert into outbox (batch_id, trigger, condition, run, action, state, position, next_attempt_at, created_at,
                             updated_at)
         select d.id, 'batch', 'complete', d.completion, a.action::text,
                json_build_object('batch_id', d.id, 'trigger', 'batch', 'completion', d.completion,
                                  'total_tasks', d.total, 'success', c.success, 'failure', c.failure,
                                  'canceled', c.canceled, 'scope', d.scope,
                                  'metadata', coalesce(d.metadata, '{}'),
                                  'status_counts', json_build_object(
                                      'waiting', c.waiting, 'pending', c.pending, 'claimed', c.claimed,
                                      'running', c.running, 'retry_pending', c.retry_pending, 'paused', c.paused,
                                      'success', c.success, 'failure', c.failure, 'canceled', c.canceled))::text,
                a.place - 1,
                coalesce($2, statement_timestamp()), coalesce($2, statement_timestamp()), coalesce($2, statement_timestamp())
         from done d join batch_counts c on c.batch_id = d.id
         cross join lateral json_array_elements(d.on_complete::json) with ordinality a(action, place)",
        ids,
        now,
    )
    .execute(tx.conn().await?)
    .await?
    .rows_affected();
    Ok(added > 0)
}

/// Marks batches as not complete.
async fn reopen(tx: &mut Tx, ids: &BTreeSet<Uuid>) -> Result<()> {
    let ids: Vec<Uuid> = ids.iter().copied().collect();
    sqlx::query!("update batch set completed_at = null where id = any($1) and completed_at is not null", &ids)
        .execute(tx.conn().await?)
        .await?;
    Ok(())
}

/// Locks the unlocked rows of these batches and returns their ids. The other batches are deferred: the merge completes
/// them.
async fn completable(tx: &mut Tx, ids: &[Uuid], hints: &mut Hints) -> Result<Vec<Uuid>> {
    let unlocked =
        sqlx::query_scalar!("select id from batch where id = any($1) order by id for update skip locked", ids)
            .fetch_all(tx.conn().await?)
            .await?;
    let busy = ids.iter().filter(|id| !unlocked.contains(id));
    let busy: Vec<(Uuid, BatchDelta)> = busy.map(|id| (*id, BatchDelta::default())).collect();
    if !busy.is_empty() {
        hints.add(Hints::COUNTERS);
        deferred::store(tx, &busy).await?;
    }
    Ok(unlocked)
}
