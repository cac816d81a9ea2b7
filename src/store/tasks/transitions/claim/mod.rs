//! Pending → Claimed, in queue order. While no rules are in force a claim is one statement, which is in this file;
//! otherwise `claim_by_rules` does it. A claim waits for no locked task and never takes a task with rules without
//! judging them.

mod by_rules;
mod queue_age;

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::time::Duration;

use uuid::Uuid;

use super::moved::Moved;
use crate::domain::rules::RuleMatcher;
use crate::domain::task::Flags;
use crate::domain::task::lifecycle::Cause;
use crate::domain::task::status::Status;
use crate::domain::webhook::{Action, Actions};
use crate::store::rules::{fairness, matchers};
use crate::store::tasks::lease::ClaimId;
use crate::store::{Error, Result, Tx};

use by_rules::claim_by_rules;
pub use queue_age::queue_age;

/// A claimed task, with what its start needs.
#[derive(Clone, Debug)]
pub struct Claimed {
    pub id: Uuid,
    pub batch_id: Uuid,
    pub run: i32,
    /// The number of this claim.
    pub claim: i32,
    pub attempt: i16,
    pub priority: i16,
    pub turn: i64,
    /// The call that starts it, if any.
    pub on_start: Option<Action>,
    /// The size of its actions in memory.
    pub bytes: usize,
}

impl Claimed {
    pub fn claim_id(&self) -> ClaimId {
        (self.id, self.claim)
    }
}

/// Returns the key of the queue order, which the claim statements write as `order by priority desc, turn, id`.
pub(super) fn queue_order(priority: i16, turn: i64, id: Uuid) -> (Reverse<i16>, i64, Uuid) {
    (Reverse(priority), turn, id)
}

/// The result of a claim.
#[derive(Debug, Default)]
pub struct Claims {
    /// The claimed tasks, in queue order.
    pub tasks: Vec<Claimed>,
    /// How many tasks rules blocked and moved out of the queue.
    pub blocked: usize,
    /// How many tasks were skipped because another transaction holds a slot that they need.
    pub busy: usize,
    /// Whether the queue, or a rechecked group, may hold more tasks.
    pub more: bool,
    /// Matchers that are not registered. Tasks whose rules name them were skipped.
    pub unknown: BTreeSet<RuleMatcher>,
}

/// The most bytes of actions that one claim takes. The first task is claimed however large it is.
pub(super) const CLAIM_BYTES: i64 = 8 * 1024 * 1024;

/// Claims up to `limit` tasks among the first `window` of the queue, in queue order. The transaction must have begun by
/// [`Session::begin_claim`](crate::store::Session::begin_claim).
pub async fn claim(tx: &mut Tx, limit: usize, window: usize, lease: Duration) -> Result<Claims> {
    let matchers = matchers::all(tx).await?;
    let mut claims = if matchers.is_idle() {
        let UnruledClaim { mut tasks, read, ruled } = claim_unruled(tx, limit, lease).await?;
        let mut more = tasks.len() == limit || i64::try_from(tasks.len()).is_ok_and(|claimed| claimed < read);
        let mut unknown = BTreeSet::new();
        if ruled > 0 {
            // Tasks with rules were committed after this claim began: they are judged, or their matchers named.
            let by_rules = claim_by_rules(tx, &matchers, limit, limit, lease).await?;
            more = by_rules.more;
            tasks.extend(by_rules.tasks);
            unknown = by_rules.unknown;
        }
        Claims { tasks, more, unknown, ..Claims::default() }
    } else {
        claim_by_rules(tx, &matchers, limit, window.max(limit), lease).await?
    };
    claims.tasks.sort_unstable_by_key(|claimed| queue_order(claimed.priority, claimed.turn, claimed.id));
    fairness::record_turns(tx, &claims.tasks).await?;
    Ok(claims)
}

/// The row of a claimed task.
pub(super) struct ClaimedRow {
    pub id: Uuid,
    pub batch_id: Uuid,
    pub run: i32,
    pub claim: i32,
    pub attempt: i16,
    pub priority: i16,
    pub turn: i64,
    pub actions: Option<String>,
    pub last_updated: chrono::DateTime<chrono::Utc>,
}

