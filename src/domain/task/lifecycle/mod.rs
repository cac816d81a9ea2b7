//! The state machine of a task. Only [`decide`] makes a [`Transition`], the store changes a status only by a
//! transition, and only a [`Settled`] moves children.

mod cause;
mod record;
mod transition;

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use super::Task;
use super::status::Status;
use crate::domain::retry::failure::{Failure, FailureType, Trigger};
use crate::domain::retry::{self, Final, RetryContext, RetryDecision};

pub use cause::Cause;
pub use record::{Attempt, AttemptOutcome, RetryType};
pub use transition::{Notice, Settled, Transition};

/// An event in the life of a task.
#[derive(Clone, Debug)]
pub enum Event {
    /// `count` parents have ended. `doomed` says that one of them was required and ended badly.
    ParentsSettled {
        count: i32,
        doomed: bool,
    },
    Claimed {
        by: Uuid,
        lease: TimeDelta,
    },
    /// `on_start` was answered with 2xx, or the task has none.
    Started {
        by: Uuid,
        claim: i32,
    },
    /// `on_start` was not answered with 2xx.
    StartFailed {
        by: Uuid,
        claim: i32,
        failure: Failure,
    },
    LeaseRanOut,
    TimedOut,
    Reported(Report),
    RetryDue,
    /// A request ended the task. `reason` says which, and on whose behalf.
    Canceled {
        reason: String,
    },
    /// No child of the task is alive any more, and one of them has ended badly.
    DeadEnd,
    Paused,
    Resumed,
    /// A manual retry. `wait_count` parents are open. An execution without a heartbeat for `stuck_after` is given up.
    RetriedManually {
        wait_count: i32,
        stuck_after: TimeDelta,
    },
    /// The parent because of which the task failed is being retried. `wait_count` parents are open.
    Revived {
        wait_count: i32,
    },
    /// `count` parents that had ended are open again.
    ParentsReopened {
        count: i32,
    },
}

/// The result of a run, as its worker reports it. Without `run`, the result of the current run.
#[derive(Clone, Debug)]
pub struct Report {
    pub run: Option<i32>,
    pub result: Result<(), Failure>,
}

/// The inputs of a decision besides the task and the event.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    pub now: DateTime<Utc>,
    pub jitter: Jitter,
    pub limits: retry::RetryLimits,
}

impl Moment {
    /// Moves the time to that of `other` if it is later: of several row locks, the last one counts.
    #[must_use]
    pub fn not_before(self, other: Moment) -> Moment {
        Moment { now: self.now.max(other.now), ..self }
    }
}

/// The source of the jitter of retries.
#[derive(Clone, Copy, Debug)]
pub enum Jitter {
    /// A random number from 0 up to 1 for a whole transaction. Each task adds an offset of its own, so that tasks that
    /// fail together are not retried together.
    Spread(f64),
    /// A fixed share of the jitter that the policy allows, for every task.
    Exactly(f64),
}

/// The state of the task does not allow the event. Nothing may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// `Ok(Some)`: make this change. `Ok(None)`: nothing to change. `Err`: the event is not allowed.
pub type Decision = Result<Option<Transition>, Refused>;

