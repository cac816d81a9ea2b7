//! The whole state machine. `decide` is the only maker of a [`Transition`], and a transition is the only
//! thing the store accepts as a change of status; [`Settled`] is the only thing that moves children.

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use super::retry::{self, Failure, FailureType, Final, Trigger, Verdict};
use super::status::{Outcome, Status};
use super::task::Task;

/// What happened to a task.
#[derive(Clone, Debug)]
pub enum Event {
    /// `count` parents have become terminal; `doomed`: a required one of them badly.
    ParentsSettled {
        count: i32,
        doomed: bool,
    },
    Claimed {
        by: Uuid,
        lease: TimeDelta,
    },
    /// `on_start` was answered with 2xx, or there is none.
    Started {
        by: Uuid,
    },
    /// `on_start` was not answered with 2xx.
    StartFailed {
        by: Uuid,
        failure: Failure,
    },
    LeaseRanOut,
    TimedOut,
    Reported(Report),
    RetryDue,
    Canceled,
    Paused,
    Resumed,
}

/// What a worker says about a run. Without `run`, about the current one.
#[derive(Clone, Debug)]
pub struct Report {
    pub run: Option<i32>,
    pub result: Result<(), Failure>,
}

/// Everything a decision needs that the task itself does not hold.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    pub now: DateTime<Utc>,
    /// A random number from 0 up to 1.
    pub jitter: f64,
}

/// The event does not fit the state of the task. Nothing may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// Why a status changed, for the history and the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    Parents,
    Dependency,
    Claim,
    Start,
    LeaseRanOut,
    Failed(Trigger),
    Report,
    RetryDue,
    Cancel,
    Pause,
    Resume,
}

impl Cause {
    pub const fn as_str(self) -> &'static str {
        match self {
            Cause::Parents => "parents",
            Cause::Dependency => "dependency",
            Cause::Claim => "claim",
            Cause::Start => "start",
            Cause::LeaseRanOut => "lease_ran_out",
            Cause::Failed(trigger) => trigger.as_str(),
            Cause::Report => "report",
            Cause::RetryDue => "retry_due",
            Cause::Cancel => "cancel",
            Cause::Pause => "pause",
            Cause::Resume => "resume",
        }
    }
}

/// A change that `decide` allowed: the row as it was, the row as it will be, and what goes with it.
#[derive(Clone, Debug)]
pub struct Transition {
    from: Status,
    from_run: i32,
    task: Task,
    cause: Cause,
    attempt: Option<Attempt>,
    notice: Option<Notice>,
}

impl Transition {
    pub fn from(&self) -> Status {
        self.from
    }

    pub fn from_run(&self) -> i32 {
        self.from_run
    }

    /// The task as it will be.
    pub fn task(&self) -> &Task {
        &self.task
    }

    pub fn cause(&self) -> Cause {
        self.cause
    }

    pub fn attempt(&self) -> Option<&Attempt> {
        self.attempt.as_ref()
    }

    pub fn notice(&self) -> Option<Notice> {
        self.notice
    }

    /// What this change tells the children, if it is one that may tell them anything.
    pub fn settled(&self) -> Option<Settled> {
        let outcome = self.task.status.outcome()?;
        Some(Settled { id: self.task.id, outcome })
    }
}

/// A task whose fate is final. Can only be had from a transition to a terminal status.
#[derive(Clone, Copy, Debug)]
pub struct Settled {
    id: Uuid,
    outcome: Outcome,
}

impl Settled {
    pub fn id(self) -> Uuid {
        self.id
    }

    pub fn outcome(self) -> Outcome {
        self.outcome
    }
}

/// A notification that goes with a transition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    Success,
    Failure,
    Cancel,
}

/// The record of one execution, made when it ends.
#[derive(Clone, Debug, PartialEq)]
pub struct Attempt {
    pub run: i32,
    pub attempt: i16,
    pub instance: Option<Uuid>,
    pub started_at: Option<DateTime<Utc>>,
    pub ended_at: DateTime<Utc>,
    pub outcome: AttemptOutcome,
    pub cause: Cause,
    pub failure: Option<Failure>,
    pub delay_ms: Option<u64>,
    pub jitter_ms: Option<u64>,
    pub next_retry_at: Option<DateTime<Utc>>,
    pub reason: String,
    /// It failed because the retries are used up, not because none was allowed.
    pub exhausted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptOutcome {
    Success,
    Retried,
    Failed,
    Canceled,
}

impl AttemptOutcome {
    pub fn parse(text: &str) -> Option<AttemptOutcome> {
        use AttemptOutcome::{Canceled, Failed, Retried, Success};
        [Success, Retried, Failed, Canceled].into_iter().find(|outcome| outcome.as_str() == text)
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            AttemptOutcome::Success => "success",
            AttemptOutcome::Retried => "retried",
            AttemptOutcome::Failed => "failed",
            AttemptOutcome::Canceled => "canceled",
        }
    }
}

/// `Ok(Some)`: do this. `Ok(None)`: it already is so, nothing to do. `Err`: it may not be.
pub type Decision = Result<Option<Transition>, Refused>;