/// The result of a claim that judges no rules.
struct UnruledClaim {
    tasks: Vec<Claimed>,
    /// How many tasks were read. Those that were not claimed are too large to go with the others, or have rules.
    read: i64,
    /// How many of them have rules.
    ruled: i64,
}

/// Claims the first tasks of the queue, except those with rules. The status is a literal, so that the planner can use
/// the partial index.
async fn claim_unruled(tx: &mut Tx, limit: usize, lease: Duration) -> Result<UnruledClaim> {
    let (now, by) = (tx.store.clock().param(), tx.store.instance());
    let rows = sqlx::query!(
        r#"with picked as materialized (
               select id, priority, turn, flags & $5 <> 0 as calls
               from task where status = 'pending' and not_before is null and parked_on is null
               order by priority desc, turn, id limit $1 for update skip locked
           ), sized as materialized (
               select p.id, s.actions, s.rules is not null as ruled,
                   coalesce(sum(octet_length(s.actions)) filter (where p.calls) over (
                       order by p.priority desc, p.turn, p.id rows between unbounded preceding and 1 preceding
                   ), 0) as before
               from picked p join task_spec s on s.id = p.id
           ), moved as (
               update task t set status = 'claimed', claimed_by = $2, claimed_run = t.run, claim = t.claim + 1,
                   wait_count = 0, timeout_at = coalesce($3, statement_timestamp()) + make_interval(secs => $4),
                   last_updated = greatest(t.last_updated, coalesce($3, statement_timestamp()))
               from sized z
               where t.id = z.id and t.status = 'pending' and z.before < $6 and not z.ruled
               returning t.id, t.batch_id, t.run, t.claim, t.attempt, t.priority, t.turn, t.last_updated,
                   case when t.flags & $5 <> 0 then z.actions end as actions
           )
           select c.looked as "looked!", c.ruled as "ruled!", m.id as "id?", m.batch_id as "batch_id?", m.run as "run?",
               m.claim as "claim?", m.attempt as "attempt?", m.priority as "priority?", m.turn as "turn?",
               m.last_updated as "last_updated?", m.actions
           from (select count(*) as looked, count(*) filter (where ruled) as ruled from sized) c
           left join moved m on true"#,
        i64::try_from(limit).unwrap_or(i64::MAX),
        by,
        now,
        lease.as_secs_f64(),
        Flags::ON_START.0,
        CLAIM_BYTES,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let (read, ruled) = rows.first().map_or((0, 0), |row| (row.looked, row.ruled));
    let moved = rows.into_iter().filter_map(|row| {
        Some(ClaimedRow {
            id: row.id?,
            batch_id: row.batch_id?,
            run: row.run?,
            claim: row.claim?,
            attempt: row.attempt?,
            priority: row.priority?,
            turn: row.turn?,
            actions: row.actions,
            last_updated: row.last_updated?,
        })
    });
    let moved = moved.collect();
    Ok(UnruledClaim { tasks: record_claims(tx, moved)?, read, ruled })
}

/// Reports the moves of claimed rows to the transaction, and reads their actions.
pub(super) fn record_claims(tx: &mut Tx, rows: Vec<ClaimedRow>) -> Result<Vec<Claimed>> {
    let mut claimed = Vec::with_capacity(rows.len());
    for ClaimedRow { id, batch_id, run, claim, attempt, priority, turn, actions, last_updated } in rows {
        let moved = Moved { id, batch_id, run, attempt, last_updated };
        moved.record(tx, Status::Pending, Status::Claimed, Cause::Claim.as_str(), None);
        let bytes = actions.as_ref().map_or(0, String::len);
        let actions = actions.as_deref().map(serde_json::from_str::<Actions>).transpose();
        let actions = actions.map_err(|error| Error::corrupt(format!("actions of task {id}: {error}")))?;
        let on_start = actions.and_then(|actions| actions.on_start);
        claimed.push(Claimed { id, batch_id, run, claim, attempt, priority, turn, on_start, bytes });
    }
    Ok(claimed)
}
