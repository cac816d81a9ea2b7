//! Leases: the claims that an instance keeps while its calls are under way. Nothing here waits for a locked row: a
//! claim whose row another transaction holds is neither confirmed nor lost.

use std::collections::HashSet;
use std::time::Duration;

use uuid::Uuid;

use crate::store::{Actor, Result, Session, Tx};

/// A task and the number of its claim, which is unique among the claims of the task.
pub type ClaimId = (Uuid, i32);

/// The claims that this instance still has. Claims in neither set are lost.
#[derive(Debug, Default)]
pub struct Kept {
    /// Claims whose lease lasts at least half its length from now on.
    pub ours: HashSet<ClaimId>,
    /// Claims whose row another transaction has locked: unknown.
    pub busy: HashSet<ClaimId>,
}

/// Renews the leases of claims.
pub async fn renew(session: &Session, claims: &[ClaimId], lease: Duration) -> Result<Kept> {
    let mut tx = session.begin_lease(Actor::Loop("start")).await?;
    let mut kept = Kept::default();
    renew_in(&mut tx, claims, lease, &mut kept).await?;
    tx.commit().await?;
    Ok(kept)
}

/// Checks which claims this instance still has. Renews only leases that have less than half their length left, so
/// mostly it only reads.
pub async fn confirm(session: &Session, claims: &[ClaimId], lease: Duration) -> Result<Kept> {
    let mut tx = session.begin_lease(Actor::Loop("start")).await?;
    let (ids, numbers): (Vec<Uuid>, Vec<i32>) = claims.iter().copied().unzip();
    let (now, by) = (tx.store.clock().param(), tx.store.instance());
    let held = sqlx::query!(
        r#"select t.id, t.claim from unnest($1::uuid[], $2::int[]) u(id, claim)
           join task t on t.id = u.id and t.claim = u.claim
           where t.claimed_by = $3 and t.started_at is null
             and t.timeout_at > coalesce($4, statement_timestamp()) + make_interval(secs => $5)"#,
        &ids,
        &numbers,
        by,
        now,
        lease.as_secs_f64() / 2.0,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let mut kept = Kept { ours: held.into_iter().map(|row| (row.id, row.claim)).collect(), busy: HashSet::new() };
    let others: Vec<ClaimId> = claims.iter().filter(|claim| !kept.ours.contains(claim)).copied().collect();
    if !others.is_empty() {
        renew_in(&mut tx, &others, lease, &mut kept).await?;
    }
    tx.commit().await?;
    Ok(kept)
}

async fn renew_in(tx: &mut Tx, claims: &[ClaimId], lease: Duration, kept: &mut Kept) -> Result<()> {
    let mut sorted = claims.to_vec();
    sorted.sort_unstable();
    let (ids, numbers): (Vec<Uuid>, Vec<i32>) = sorted.into_iter().unzip();
    let (now, by) = (tx.store.clock().param(), tx.store.instance());
    let rows = sqlx::query!(
        r#"with held as materialized (
               select u.id from unnest($1::uuid[], $2::int[]) u(id, claim) cross join lateral (
                   select from task where id = u.id and claim = u.claim and claimed_by = $3 and started_at is null
                   for update skip locked
               ) t
           ), renewed as (
               update task t set timeout_at = coalesce($4, clock_timestamp()) + make_interval(secs => $5)
               from held h where t.id = h.id returning t.id
           )
           select t.id, t.claim, r.id is not null as "renewed!"
           from unnest($1::uuid[], $2::int[]) u(id, claim) join task t on t.id = u.id and t.claim = u.claim
           left join renewed r on r.id = t.id
           where t.claimed_by = $3 and t.started_at is null"#,
        &ids,
        &numbers,
        by,
        now,
        lease.as_secs_f64(),
    )
    .fetch_all(tx.conn().await?)
    .await?;
    for row in rows {
        let known = if row.renewed { &mut kept.ours } else { &mut kept.busy };
        known.insert((row.id, row.claim));
    }
    Ok(())
}