/// Decides what an event changes about a task.
pub fn decide(task: &Task, event: &Event, moment: Moment) -> Decision {
    match event {
        Event::ParentsSettled { count, doomed } => parents_settled(task, *count, *doomed, moment),
        Event::Claimed { by, lease } => {
            need(task.status == Status::Pending)?;
            let mut after = task.clone();
            after.status = Status::Claimed;
            after.claimed_by = Some(*by);
            after.claimed_run = Some(task.run);
            after.claim += 1;
            after.wait_count = 0;
            after.timeout_at = Some(moment.now + *lease);
            change(task, after, Cause::Claim, None)
        }
        Event::Started { by, claim } => {
            need(task.status == Status::Claimed && task.claimed_by == Some(*by) && task.claim == *claim)?;
            let mut after = task.clone();
            after.status = Status::Running;
            after.started_at = Some(moment.now);
            after.timeout_at = Some(moment.now + TimeDelta::seconds(i64::from(task.timeout_secs)));
            change(task, after, Cause::Start, None)
        }
        Event::StartFailed { by, claim, failure } => {
            need(task.status == Status::Claimed && task.claimed_by == Some(*by) && task.claim == *claim)?;
            fail(task, failure, Cause::Failed(failure.trigger), moment)
        }
        Event::LeaseRanOut => {
            need(task.status == Status::Claimed && task.timeout_at.is_some_and(|at| at <= moment.now))?;
            let mut after = task.clone();
            after.status = Status::Pending;
            release(&mut after);
            change(task, after, Cause::LeaseRanOut, None)
        }
        Event::TimedOut => {
            need(task.status == Status::Running && task.timeout_at.is_some_and(|at| at <= moment.now))?;
            need(!task.has_heartbeat(moment.now))?;
            let failure = Failure {
                trigger: Trigger::Timeout,
                failure_type: FailureType::Timeout,
                reason: format!("no heartbeat for {} s", task.timeout_secs),
                http_status: None,
                retry_after: None,
            };
            fail(task, &failure, Cause::Failed(Trigger::Timeout), moment)
        }
        Event::Reported(report) => reported(task, report, moment),
        Event::RetryDue => {
            need(task.status == Status::RetryPending && task.next_retry_at.is_some_and(|at| at <= moment.now))?;
            change(task, requeued(task), Cause::RetryDue, None)
        }
        Event::Canceled { reason } => canceled(task, Cause::Cancel, reason, moment),
        Event::DeadEnd => {
            canceled(task, Cause::DeadEnd, "canceled as a dead end: no task that depends on it is alive", moment)
        }
        Event::Paused => match task.status {
            Status::Paused => Ok(None),
            Status::Pending | Status::Waiting | Status::RetryPending => {
                let mut after = task.clone();
                after.status = Status::Paused;
                change(task, after, Cause::Pause, None)
            }
            Status::Claimed | Status::Running | Status::Success | Status::Failure | Status::Canceled => Err(Refused),
        },
        Event::Resumed => resumed(task, moment),
        Event::RetriedManually { wait_count, stuck_after } => retried_manually(task, *wait_count, *stuck_after, moment),
        Event::Revived { wait_count } => {
            need(task.status == Status::Failure && task.failure_type == Some(FailureType::Dependency))?;
            let mut after = reset(task, *wait_count);
            after.run += 1;
            after.manual_run = Some(after.run);
            change(task, after, Cause::Manual, None)
        }
        Event::ParentsReopened { count } => {
            // A queued task stays in the queue, but counts its open parents again, in case it is paused.
            let queued = matches!(task.status, Status::Pending | Status::Paused);
            need(task.status == Status::Waiting || queued && !task.has_begun())?;
            let after = Task { wait_count: task.wait_count + count, ..task.clone() };
            change(task, after, Cause::Manual, None)
        }
    }
}

/// Whether `report` only repeats what the record of its run holds. Such a report took effect before and is accepted,
/// although the task has moved on. A report without a run can repeat only the run before the current one.
pub fn repeats(task: &Task, report: &Report, recorded: Option<(i32, AttemptOutcome, bool)>) -> bool {
    let about = report.run.unwrap_or(task.run - 1);
    let Some((run, outcome, by_report)) = recorded else { return false };
    let same = match outcome {
        AttemptOutcome::Success => report.result.is_ok(),
        AttemptOutcome::Retried | AttemptOutcome::Deferred | AttemptOutcome::Failed => report.result.is_err(),
        AttemptOutcome::Canceled | AttemptOutcome::Lost => false,
    };
    let moved_on = report.run.is_some() || !task.status.is_executing() && !task.status.is_terminal();
    run == about && by_report && same && moved_on
}

fn need(condition: bool) -> Result<(), Refused> {
    if condition { Ok(()) } else { Err(Refused) }
}

#[allow(clippy::unnecessary_wraps, reason = "it ends every branch of a decision")]
fn change(before: &Task, after: Task, cause: Cause, attempt: Option<Attempt>) -> Decision {
    Ok(Some(Transition::new(before, after, cause, attempt)))
}

/// Takes the task from its holder and frees its slots, as it leaves Claimed or Running.
fn release(task: &mut Task) {
    task.claimed_by = None;
    task.timeout_at = None;
    task.slots = Vec::new();
}

fn end(task: &mut Task, status: Status, now: DateTime<Utc>) {
    release(task);
    task.status = status;
    task.ended_at = Some(now);
    task.next_retry_at = None;
}

