//! The only writer of `task.status` after a task was created. [`apply`] takes what the domain decided; the four
//! single statements below it move tasks about which nothing has to be decided (a test holds that each of them
//! goes a way that the domain allows). What the end of a task does to its children is private to this file.

mod claim;

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::lease::ClaimId;
use super::lock::{self, read_status};
use crate::domain::graph::{self, Edge};
use crate::domain::retry::Final;
use crate::domain::retry::failure::{FailureType, Trigger};
use crate::domain::task::lifecycle::{AttemptOutcome, Cause, Moment, Settled, Transition};
use crate::domain::task::status::Status;
use crate::domain::task::{Flags, Task};
use crate::store::graph::dead_ends;
use crate::store::ledger::attempts;
use crate::store::ledger::events::Move;
use crate::store::{Error, Result, Tx, outbox};
use crate::wake::Hints;

pub use claim::{Claimed, Claims, claim};

/// Writes the transitions with all their effects, and then those that follow from them.
/// The rows must have been locked by this transaction; `moment` is the one at which was decided.
pub async fn apply(tx: &mut Tx, transitions: &[Transition], moment: Moment) -> Result<()> {
    apply_but(tx, transitions, None, moment).await
}

/// The same while everything alive of a batch is being canceled: nothing of it is looked for as a dead end.
pub async fn apply_stop(tx: &mut Tx, batch_id: Uuid, transitions: &[Transition], moment: Moment) -> Result<()> {
    apply_but(tx, transitions, Some(batch_id), moment).await
}

async fn apply_but(tx: &mut Tx, transitions: &[Transition], stopped: Option<Uuid>, moment: Moment) -> Result<()> {
    if transitions.is_empty() {
        return Ok(());
    }
    write(tx, transitions, moment.now).await?;
    let parents: Vec<Settled> = transitions
        .iter()
        .filter(|t| t.task().flags.has(Flags::HAS_CHILDREN))
        .filter_map(Transition::settled)
        .collect();
    let following = if parents.is_empty() { Vec::new() } else { propagate(tx, &parents, moment).await? };
    let tells = |t: &&Transition| t.task().flags.has(Flags::TELLS_PARENTS) && t.ends_badly();
    let ended: Vec<Uuid> = transitions.iter().chain(&following).filter(tells).map(|t| t.task().id).collect();
    if !ended.is_empty() {
        // None of their children is alive, so nothing follows from these but what is above them, which is among them.
        let (canceled, moment) = dead_ends::found(tx, &ended, stopped, moment).await?;
        write(tx, &canceled, moment.now).await?;
    }
    Ok(())
}

/// One pass, however deep the graph is: the whole cascade is found by one query, which goes on from alive tasks only,
/// locked by another and written like any other transitions.
async fn propagate(tx: &mut Tx, settled: &[Settled], moment: Moment) -> Result<Vec<Transition>> {
    let mut below = Below::find(tx, settled).await?;
    let mut locked = lock::by_ids(tx, &below.children).await?;
    // Links never change, except that a task may get children in a new batch as long as nobody holds it. One that was
    // locked only now may have got some since the links were read; and one that had ended then may be alive again.
    while locked.tasks.iter().any(|task| task.flags.has(Flags::IN_OTHER_BATCHES) || below.stopped_short_of(task)) {
        let again = Below::find(tx, settled).await?;
        let known = again.children == below.children;
        below = again;
        if known {
            break;
        }
        locked = lock::by_ids(tx, &below.children).await?;
    }
    // They may have changed after those above them were locked.
    let moment = moment.not_before(locked.moment);
    let following = graph::propagate(settled, &below.edges, &locked.tasks, moment);
    write(tx, &following, moment.now).await?;
    Ok(following)
}

/// Everything that the end of some tasks can reach.
struct Below {
    edges: Vec<Edge>,
    /// In order, each once.
    children: Vec<Uuid>,
    /// Those that fall if they are alive.
    needy: HashSet<Uuid>,
    parents: HashSet<Uuid>,
}