pub fn decide(task: &Task, event: &Event, moment: Moment) -> Decision {
    match event {
        Event::ParentsSettled { count, doomed } => parents_settled(task, *count, *doomed, moment),
        Event::Claimed { by, lease } => {
            need(task.status == Status::Pending)?;
            let mut after = task.clone();
            after.status = Status::Claimed;
            after.claimed_by = Some(*by);
            after.claimed_run = Some(task.run);
            after.timeout_at = Some(moment.now + *lease);
            change(task, after, Cause::Claim, None)
        }
        Event::Started { by } => {
            need(task.status == Status::Claimed && task.claimed_by == Some(*by))?;
            let mut after = task.clone();
            after.status = Status::Running;
            after.started_at = Some(moment.now);
            after.timeout_at = Some(moment.now + TimeDelta::seconds(i64::from(task.timeout_secs)));
            change(task, after, Cause::Start, None)
        }
        Event::StartFailed { by, failure } => {
            need(task.status == Status::Claimed && task.claimed_by == Some(*by))?;
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
            let failure = Failure {
                trigger: Trigger::Timeout,
                failure_type: FailureType::Timeout,
                reason: format!("no sign of life for {} s", task.timeout_secs),
                http_status: None,
            };
            fail(task, &failure, Cause::Failed(Trigger::Timeout), moment)
        }
        Event::Reported(report) => reported(task, report, moment),
        Event::RetryDue => {
            need(task.status == Status::RetryPending && task.next_retry_at.is_some_and(|at| at <= moment.now))?;
            change(task, back_in_line(task), Cause::RetryDue, None)
        }
        Event::Canceled => canceled(task, moment),
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
    }
}

/// Does `report` only say again what the record of its run holds? Then it took effect before, and repeating it
/// is fine although the task has moved on. A report without a run can repeat only the run before the current one.
pub fn repeats(task: &Task, report: &Report, recorded: Option<(i32, AttemptOutcome, bool)>) -> bool {
    let about = report.run.unwrap_or(task.run - 1);
    let Some((run, outcome, by_report)) = recorded else { return false };
    let same = match outcome {
        AttemptOutcome::Success => report.result.is_ok(),
        AttemptOutcome::Retried | AttemptOutcome::Failed => report.result.is_err(),
        AttemptOutcome::Canceled => false,
    };
    let moved_on = report.run.is_some() || !task.status.is_executing() && !task.status.is_terminal();
    run == about && by_report && same && moved_on
}

fn need(condition: bool) -> Result<(), Refused> {
    if condition { Ok(()) } else { Err(Refused) }
}

#[allow(clippy::unnecessary_wraps, reason = "it ends every branch of a decision")]
fn change(before: &Task, after: Task, cause: Cause, attempt: Option<Attempt>) -> Decision {
    let notice = match after.status.outcome() {
        Some(Outcome::Success) => Some(Notice::Success),
        Some(Outcome::Failure) => Some(Notice::Failure),
        Some(Outcome::Canceled) if before.status.is_executing() => Some(Notice::Cancel),
        Some(Outcome::Canceled) | None => None,
    };
    Ok(Some(Transition { from: before.status, from_run: before.run, task: after, cause, attempt, notice }))
}

/// Leaves Claimed or Running: nobody holds the task any more.
fn release(task: &mut Task) {
    task.claimed_by = None;
    task.timeout_at = None;
}

fn end(task: &mut Task, status: Status, now: DateTime<Utc>) {
    release(task);
    task.status = status;
    task.ended_at = Some(now);
    task.next_retry_at = None;
}

/// The state in which a task waits for its next execution: what the last one left behind is reset,
/// its counters and the attempt number are kept.
fn back_in_line(task: &Task) -> Task {
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
        // A task that has ended keeps its record; one that runs cannot have an open parent.
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
        // Its lease ran out, but the worker had got it: finished work is not done twice.
        (Status::Pending, _) => need(report.run == Some(task.run) && task.claimed_run == Some(task.run))?,
        _ => return Err(Refused),
    }
    if let Err(failure) = &report.result {
        return fail(task, failure, Cause::Report, moment);
    }
    let mut after = task.clone();
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
    match retry::judge(task.retry.as_ref(), failure, task.attempt, moment.now, moment.jitter) {
        Verdict::Retry { delay_ms, jitter_ms, at } => {
            release(&mut after);
            after.status = Status::RetryPending;
            after.attempt += 1;
            after.run += 1;
            after.next_retry_at = Some(at);
            record.outcome = AttemptOutcome::Retried;
            record.delay_ms = Some(delay_ms);
            record.jitter_ms = Some(jitter_ms);
            record.next_retry_at = Some(at);
            record.reason = format!(
                "retry {} of {} in {delay_ms} ms and {jitter_ms} ms of jitter",
                after.attempt,
                task.retry.as_ref().map_or(0, |p| p.max_retries),
            );
        }
        Verdict::Final(why) => {
            end(&mut after, Status::Failure, moment.now);
            record.outcome = AttemptOutcome::Failed;
            record.reason = why.explain(task.retry.as_ref());
            record.exhausted = why == Final::Exhausted;
        }
    }
    change(task, after, cause, Some(record))
}

fn canceled(task: &Task, moment: Moment) -> Decision {
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
    let record = task.status.is_executing().then(|| Attempt {
        outcome: AttemptOutcome::Canceled,
        reason: "canceled, and so never retried".into(),
        ..record(task, Cause::Cancel, moment.now)
    });
    change(task, after, Cause::Cancel, record)
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
        back_in_line(task)
    };
    change(task, after, Cause::Resume, None)
}

fn record(task: &Task, cause: Cause, now: DateTime<Utc>) -> Attempt {
    Attempt {
        run: task.run,
        attempt: task.attempt,
        instance: task.claimed_by,
        started_at: task.started_at,
        ended_at: now,
        outcome: AttemptOutcome::Failed,
        cause,
        failure: None,
        delay_ms: None,
        jitter_ms: None,
        next_retry_at: None,
        reason: String::new(),
        exhausted: false,
    }
}

#[cfg(test)]
#[path = "lifecycle_tests.rs"]
mod tests;