/// Returns the task as it waits for its next execution. The traces of the last execution are reset; `attempt`, `run`
/// and the counters stay.
fn requeued(task: &Task) -> Task {
    Task {
        status: Status::Pending,
        started_at: None,
        ended_at: None,
        next_retry_at: None,
        failure_type: None,
        failure_reason: None,
        ..task.clone()
    }
}

fn parents_settled(task: &Task, count: i32, doomed: bool, moment: Moment) -> Decision {
    match task.status {
        Status::Waiting | Status::Paused => {}
        // The task was queued before one of its parents was retried manually. It only keeps count.
        Status::Pending if task.wait_count > 0 && !doomed => {}
        // A task that has ended stays as it is. One that is being executed does not need the count.
        Status::Success | Status::Failure | Status::Canceled => return Ok(None),
        Status::Pending | Status::Claimed | Status::Running | Status::RetryPending => return Err(Refused),
    }
    let mut after = task.clone();
    after.wait_count = (task.wait_count - count).max(0);
    if doomed {
        end(&mut after, Status::Failure, moment.now);
        after.failure_type = Some(FailureType::Dependency);
        after.failure_reason = Some("a task it depends on did not succeed".into());
        return change(task, after, Cause::Dependency, None);
    }
    if task.status == Status::Waiting && after.wait_count == 0 {
        after.status = Status::Pending;
    }
    change(task, after, Cause::Parents, None)
}

fn reported(task: &Task, report: &Report, moment: Moment) -> Decision {
    let current = report.run.is_none_or(|run| run == task.run);
    match (task.status, &report.result) {
        (Status::Success, Ok(())) | (Status::Failure, Err(_)) if current => return Ok(None),
        (Status::Claimed | Status::Running, _) => need(current)?,
        // The lease ran out after the worker had received the task. Finished work is not repeated.
        (Status::Pending, _) => need(report.run == Some(task.run) && task.claimed_run == Some(task.run))?,
        _ => return Err(Refused),
    }
    if let Err(failure) = &report.result {
        return fail(task, failure, Cause::Report, moment);
    }
    let mut after = task.clone();
    after.started_at = began(task);
    end(&mut after, Status::Success, moment.now);
    after.failure_type = None;
    after.failure_reason = None;
    let record = Attempt {
        outcome: AttemptOutcome::Success,
        reason: "the worker reported success".into(),
        ..record(task, Cause::Report, moment.now)
    };
    change(task, after, Cause::Report, Some(record))
}

fn fail(task: &Task, failure: &Failure, cause: Cause, moment: Moment) -> Decision {
    let mut after = task.clone();
    after.failure_type = Some(failure.failure_type);
    after.failure_reason = Some(failure.reason.clone());
    let mut record = Attempt { failure: Some(failure.clone()), ..record(task, cause, moment.now) };
    let context = RetryContext {
        attempt: task.attempt,
        deferrals: task.deferrals,
        created_at: task.created_at,
        now: moment.now,
        jitter: moment.jitter.share_of(task),
        limits: moment.limits,
    };
    let judgement = retry::judge(task.retry.as_ref(), failure, context);
    record.reason = judgement.reason;
    match judgement.decision {
        RetryDecision::Retry { delay_ms, jitter_ms, at } => {
            schedule(&mut after, at);
            after.attempt += 1;
            record.outcome = AttemptOutcome::Retried;
            record.delay_ms = Some(delay_ms);
            record.jitter_ms = Some(jitter_ms);
            record.next_retry_at = Some(at);
        }
        RetryDecision::Defer { delay_ms, at } => {
            schedule(&mut after, at);
            after.deferrals += 1;
            record.outcome = AttemptOutcome::Deferred;
            record.delay_ms = Some(delay_ms);
            record.jitter_ms = Some(0);
            record.next_retry_at = Some(at);
        }
        RetryDecision::Final(why) => {
            end(&mut after, Status::Failure, moment.now);
            if why == Final::Expired {
                after.failure_reason = Some(format!("{} ({})", failure.reason, record.reason));
            }
            record.outcome = AttemptOutcome::Failed;
            record.refusal = Some(why);
        }
    }
    change(task, after, cause, Some(record))
}

