//! RetryPending → Pending when a retry is due, and tasks whose `run_at` has come.

use super::moved::Moved;
use crate::domain::task::lifecycle::Cause;
use crate::domain::task::status::Status;
use crate::store::tasks::row::read_status;
use crate::store::{Result, Tx};
use crate::wake::Hints;

/// RetryPending → Pending for tasks whose retry is due. Also lets tasks whose `run_at` has come into the queue.
pub async fn release_due(tx: &mut Tx, limit: i64) -> Result<u64> {
    let now = tx.store.clock().param();
    let rows = sqlx::query!(
        r#"with retry as materialized (
               select id, status from task where status = 'retry_pending' and next_retry_at <= coalesce($1, statement_timestamp())
               order by next_retry_at limit $2 for update skip locked
           ), early as materialized (
               select id, status from task where status = 'pending' and not_before <= coalesce($1, statement_timestamp())
               order by not_before limit $2 for update skip locked
           ), due as (select * from retry union all select * from early)
           update task t set status = 'pending', not_before = null, next_retry_at = null, started_at = null,
               ended_at = null, failure_type = null, failure_reason = null,
               last_updated = greatest(t.last_updated, coalesce($1, statement_timestamp()))
           from due d where t.id = d.id
           returning t.id, t.batch_id, t.run, t.attempt, t.last_updated, d.status::text as "from!""#,
        now,
        limit,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    for row in &rows {
        let (id, batch_id, run, attempt) = (row.id, row.batch_id, row.run, row.attempt);
        let moved = Moved { id, batch_id, run, attempt, last_updated: row.last_updated };
        moved.record(tx, read_status(&row.from)?, Status::Pending, Cause::RetryDue.as_str(), None);
    }
    if !rows.is_empty() {
        tx.hint(Hints::START);
    }
    Ok(rows.len() as u64)
}

/// Returns the seconds until the next retry or `run_at` is due; negative when one has passed.
pub async fn next_release(tx: &mut Tx) -> Result<Option<f64>> {
    let now = tx.store.clock().param();
    Ok(sqlx::query_scalar!(
        "select extract(epoch from least(
             (select next_retry_at from task where status = 'retry_pending' order by next_retry_at limit 1),
             (select not_before from task where status = 'pending' and not_before is not null
              order by not_before limit 1)
         ) - coalesce($1, statement_timestamp()))::double precision",
        now,
    )
    .fetch_one(tx.conn().await?)
    .await?)
}
