//! Numbers for the metrics page and the loops, from counters and from the ends of the loops' own indexes:
//! nothing here reads the task table as a whole.

use crate::store::{Result, Store, Tx};

/// Tasks by status, in the order of `Status::ALL`.
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

/// How many notifications are to be sent, and for how many seconds the oldest of them has been.
pub async fn outbox(store: &Store) -> Result<(i64, f64)> {
    let counting = sqlx::query!(
        r#"select count(*) as "depth!",
                  coalesce(extract(epoch from coalesce($1, statement_timestamp()) - min(created_at)), 0)::double precision as "age!"
           from outbox where status = 'pending'"#,
        store.clock().param(),
    );
    let row = store.listing(async |tx| Ok(counting.fetch_one(tx.conn().await?).await?)).await?;
    Ok((row.depth, row.age))
}

/// For how many seconds the task at the head of the queue has been in it.
pub async fn queue_age(store: &Store) -> Result<f64> {
    let first = sqlx::query_scalar!(
        r#"select extract(epoch from coalesce($1, statement_timestamp()) - last_updated)::double precision as "age!" from task
           where status = 'pending' and not_before is null and parked_on is null
           order by priority desc, turn, id limit 1"#,
        store.clock().param(),
    );
    let age = store.listing(async |tx| Ok(first.fetch_optional(tx.conn().await?).await?)).await?;
    Ok(age.unwrap_or(0.0))
}

/// Combinations of rules and values that block tasks.
pub async fn blocked_groups(store: &Store) -> Result<i64> {
    let count = sqlx::query_scalar!(r#"select count(*) as "n!" from parking where state > 0"#);
    store.listing(async |tx| Ok(count.fetch_one(tx.conn().await?).await?)).await
}

/// Seconds until the next deadline or end of a lease; negative when one has passed. The first of an order and not a
/// minimum: planned on an empty table, that was the whole index, added up.
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

/// Seconds until the next retry or `run_at` is due; negative when one has passed.
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