impl Jitter {
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "only the spread counts")]
    fn share_of(self, task: &Task) -> f64 {
        let unit = match self {
            Jitter::Exactly(unit) => return unit,
            Jitter::Spread(unit) => unit,
        };
        let own = task.id.as_u128() as u64 ^ u64::from(task.run.cast_unsigned());
        let mixed = own.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (unit + (mixed >> 11) as f64 / (1u64 << 53) as f64).fract()
    }
}

fn schedule(task: &mut Task, at: DateTime<Utc>) {
    release(task);
    task.status = Status::RetryPending;
    task.run += 1;
    task.next_retry_at = Some(at);
}

/// Returns the task as if it had never been executed, waiting for `wait_count` open parents.
fn reset(task: &Task, wait_count: i32) -> Task {
    let mut after = requeued(task);
    release(&mut after);
    after.status = if wait_count > 0 { Status::Waiting } else { Status::Pending };
    after.wait_count = wait_count;
    after.attempt = 0;
    after.deferrals = 0;
    after
}

fn retried_manually(task: &Task, wait_count: i32, stuck_after: TimeDelta, moment: Moment) -> Decision {
    let mut after = reset(task, wait_count);
    let mut lost = None;
    match task.status {
        Status::Failure | Status::Canceled => after.run += 1,
        // `run` rose when the retry was scheduled. The manual retry replaces that one.
        Status::RetryPending => {}
        Status::Claimed | Status::Running => {
            need(task.last_updated + stuck_after <= moment.now)?;
            after.run += 1;
            lost = Some(Attempt {
                outcome: AttemptOutcome::Lost,
                reason: format!("given up by a manual retry; no heartbeat since {}", task.last_updated),
                ..record(task, Cause::Manual, moment.now)
            });
        }
        Status::Pending | Status::Waiting if task.manual_run == Some(task.run) => return Ok(None),
        Status::Pending | Status::Waiting | Status::Paused | Status::Success => return Err(Refused),
    }
    after.manual_run = Some(after.run);
    change(task, after, Cause::Manual, lost)
}

fn canceled(task: &Task, cause: Cause, reason: &str, moment: Moment) -> Decision {
    match task.status {
        Status::Canceled => return Ok(None),
        Status::Success | Status::Failure => return Err(Refused),
        Status::Waiting
        | Status::Pending
        | Status::Claimed
        | Status::Running
        | Status::RetryPending
        | Status::Paused => {}
    }
    let mut after = task.clone();
    end(&mut after, Status::Canceled, moment.now);
    after.failure_type = None;
    after.failure_reason = Some(reason.to_owned());
    let record = task.status.is_executing().then(|| Attempt {
        outcome: AttemptOutcome::Canceled,
        reason: reason.into(),
        ..record(task, cause, moment.now)
    });
    change(task, after, cause, record)
}

fn resumed(task: &Task, moment: Moment) -> Decision {
    if task.status.is_terminal() {
        return Err(Refused);
    }
    if task.status != Status::Paused {
        return Ok(None);
    }
    let after = if task.wait_count > 0 {
        Task { status: Status::Waiting, ..task.clone() }
    } else if task.next_retry_at.is_some_and(|at| at > moment.now) {
        Task { status: Status::RetryPending, ..task.clone() }
    } else {
        requeued(task)
    };
    change(task, after, Cause::Resume, None)
}

/// Returns when the execution began. An execution that did not reach Running began with its claim, its last change.
fn began(task: &Task) -> Option<DateTime<Utc>> {
    task.started_at.or((task.status == Status::Claimed).then_some(task.last_updated))
}

fn record(task: &Task, cause: Cause, now: DateTime<Utc>) -> Attempt {
    Attempt {
        run: task.run,
        attempt: task.attempt,
        instance: task.claimed_by,
        started_at: began(task),
        ended_at: began(task).map_or(now, |began| now.max(began)),
        outcome: AttemptOutcome::Failed,
        cause,
        failure: None,
        delay_ms: None,
        jitter_ms: None,
        next_retry_at: None,
        reason: String::new(),
        retry_type: match (task.run, task.manual_run) {
            (run, Some(manual)) if run == manual => Some(RetryType::Manual),
            (0, _) => None,
            _ => Some(RetryType::Automatic),
        },
        refusal: None,
    }
}

#[cfg(test)]
mod tests;
