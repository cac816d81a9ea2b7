use super::*;
use crate::domain::sample::{ATTEMPT, CLAIM, INSTANCE, OTHER_INSTANCE, RUN, at, failure, moment, policy, task};

mod deferrals;
mod manual;
mod reports;
mod walk;

fn broke() -> Failure {
    failure(Trigger::Explicit, FailureType::Unknown)
}

fn report(run: Option<i32>, result: Result<(), Failure>) -> Event {
    Event::Reported(Report { run, result })
}

/// Returns the transition that the event must cause.
fn changed(task: &Task, event: &Event, moment: Moment) -> Transition {
    let decision = decide(task, event, moment);
    let Ok(Some(transition)) = decision else { panic!("{event:?} on {task:?} gave {decision:?}") };
    check(task, event, &transition);
    transition
}

fn refused(task: &Task, event: &Event, moment: Moment) -> bool {
    matches!(decide(task, event, moment), Err(Refused))
}

/// Checks the invariants of every transition.
fn check(before: &Task, event: &Event, transition: &Transition) {
    let after = transition.task();
    let status = after.status;
    let manual = matches!(event, Event::RetriedManually { .. });
    let is_reset = manual || matches!(event, Event::Revived { .. });
    assert_eq!((transition.from(), transition.from_run()), (before.status, before.run));
    assert!(!before.status.is_terminal() || is_reset, "only a manual retry changes a terminal task: {transition:?}");
    assert!(!is_reset || matches!(status, Status::Pending | Status::Waiting), "{transition:?}");

    assert_eq!(after.ended_at.is_some(), status.is_terminal(), "{transition:?}");
    assert_eq!(after.claimed_by.is_some(), status.is_executing(), "{transition:?}");
    assert_eq!(after.timeout_at.is_some(), status.is_executing(), "{transition:?}");
    match status {
        Status::RetryPending => assert!(after.next_retry_at.is_some(), "{transition:?}"),
        Status::Paused => {}
        _ => assert_eq!(after.next_retry_at, None, "{transition:?}"),
    }

    let settled = transition.settled().map(|s| (s.id(), s.outcome()));
    assert_eq!(settled, status.outcome().map(|outcome| (before.id, outcome)));
    assert!(status != Status::RetryPending || settled.is_none());
    let scheduled = status == Status::RetryPending && before.status != Status::Paused;
    let notice = match status {
        Status::Success => Some(Notice::Success),
        Status::Failure => Some(Notice::Failure),
        Status::Canceled if before.status.is_executing() => Some(Notice::Cancel),
        Status::RetryPending if scheduled => Some(Notice::Retry),
        _ => None,
    };
    assert_eq!(transition.notice(), notice);

    let record = transition.attempt();
    let deferred = record.is_some_and(|record| record.outcome == AttemptOutcome::Deferred);
    assert!(!deferred || scheduled, "{transition:?}");
    let (attempt, deferrals) = match (is_reset, scheduled) {
        (true, _) => (0, 0),
        (false, true) if deferred => (before.attempt, before.deferrals + 1),
        (false, scheduled) => (before.attempt + i16::from(scheduled), before.deferrals),
    };
    assert_eq!((after.attempt, after.deferrals), (attempt, deferrals), "{transition:?}");
    let again = scheduled || is_reset && before.status != Status::RetryPending;
    assert_eq!(after.run, before.run + i32::from(again), "{transition:?}");
    assert_eq!(after.manual_run, if is_reset { Some(after.run) } else { before.manual_run });

    let given_back = matches!(event, Event::LeaseRanOut);
    if before.status.is_executing() && !status.is_executing() && !given_back {
        assert!(record.is_some(), "the end of an execution is recorded: {transition:?}");
    }
    if let Some(record) = record {
        assert_eq!((record.run, record.attempt), (before.run, before.attempt));
        assert_eq!((record.instance, record.started_at), (before.claimed_by, began(before)));
        assert_eq!(record.outcome == AttemptOutcome::Failed, record.refusal.is_some(), "{transition:?}");
        assert_eq!(record.outcome == AttemptOutcome::Lost, manual, "{transition:?}");
        assert_eq!(record.next_retry_at, after.next_retry_at);
        assert!(!record.reason.is_empty());
    }
    let untouched = Task {
        id: before.id,
        batch_id: before.batch_id,
        kind: before.kind.clone(),
        flags: before.flags,
        timeout_secs: before.timeout_secs,
        created_at: before.created_at,
        last_updated: before.last_updated,
        retry: before.retry.clone(),
        ..after.clone()
    };
    assert_eq!(*after, untouched);
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Cell {
    To(Status),
    Nothing,
    Refused,
}

/// Declares the rows and a match over their patterns without a wildcard, so an event without a row does not compile. A
/// row has one cell per status, so a new status without a column does not compile either.
macro_rules! table {
    ($($pattern:pat, $event:expr => $cells:expr;)*) => {
        fn table() -> Vec<(Event, [Cell; Status::ALL.len()])> {
            vec![$(($event, $cells)),*]
        }

        fn has_a_row(event: &Event) -> bool {
            match event { $($pattern => true,)* }
        }
    };
}

const WAI: Cell = Cell::To(Status::Waiting);
const PEN: Cell = Cell::To(Status::Pending);
const CLA: Cell = Cell::To(Status::Claimed);
const RNG: Cell = Cell::To(Status::Running);
const RET: Cell = Cell::To(Status::RetryPending);
const PAU: Cell = Cell::To(Status::Paused);
const SUC: Cell = Cell::To(Status::Success);
const FAI: Cell = Cell::To(Status::Failure);
const CAN: Cell = Cell::To(Status::Canceled);
/// Nothing to change.
const SAM: Cell = Cell::Nothing;
const NO_: Cell = Cell::Refused;

// Columns:  waiting, pending, claimed, running, retry_pending, paused, success, failure, canceled
table! {
    Event::ParentsSettled { doomed: false, .. }, Event::ParentsSettled { count: 1, doomed: false }
        => [PEN, NO_, NO_, NO_, NO_, PAU, SAM, SAM, SAM];
    Event::ParentsSettled { doomed: true, .. }, Event::ParentsSettled { count: 1, doomed: true }
        => [FAI, NO_, NO_, NO_, NO_, FAI, SAM, SAM, SAM];
    Event::Claimed { .. }, Event::Claimed { by: INSTANCE, lease: TimeDelta::seconds(9) }
        => [NO_, CLA, NO_, NO_, NO_, NO_, NO_, NO_, NO_];
    Event::Started { .. }, Event::Started { by: INSTANCE, claim: CLAIM }
        => [NO_, NO_, RNG, NO_, NO_, NO_, NO_, NO_, NO_];
    Event::StartFailed { .. }, Event::StartFailed { by: INSTANCE, claim: CLAIM, failure: refusal() }
        => [NO_, NO_, RET, NO_, NO_, NO_, NO_, NO_, NO_];
    Event::LeaseRanOut, Event::LeaseRanOut
        => [NO_, NO_, PEN, NO_, NO_, NO_, NO_, NO_, NO_];
    Event::TimedOut, Event::TimedOut
        => [NO_, NO_, NO_, RET, NO_, NO_, NO_, NO_, NO_];
    Event::Reported(Report { run: None, result: Ok(()) }), report(None, Ok(()))
        => [NO_, NO_, SUC, SUC, NO_, NO_, SAM, NO_, NO_];
    Event::Reported(Report { run: None, result: Err(_) }), report(None, Err(broke()))
        => [NO_, NO_, RET, RET, NO_, NO_, NO_, SAM, NO_];
    Event::Reported(Report { run: Some(RUN), result: Ok(()) }), report(Some(RUN), Ok(()))
        => [NO_, NO_, SUC, SUC, NO_, NO_, SAM, NO_, NO_];
    Event::Reported(Report { run: Some(RUN), result: Err(_) }), report(Some(RUN), Err(broke()))
        => [NO_, NO_, RET, RET, NO_, NO_, NO_, SAM, NO_];
    Event::Reported(Report { run: Some(_), result: Ok(()) }), report(Some(RUN - 1), Ok(()))
        => [NO_, NO_, NO_, NO_, NO_, NO_, NO_, NO_, NO_];
    Event::Reported(Report { run: Some(_), result: Err(_) }), report(Some(RUN + 1), Err(broke()))
        => [NO_, NO_, NO_, NO_, NO_, NO_, NO_, NO_, NO_];
    Event::RetryDue, Event::RetryDue
        => [NO_, NO_, NO_, NO_, PEN, NO_, NO_, NO_, NO_];
    Event::Canceled { .. }, Event::Canceled { reason: "canceled by ada".into() }
        => [CAN, CAN, CAN, CAN, CAN, CAN, NO_, NO_, SAM];
    Event::DeadEnd, Event::DeadEnd
        => [CAN, CAN, CAN, CAN, CAN, CAN, NO_, NO_, SAM];
    Event::Paused, Event::Paused
        => [PAU, PAU, NO_, NO_, PAU, SAM, NO_, NO_, NO_];
    Event::Resumed, Event::Resumed
        => [SAM, SAM, SAM, SAM, SAM, PEN, NO_, NO_, NO_];
    // The last heartbeat of the samples is 30 s old.
    Event::RetriedManually { wait_count: 0, .. }, manual_retry(0, 30)
        => [NO_, NO_, PEN, PEN, PEN, NO_, NO_, PEN, PEN];
    Event::RetriedManually { .. }, manual_retry(2, 31)
        => [NO_, NO_, NO_, NO_, WAI, NO_, NO_, WAI, WAI];
    Event::Revived { .. }, Event::Revived { wait_count: 1 }
        => [NO_, NO_, NO_, NO_, NO_, NO_, NO_, NO_, NO_];
    Event::ParentsReopened { .. }, Event::ParentsReopened { count: 1 }
        => [WAI, NO_, NO_, NO_, NO_, NO_, NO_, NO_, NO_];
}

/// A manual retry of a task with `wait_count` open parents. An execution is stuck after `stuck_after` seconds.
fn manual_retry(wait_count: i32, stuck_after: i64) -> Event {
    Event::RetriedManually { wait_count, stuck_after: TimeDelta::seconds(stuck_after) }
}

fn refusal() -> Failure {
    Failure { http_status: Some(503), ..failure(Trigger::WebhookFailure, FailureType::ServerError) }
}

#[test]
fn every_event_in_every_status_leads_where_the_table_says() {
    for (event, cells) in table() {
        assert!(has_a_row(&event));
        for (status, expected) in Status::ALL.into_iter().zip(cells) {
            let before = task(status);
            let found = match decide(&before, &event, moment(0)) {
                Ok(Some(transition)) => {
                    check(&before, &event, &transition);
                    Cell::To(transition.task().status)
                }
                Ok(None) => Cell::Nothing,
                Err(Refused) => Cell::Refused,
            };
            assert_eq!(found, expected, "{status:?} and {event:?}");
        }
    }
}

#[test]
fn only_the_last_parent_releases_a_waiting_task() {
    let waiting = Task { wait_count: 3, ..task(Status::Waiting) };
    let settled = |count| Event::ParentsSettled { count, doomed: false };
    let two = changed(&waiting, &settled(2), moment(0));
    assert_eq!(*two.task(), Task { wait_count: 1, ..waiting.clone() });
    let last = changed(two.task(), &settled(1), moment(0));
    assert_eq!(*last.task(), Task { status: Status::Pending, wait_count: 0, ..waiting.clone() });
    assert_eq!(last.cause(), Cause::Parents);

    let paused = Task { status: Status::Paused, ..waiting.clone() };
    let counted = changed(&paused, &settled(3), moment(0));
    assert_eq!(*counted.task(), Task { wait_count: 0, ..paused });
    let resumed = changed(counted.task(), &Event::Resumed, moment(0));
    assert_eq!(resumed.task().status, Status::Pending);
}

#[test]
fn a_failed_dependency_is_never_retried() {
    for status in [Status::Waiting, Status::Paused] {
        let before = Task { wait_count: 2, next_retry_at: None, ..task(status) };
        let failed = changed(&before, &Event::ParentsSettled { count: 1, doomed: true }, moment(0));
        let after = failed.task();
        assert_eq!((after.status, after.ended_at), (Status::Failure, Some(at(0))));
        assert_eq!(after.failure_type, Some(FailureType::Dependency));
        assert!(after.failure_reason.is_some());
        assert_eq!((after.attempt, after.run), (ATTEMPT, RUN));
        assert_eq!((failed.cause(), failed.notice()), (Cause::Dependency, Some(Notice::Failure)));
        assert_eq!(failed.attempt(), None, "it was not executed");
    }
}

#[test]
fn a_claim_sets_the_holder_the_lease_and_the_claimed_run() {
    let pending = task(Status::Pending);
    let claimed = changed(&pending, &Event::Claimed { by: INSTANCE, lease: TimeDelta::seconds(9) }, moment(0));
    let expected = Task {
        status: Status::Claimed,
        claimed_by: Some(INSTANCE),
        claimed_run: Some(RUN),
        claim: CLAIM + 1,
        timeout_at: Some(at(9)),
        ..pending.clone()
    };
    assert_eq!(*claimed.task(), expected);

    let started = changed(claimed.task(), &Event::Started { by: INSTANCE, claim: CLAIM + 1 }, moment(2));
    let running =
        Task { status: Status::Running, started_at: Some(at(2)), timeout_at: Some(at(2 + 30)), ..expected.clone() };
    assert_eq!(*started.task(), running);
    assert_eq!(started.attempt(), None);

    assert!(refused(&expected, &Event::LeaseRanOut, moment(8)));
    let given_back = changed(&expected, &Event::LeaseRanOut, moment(9));
    assert_eq!(
        *given_back.task(),
        Task { claimed_run: Some(RUN), claim: CLAIM + 1, ..pending },
        "attempt and run are unchanged"
    );
    assert_eq!(given_back.attempt(), None);
}

#[test]
fn only_the_instance_that_claimed_a_task_can_start_it() {
    let claimed = task(Status::Claimed);
    assert!(refused(&claimed, &Event::Started { by: OTHER_INSTANCE, claim: CLAIM }, moment(0)));
    assert!(refused(&claimed, &Event::StartFailed { by: OTHER_INSTANCE, claim: CLAIM, failure: refusal() }, moment(0)));
    assert!(refused(&claimed, &Event::Started { by: INSTANCE, claim: CLAIM - 1 }, moment(0)), "an earlier claim");
    assert!(refused(&claimed, &Event::StartFailed { by: INSTANCE, claim: CLAIM - 1, failure: refusal() }, moment(0)));
    let unheld = Task { claimed_by: None, slots: Vec::new(), ..claimed };
    assert!(refused(&unheld, &Event::Started { by: INSTANCE, claim: CLAIM }, moment(0)));
    assert!(refused(&unheld, &Event::StartFailed { by: INSTANCE, claim: CLAIM, failure: refusal() }, moment(0)));
}

#[test]
fn no_lease_timeout_or_retry_fires_early() {
    assert!(refused(&task(Status::Claimed), &Event::LeaseRanOut, moment(-1)));
    assert!(refused(&task(Status::Running), &Event::TimedOut, moment(-1)));
    // The deadline has passed, but the worker has sent a heartbeat since it was set.
    let alive = Task { last_updated: at(-29), timeout_secs: 30, ..task(Status::Running) };
    assert!(refused(&alive, &Event::TimedOut, moment(0)) && !refused(&alive, &Event::TimedOut, moment(1)));
    assert!(refused(&task(Status::RetryPending), &Event::RetryDue, moment(-1)));
    for (status, event) in [
        (Status::Claimed, Event::LeaseRanOut),
        (Status::Running, Event::TimedOut),
        (Status::RetryPending, Event::RetryDue),
    ] {
        let endless = Task { timeout_at: None, next_retry_at: None, ..task(status) };
        assert!(refused(&endless, &event, moment(1000)), "{event:?} without a time");
    }
}

#[test]
fn a_due_retry_resets_the_last_execution_and_keeps_the_attempt() {
    let before = task(Status::RetryPending);
    let due = changed(&before, &Event::RetryDue, moment(0));
    let expected = Task {
        status: Status::Pending,
        started_at: None,
        ended_at: None,
        failure_type: None,
        failure_reason: None,
        next_retry_at: None,
        ..before
    };
    assert_eq!(*due.task(), expected);
    assert_eq!((due.task().attempt, due.task().run), (ATTEMPT, RUN));
    assert_eq!((due.cause(), due.attempt(), due.notice()), (Cause::RetryDue, None, None));
}

#[test]
fn a_pause_changes_the_status_and_nothing_else() {
    for status in [Status::Waiting, Status::Pending, Status::RetryPending] {
        let before = task(status);
        let paused = changed(&before, &Event::Paused, moment(0));
        assert_eq!(*paused.task(), Task { status: Status::Paused, ..before });
    }
    assert_eq!(changed(&task(Status::RetryPending), &Event::Paused, moment(0)).task().next_retry_at, Some(at(0)));
}

#[test]
fn a_resumed_task_continues_as_if_never_paused() {
    let paused = |status| changed(&task(status), &Event::Paused, moment(-5)).task().clone();
    let resumed = |task: &Task, secs| changed(task, &Event::Resumed, moment(secs)).task().clone();

    assert_eq!(resumed(&paused(Status::Waiting), 0), task(Status::Waiting));
    assert_eq!(resumed(&paused(Status::Pending), 0), task(Status::Pending));
    assert_eq!(resumed(&paused(Status::RetryPending), -1), task(Status::RetryPending), "still ahead");
    for secs in [0, 1000] {
        let due = changed(&task(Status::RetryPending), &Event::RetryDue, moment(secs)).task().clone();
        assert_eq!(resumed(&paused(Status::RetryPending), secs), due, "it came due while it was paused");
    }
}

#[test]
fn a_cancel_is_announced_only_if_the_task_was_executing() {
    for status in Status::ALL.into_iter().filter(|s| !s.is_terminal()) {
        let dead_end = "canceled as a dead end: no task that depends on it is alive";
        let events = [
            (Event::Canceled { reason: "canceled by ada".into() }, Cause::Cancel, "canceled by ada"),
            (Event::DeadEnd, Cause::DeadEnd, dead_end),
        ];
        for (event, cause, reason) in events {
            let before = task(status);
            let canceled = changed(&before, &event, moment(3));
            let expected = Task {
                status: Status::Canceled,
                ended_at: Some(at(3)),
                claimed_by: None,
                slots: Vec::new(),
                timeout_at: None,
                next_retry_at: None,
                failure_type: None,
                failure_reason: Some(reason.into()),
                ..before.clone()
            };
            assert_eq!((canceled.task(), canceled.cause()), (&expected, cause));
            assert!(canceled.ends_badly());
            assert_eq!(canceled.notice(), status.is_executing().then_some(Notice::Cancel), "{status:?}");
            assert_eq!(canceled.attempt().is_some(), status.is_executing(), "{status:?}");
            if let Some(record) = canceled.attempt() {
                assert_eq!((record.outcome, record.cause), (AttemptOutcome::Canceled, cause));
                assert_eq!((record.ended_at, record.failure.as_ref()), (at(3), None));
                assert_eq!((record.delay_ms, record.jitter_ms, record.next_retry_at), (None, None, None));
            }
        }
    }
}

#[test]
fn children_wait_through_two_timeouts_until_success() {
    let lease = TimeDelta::seconds(30);
    let mut parent = Task { attempt: 0, run: 0, claimed_run: None, ..task(Status::Pending) };
    let child = task(Status::Waiting);
    let mut clock = 0;
    for (attempt, delay) in [(1, 10), (2, 20)] {
        parent = changed(&parent, &Event::Claimed { by: INSTANCE, lease }, moment(clock)).task().clone();
        parent = changed(&parent, &Event::Started { by: INSTANCE, claim: parent.claim }, moment(clock)).task().clone();
        assert!(refused(&parent, &Event::TimedOut, moment(clock + 29)));
        clock += 30;
        let timed_out = changed(&parent, &Event::TimedOut, moment(clock));
        assert!(timed_out.settled().is_none(), "the child does not move");
        assert_eq!(timed_out.notice(), Some(Notice::Retry));
        parent = timed_out.task().clone();
        assert_eq!((parent.status, parent.attempt, parent.run), (Status::RetryPending, attempt, i32::from(attempt)));
        assert_eq!(parent.next_retry_at, Some(at(clock + delay)));
        assert!(refused(&parent, &Event::RetryDue, moment(clock + delay - 1)));
        clock += delay;
        parent = changed(&parent, &Event::RetryDue, moment(clock)).task().clone();
        assert_eq!((parent.status, parent.attempt), (Status::Pending, attempt));
    }
    parent = changed(&parent, &Event::Claimed { by: INSTANCE, lease }, moment(clock)).task().clone();
    parent = changed(&parent, &Event::Started { by: INSTANCE, claim: parent.claim }, moment(clock)).task().clone();
    let done = changed(&parent, &report(None, Ok(())), moment(clock + 5));
    assert_eq!((done.task().status, done.task().attempt), (Status::Success, 2));
    let settled = done.settled().expect("now the child moves");
    assert!(settled.outcome().is_success());
    let event = Event::ParentsSettled { count: 1, doomed: !settled.outcome().is_success() };
    assert_eq!(changed(&child, &event, moment(clock + 5)).task().status, Status::Pending);
}
