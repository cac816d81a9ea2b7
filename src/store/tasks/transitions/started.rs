//! Claimed → Running. An answer counts only for the claim under which its call was made.

use std::collections::{HashMap, HashSet};

use uuid::Uuid;

use super::moved::Moved;
use crate::domain::task::lifecycle::Cause;
use crate::domain::task::status::Status;
use crate::store::tasks::lease::ClaimId;
use crate::store::{Result, Tx};

/// The result of [`started`].
#[derive(Debug, Default)]
pub struct Started {
    /// Claims whose task another transaction has locked. Nothing was written about them.
    pub busy: HashSet<ClaimId>,
}

/// A claim whose call was answered with 2xx, or that needed no call.
#[derive(Clone, Debug)]
pub struct StartedClaim {
    pub claim: ClaimId,
    /// The part of the answer that was ignored, and why, for the audit trail.
    pub ignored: Option<String>,
}

/// Claimed → Running, for claims that this instance still has. Skips locked tasks.
pub async fn started(tx: &mut Tx, starts: &[StartedClaim]) -> Result<Started> {
    let (now, by) = (tx.store.clock().param(), tx.store.instance());
    let mut claims: Vec<ClaimId> = starts.iter().map(|start| start.claim).collect();
    claims.sort_unstable();
    let (ids, numbers): (Vec<Uuid>, Vec<i32>) = claims.iter().copied().unzip();
    let rows = sqlx::query!(
        r#"/* start tasks */ with held as materialized (
               select u.* from unnest($1::uuid[], $2::int[], $3::text[]::task_status[]) u(id, claim, from_status)
               cross join lateral (select from task where id = u.id for update skip locked) t
           ), moved as (
               update task t set status = 'running', started_at = coalesce($5, statement_timestamp()),
                   last_updated = greatest(t.last_updated, coalesce($5, statement_timestamp())),
                   timeout_at = greatest(t.last_updated, coalesce($5, statement_timestamp()))
                                + make_interval(secs => t.timeout_secs)
               from held h
               where t.id = h.id and t.claim = h.claim and t.status = h.from_status and t.claimed_by = $4
               returning t.id, t.batch_id, t.run, t.attempt, t.last_updated
           )
           select id as "id!", null::int as claim, batch_id, run, attempt, last_updated from moved
           union all
           select id, claim, null, null, null, null from held"#,
        &ids,
        &numbers,
        &vec![Status::Claimed.as_str(); ids.len()] as &[&str],
        by,
        now,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let ignored: HashMap<Uuid, &str> =
        starts.iter().filter_map(|start| Some((start.claim.0, start.ignored.as_deref()?))).collect();
    let mut busy: HashSet<ClaimId> = claims.into_iter().collect();
    for row in rows {
        if let Some(claim) = row.claim {
            busy.remove(&(row.id, claim));
        }
        if let (Some(batch_id), Some(run), Some(attempt), Some(last_updated)) =
            (row.batch_id, row.run, row.attempt, row.last_updated)
        {
            let moved = Moved { id: row.id, batch_id, run, attempt, last_updated };
            let reason = ignored.get(&row.id).map(|why| (*why).to_owned());
            moved.record(tx, Status::Claimed, Status::Running, Cause::Start.as_str(), reason);
        }
    }
    Ok(Started { busy })
}
