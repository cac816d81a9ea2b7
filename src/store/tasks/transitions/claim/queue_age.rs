//! How long the queue keeps tasks waiting, in the order of claims.

use crate::store::{Result, Store};

/// Returns for how many seconds the task at the head of the queue has been in it.
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