impl Below {
    async fn find(tx: &mut Tx, settled: &[Settled]) -> Result<Below> {
        let (good, bad): (Vec<Settled>, Vec<Settled>) = settled.iter().partition(|s| s.outcome().is_success());
        let ids = |of: &[Settled]| of.iter().map(|s| s.id()).collect::<Vec<Uuid>>();
        // `offset 0` keeps the look-ups one by one over the key: without statistics, or with those of flat graphs, a
        // hash join over the whole table was chosen for every level (7 s for a chain of 10,000, instead of 0.3 s).
        let edges = sqlx::query!(
            r#"with recursive falling(id) as (
                   select unnest($2::uuid[])
                   union
                   select l.child_id from falling f
                   cross join lateral (select child_id from link where parent_id = f.id and requires_success offset 0) l
                   cross join lateral (select from task where id = l.child_id and ended_at is null offset 0) t
               )
               select l.parent_id as "parent_id!", l.child_id as "child_id!", l.requires_success as "requires_success!"
               from link l where l.parent_id = any($1)
               union all
               select l.parent_id, l.child_id, l.requires_success
               from falling f cross join lateral (select * from link where parent_id = f.id offset 0) l"#,
            &ids(&good),
            &ids(&bad),
        )
        .map(|row| Edge { parent: row.parent_id, child: row.child_id, requires_success: row.requires_success })
        .fetch_all(tx.conn().await?)
        .await?;
        let mut children: Vec<Uuid> = edges.iter().map(|edge| edge.child).collect();
        children.sort_unstable();
        children.dedup();
        let good: HashSet<Uuid> = good.iter().map(|s| s.id()).collect();
        let falls = |edge: &&Edge| edge.requires_success && !good.contains(&edge.parent);
        let needy = edges.iter().filter(falls).map(|edge| edge.child).collect();
        let parents = edges.iter().map(|edge| edge.parent).collect();
        Ok(Below { edges, children, needy, parents })
    }

    /// It falls, and what is below it was not looked for.
    fn stopped_short_of(&self, task: &Task) -> bool {
        let goes_on = !task.status.is_terminal() && task.flags.has(Flags::HAS_CHILDREN);
        goes_on && self.needy.contains(&task.id) && !self.parents.contains(&task.id)
    }
}

async fn write(tx: &mut Tx, transitions: &[Transition], now: DateTime<Utc>) -> Result<()> {
    if transitions.is_empty() {
        return Ok(());
    }
    release_slots(tx, transitions).await?;
    update_tasks(tx, transitions, now).await?;
    attempts::insert(tx, transitions).await?;
    outbox::enqueue(tx, transitions, now).await?;
    for transition in transitions {
        let task = transition.task();
        let made = Move {
            batch_id: task.batch_id,
            from: Some(transition.from()),
            to: task.status,
            cause: transition.cause().as_str(),
            run: task.run,
            attempt: task.attempt,
            reason: None,
        };
        tx.moved(task.id, made, now);
        tx.stats().count(transition);
        count(tx, transition);
    }
    Ok(())
}

