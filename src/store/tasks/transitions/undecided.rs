//! The transitions that need no decision, except claims: one guarded, set-based statement each. None of them waits for
//! a locked task.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, Utc};
use uuid::Uuid;

use crate::domain::task::lifecycle::Cause;
use crate::domain::task::status::Status;
use crate::store::ledger::events::Move;
use crate::store::tasks::lease::ClaimId;
use crate::store::tasks::row::read_status;
use crate::store::{Result, Tx};
use crate::wake::Hints;

/// A task that one of these statements has moved.
pub(super) struct Moved {
    pub id: Uuid,
    pub batch_id: Uuid,
    pub run: i32,
    pub attempt: i16,
    pub last_updated: DateTime<Utc>,
}

impl Moved {
    /// Reports the move to the transaction.
    pub fn record(&self, tx: &mut Tx, from: Status, to: Status, cause: &'static str, reason: Option<String>) {
        let Moved { id, batch_id, run, attempt, last_updated } = *self;
        tx.moved(id, Move { batch_id, from: Some(from), to, cause, run, attempt, reason }, last_updated);
    }
}

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

/// Claimed → Pending, for claims that this instance gives back unstarted. Skips locked tasks, which return when their
/// lease ends.
pub async fn give_back(tx: &mut Tx, claims: &[ClaimId]) -> Result<u64> {
    let (now, by) = (tx.store.clock().param(), tx.store.instance());
    let (ids, numbers): (Vec<Uuid>, Vec<i32>) = claims.iter().copied().unzip();
    let rows = sqlx::query!(
        r#"with held as materialized (
               select id, slots from task where id = any($1) order by id for update skip locked
           )
           update task t set status = 'pending', claimed_by = null, timeout_at = null, slots = null,
               last_updated = greatest(t.last_updated, coalesce($5, statement_timestamp()))
           from unnest($1::uuid[], $2::int[], $3::text[]::task_status[]) u(id, claim, from_status)
           join held h on h.id = u.id
           where t.id = u.id and t.claim = u.claim and t.status = u.from_status and t.claimed_by = $4
           returning t.id, t.batch_id, t.run, t.attempt, t.last_updated, h.slots as "slots?",
               greatest(0, coalesce(t.expected_count - t.success - t.failures, 0)) as "remaining!""#,
        &ids,
        &numbers,
        &vec![Status::Claimed.as_str(); ids.len()] as &[&str],
        by,
        now,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    for row in &rows {
        let (id, batch_id, run, attempt) = (row.id, row.batch_id, row.run, row.attempt);
        let moved = Moved { id, batch_id, run, attempt, last_updated: row.last_updated };
        moved.record(tx, Status::Claimed, Status::Pending, "given_back", None);
        for slot in row.slots.iter().flatten() {
            tx.slot(*slot, -1, -row.remaining);
        }
    }
    Ok(rows.len() as u64)
}

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
