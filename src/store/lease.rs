//! The claims that an instance keeps alive while its calls are under way.

use std::collections::HashSet;
use std::time::Duration;

use uuid::Uuid;

use super::{Actor, Result, Store, Tx};

/// Moves the end of the leases of what this instance holds; answers which tasks those are.
pub async fn renew(store: &Store, tasks: &[(Uuid, i32)], lease: Duration) -> Result<Vec<Uuid>> {
    let mut tx = store.begin_lease(Actor::Loop("start")).await?;
    let ours = renew_in(&mut tx, tasks, lease).await?;
    tx.commit().await?;
    Ok(ours)
}

/// Which of these tasks this instance holds and will go on holding for half a lease. Only what is nearer to its end is
/// renewed: mostly this only looks.
pub async fn confirm(store: &Store, tasks: &[(Uuid, i32)], lease: Duration) -> Result<Vec<Uuid>> {
    let mut tx = store.begin_lease(Actor::Loop("start")).await?;
    let ids: Vec<Uuid> = tasks.iter().map(|(id, _)| *id).collect();
    let held: HashSet<(Uuid, i32)> = sqlx::query!(
        "select id, run from task where id = any($1) and claimed_by = $2 and started_at is null
           and timeout_at > coalesce($3, now()) + make_interval(secs => $4)",
        &ids,
        store.instance(),
        store.clock().param(),
        lease.as_secs_f64() / 2.0,
    )
    .map(|row| (row.id, row.run))
    .fetch_all(tx.conn())
    .await?
    .into_iter()
    .collect();
    let (mut ours, mut others) = (Vec::new(), Vec::new());
    for task in tasks {
        if held.contains(task) { ours.push(task.0) } else { others.push(*task) }
    }
    if !others.is_empty() {
        ours.extend(renew_in(&mut tx, &others, lease).await?);
    }
    tx.commit().await?;
    Ok(ours)
}

async fn renew_in(tx: &mut Tx, tasks: &[(Uuid, i32)], lease: Duration) -> Result<Vec<Uuid>> {
    let (ids, runs): (Vec<Uuid>, Vec<i32>) = tasks.iter().copied().unzip();
    let (now, by) = (tx.store.clock().param(), tx.store.instance());
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
        by,
        now,
        lease.as_secs_f64(),
    )
    .fetch_all(tx.conn())
    .await?;
    Ok(ours)
}
