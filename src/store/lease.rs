//! The claims that an instance keeps alive while its calls are under way.

use std::time::Duration;

use uuid::Uuid;

use super::{Result, Store};

/// Moves the end of the leases of what this instance holds; answers which tasks those are.
pub async fn renew(store: &Store, tasks: &[(Uuid, i32)], lease: Duration) -> Result<Vec<Uuid>> {
    let (ids, runs): (Vec<Uuid>, Vec<i32>) = tasks.iter().copied().unzip();
    let ours = sqlx::query_scalar!(
        "with held as materialized (
             select t.id from task t join unnest($1::uuid[], $2::int[]) u(id, run) on t.id = u.id and t.run = u.run
             where t.claimed_by = $3 and t.started_at is null order by t.id for update of t
         )
         update task t set timeout_at = coalesce($4, now()) + make_interval(secs => $5)
         from held h where t.id = h.id and t.claimed_by = $3 and t.started_at is null
         returning t.id",
        &ids,
        &runs,
        store.instance(),
        store.clock().param(),
        lease.as_secs_f64(),
    )
    .fetch_all(&store.pool)
    .await?;
    Ok(ours)
}
