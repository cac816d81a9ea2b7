//! The numbers of tasks by status, from counters. Nothing here may read the task table.

use crate::store::{Result, Store};

/// Returns the number of tasks in each status, in the order of `Status::ALL`.
pub async fn by_status(store: &Store) -> Result<[i64; 9]> {
    let counting = sqlx::query!(
        r#"select coalesce(sum(waiting), 0)::bigint as "waiting!", coalesce(sum(pending), 0)::bigint as "pending!",
                  coalesce(sum(claimed), 0)::bigint as "claimed!", coalesce(sum(running), 0)::bigint as "running!",
                  coalesce(sum(retry_pending), 0)::bigint as "retry_pending!",
                  coalesce(sum(paused), 0)::bigint as "paused!", coalesce(sum(success), 0)::bigint as "success!",
                  coalesce(sum(failure), 0)::bigint as "failure!", coalesce(sum(canceled), 0)::bigint as "canceled!"
           from status_count"#
    );
    let row = store.reading(async |tx| Ok(counting.fetch_one(tx.conn().await?).await?)).await?;
    Ok([
        row.waiting,
        row.pending,
        row.claimed,
        row.running,
        row.retry_pending,
        row.paused,
        row.success,
        row.failure,
        row.canceled,
    ])
}