/// What tasks occupied is free when they leave, with as much as they have left to do by now.
async fn release_slots(tx: &mut Tx, transitions: &[Transition]) -> Result<()> {
    let leaving: Vec<&Transition> = transitions.iter().filter(|t| !t.freed().is_empty()).collect();
    if leaving.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = leaving.iter().map(|t| t.task().id).collect();
    let rows = sqlx::query!(
        r#"select id, greatest(0, coalesce(expected_count - success - failures, 0)) as "remaining!"
           from task where id = any($1)"#,
        &ids
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let remaining: HashMap<Uuid, i64> = rows.into_iter().map(|row| (row.id, row.remaining)).collect();
    for transition in leaving {
        for slot in transition.freed() {
            tx.slot(*slot, -1, -remaining.get(&transition.task().id).copied().unwrap_or(0));
        }
    }
    Ok(())
}

async fn update_tasks(tx: &mut Tx, transitions: &[Transition], now: DateTime<Utc>) -> Result<()> {
    macro_rules! column {
        ($transition:ident => $value:expr) => {
            &transitions.iter().map(|$transition| $value).collect::<Vec<_>>()[..]
        };
    }
    // The expected status is bound, never a literal: see the note at the statistics of the column.
    let changed = sqlx::query!(
        "update task t set
             status = u.status, attempt = u.attempt, run = u.run, deferrals = u.deferrals, wait_count = u.wait_count,
             claimed_by = u.claimed_by, claimed_run = u.claimed_run, timeout_at = u.timeout_at,
             next_retry_at = u.next_retry_at, started_at = u.started_at, ended_at = u.ended_at,
             failure_type = u.failure_type, failure_reason = u.failure_reason, manual_run = u.manual_run,
             slots = case when u.claimed_by is not null then t.slots end, parked_on = null,
             last_updated = greatest(t.last_updated, $18)
         from unnest($1::uuid[], $2::text[]::task_status[], $3::int[], $4::text[]::task_status[], $5::smallint[],
                     $6::int[], $7::int[], $8::int[], $9::uuid[], $10::int[], $11::timestamptz[], $12::timestamptz[],
                     $13::timestamptz[], $14::timestamptz[], $15::text[], $16::text[], $17::int[])
             u(id, from_status, from_run, status, attempt, run, deferrals, wait_count, claimed_by, claimed_run,
               timeout_at, next_retry_at, started_at, ended_at, failure_type, failure_reason, manual_run)
         where t.id = u.id and t.status = u.from_status and t.run = u.from_run",
        column!(t => t.task().id),
        column!(t => t.from().as_str()) as &[&str],
        column!(t => t.from_run()),
        column!(t => t.task().status.as_str()) as &[&str],
        column!(t => t.task().attempt),
        column!(t => t.task().run),
        column!(t => t.task().deferrals),
        column!(t => t.task().wait_count),
        column!(t => t.task().claimed_by) as &[Option<Uuid>],
        column!(t => t.task().claimed_run) as &[Option<i32>],
        column!(t => t.task().timeout_at) as &[Option<DateTime<Utc>>],
        column!(t => t.task().next_retry_at) as &[Option<DateTime<Utc>>],
        column!(t => t.task().started_at) as &[Option<DateTime<Utc>>],
        column!(t => t.task().ended_at) as &[Option<DateTime<Utc>>],
        column!(t => t.task().failure_type.map(FailureType::as_str)) as &[Option<&str>],
        column!(t => t.task().failure_reason.as_deref()) as &[Option<&str>],
        column!(t => t.task().manual_run) as &[Option<i32>],
        now,
    )
    .execute(tx.conn().await?)
    .await?
    .rows_affected();
    match usize::try_from(changed) {
        Ok(changed) if changed == transitions.len() => Ok(()),
        _ => Err(Error::Guard { expected: transitions.len(), changed: usize::try_from(changed).unwrap_or(0) }),
    }
}

fn count(tx: &mut Tx, transition: &Transition) {
    let task = transition.task();
    if transition.cause() == Cause::Manual && transition.from() != task.status {
        tx.count("task_retry_manual_total", vec![], 1);
    }
    let Some(attempt) = transition.attempt() else { return };
    if transition.cause() == Cause::Failed(Trigger::Timeout) {
        tx.count("reprise_task_timeouts_total", vec![], 1);
    }
    match (attempt.outcome, attempt.refusal) {
        (AttemptOutcome::Retried, _) => {
            let trigger = attempt.failure.as_ref().map_or("", |f| f.trigger.as_str()).to_owned();
            let labels = vec![("trigger", trigger), ("attempt", task.attempt.to_string())];
            tx.count("task_retry_total", labels, 1);
        }
        (AttemptOutcome::Deferred, _) => tx.count("task_retry_deferred_total", vec![], 1),
        (AttemptOutcome::Success, _) if attempt.attempt > 0 => tx.count("task_retry_succeeded_total", vec![], 1),
        (AttemptOutcome::Failed, Some(Final::Exhausted)) => tx.count("task_retry_exhausted_total", vec![], 1),
        (AttemptOutcome::Failed, Some(why)) if why != Final::NoPolicy => tx.count("task_retry_final_total", vec![], 1),
        _ => {}
    }
}

/// A row that one of the single statements has moved.
struct Moved {
    id: Uuid,
    batch_id: Uuid,
    run: i32,
    attempt: i16,
    last_updated: DateTime<Utc>,
}

impl Moved {
    fn note(&self, tx: &mut Tx, from: Status, to: Status, cause: &'static str, reason: Option<String>) {
        let Moved { id, batch_id, run, attempt, last_updated } = *self;
        tx.moved(id, Move { batch_id, from: Some(from), to, cause, run, attempt, reason }, last_updated);
    }
}

/// What came of writing that calls were answered.
#[derive(Debug, Default)]
pub struct Started {
    /// Those that somebody else has locked. Nothing was written about them.
    pub busy: HashSet<ClaimId>,
}

/// A call that was answered with 2xx, or needed none.
#[derive(Clone, Debug)]
pub struct StartedClaim {
    pub claim: ClaimId,
    /// What of the answer could not be taken, and why, for the audit trail.
    pub ignored: Option<String>,
}

/// Claimed → Running, for those that this instance still holds by this claim. Waits for nobody.
pub async fn started(tx: &mut Tx, starts: &[StartedClaim]) -> Result<Started> {
    let (now, by) = (tx.store.clock().param(), tx.store.instance());
    let mut claims: Vec<ClaimId> = starts.iter().map(|start| start.claim).collect();
    claims.sort_unstable();
    let (ids, numbers): (Vec<Uuid>, Vec<i32>) = claims.iter().copied().unzip();
    let rows = sqlx::query!(
        r#"with held as materialized (
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
            moved.note(tx, Status::Claimed, Status::Running, Cause::Start.as_str(), reason);
        }
    }
    Ok(Started { busy })
}

/// Claimed → Pending, for work that this instance gives back unstarted. What somebody else holds comes back when its lease
/// ends.
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
        moved.note(tx, Status::Claimed, Status::Pending, "given_back", None);
        for slot in row.slots.iter().flatten() {
            tx.slot(*slot, -1, -row.remaining);
        }
    }
    Ok(rows.len() as u64)
}

/// RetryPending → Pending for what is due, and tasks whose `run_at` has come into the queue.
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
        moved.note(tx, read_status(&row.from)?, Status::Pending, Cause::RetryDue.as_str(), None);
    }
    if !rows.is_empty() {
        tx.hint(Hints::START);
    }
    Ok(rows.len() as u64)
}
