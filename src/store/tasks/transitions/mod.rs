//! The only writer of `task.status` after a task is created. [`apply`] writes what the domain decided. Four transitions
//! need no decision: [`claim()`], [`started`], [`give_back`] and [`release_due`]. Each is one statement, except a claim
//! under rules. A test checks that each is a transition that the domain allows. Nothing here decides one.

mod claim;
mod give_back;
mod moved;
mod release_due;
mod started;

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use crate::domain::retry::Final;
use crate::domain::retry::failure::{FailureType, Trigger};
use crate::domain::task::Flags;
use crate::domain::task::lifecycle::{AttemptOutcome, Cause, Moment, Settled, Transition};
use crate::store::graph::dead_ends;
use crate::store::graph::propagate::propagate;
use crate::store::ledger::attempts;
use crate::store::ledger::events::Move;
use crate::store::{Error, Result, Tx, outbox};

pub use claim::{Claimed, Claims, claim, queue_age};
pub use give_back::give_back;
pub use release_due::{next_release, release_due};
pub use started::{Started, StartedClaim, started};

/// Writes transitions with all their effects, and the transitions that follow from them. The transaction must have
/// locked the tasks; `moment` is the moment of the decision.
pub async fn apply(tx: &mut Tx, transitions: &[Transition], moment: Moment) -> Result<()> {
    apply_outside(tx, transitions, None, moment).await
}

/// Writes transitions as [`apply`] does, while the batch is being stopped: its own tasks are not searched for dead
/// ends.
pub async fn apply_stop(tx: &mut Tx, batch_id: Uuid, transitions: &[Transition], moment: Moment) -> Result<()> {
    apply_outside(tx, transitions, Some(batch_id), moment).await
}

/// Writes transitions, and searches for dead ends outside the `stopped` batch.
async fn apply_outside(tx: &mut Tx, transitions: &[Transition], stopped: Option<Uuid>, moment: Moment) -> Result<()> {
    if transitions.is_empty() {
        return Ok(());
    }
    write(tx, transitions, moment.now).await?;
    let parents: Vec<Settled> = transitions
        .iter()
        .filter(|t| t.task().flags.has(Flags::HAS_CHILDREN))
        .filter_map(Transition::settled)
        .collect();
    let mut following = Vec::new();
    if !parents.is_empty() {
        let (transitions, moment) = propagate(tx, &parents, moment).await?;
        write(tx, &transitions, moment.now).await?;
        following = transitions;
    }
    let tells = |t: &&Transition| t.task().flags.has(Flags::TELLS_PARENTS) && t.ends_badly();
    let ended: Vec<Uuid> = transitions.iter().chain(&following).filter(tells).map(|t| t.task().id).collect();
    if !ended.is_empty() {
        // A dead end has no alive child. So its cancellation affects only its parents, and those are among the dead
        // ends.
        let (canceled, moment) = dead_ends::find(tx, &ended, stopped, moment).await?;
        write(tx, &canceled, moment.now).await?;
    }
    Ok(())
}

/// Writes transitions with their effects on slots, attempts, notifications and counters.
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

/// Releases the slots of tasks that stop executing, with the work that each has left by now.
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

/// Updates the rows of the tasks, and fails if one is not in the status and run that was decided on.
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

/// Counts a transition in the metrics.
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
