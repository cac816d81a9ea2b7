use super::*;
use crate::domain::retry::policy::Policy;

const CLAIMED_BEFORE: Option<i32> = Some(RUN);

fn lease_ran_out() -> Task {
    Task { claimed_run: CLAIMED_BEFORE, ..task(Status::Pending) }
}

/// Every event that fails an execution, with the status in which it arrives and its trigger.
fn failures() -> [(Status, Event, Trigger); 5] {
    [
        (
            Status::Claimed,
            Event::StartFailed { by: INSTANCE, claim: CLAIM, failure: refusal() },
            Trigger::WebhookFailure,
        ),
        (Status::Running, Event::TimedOut, Trigger::Timeout),
        (Status::Running, report(None, Err(broke())), Trigger::Explicit),
        (Status::Claimed, report(Some(RUN), Err(broke())), Trigger::Explicit),
        (Status::Pending, report(Some(RUN), Err(broke())), Trigger::Explicit),
    ]
}

fn failing(status: Status, retry: Option<Policy>) -> Task {
    Task { retry, claimed_run: CLAIMED_BEFORE, ..task(status) }
}

#[test]
fn a_retryable_failure_schedules_a_retry() {
    for (status, event, trigger) in failures() {
        let before = failing(status, Some(policy()));
        let retried = changed(&before, &event, Moment { jitter: Jitter::Exactly(1.0), ..moment(0) });
        let record = retried.attempt().expect("a record");
        let failure = record.failure.clone().expect("the failure");
        let due = at(40) + TimeDelta::milliseconds(500);
        let expected = Task {
            status: Status::RetryPending,
            attempt: ATTEMPT + 1,
            run: RUN + 1,
            claimed_by: None,
            slots: Vec::new(),
            timeout_at: None,
            next_retry_at: Some(due),
            failure_type: Some(failure.failure_type),
            failure_reason: Some(failure.reason.clone()),
            ..before.clone()
        };
        assert_eq!(*retried.task(), expected, "{event:?}");
        assert!(retried.settled().is_none());
        assert_eq!(retried.notice(), Some(Notice::Retry));
        assert_eq!(failure.trigger, trigger);

        assert_eq!((record.outcome, record.cause), (AttemptOutcome::Retried, retried.cause()));
        assert_eq!((record.run, record.attempt, record.ended_at), (RUN, ATTEMPT, at(0)));
        assert_eq!((record.instance, record.started_at), (before.claimed_by, began(&before)));
        assert_eq!((record.delay_ms, record.jitter_ms), (Some(40_000), Some(500)));
        assert_eq!(record.next_retry_at, Some(due));
        assert_eq!(record.refusal, None);
        assert!(record.reason.contains("3 of 3"), "{}", record.reason);
    }
}

#[test]
fn the_cause_is_what_ended_the_execution() {
    for (status, event, trigger) in failures() {
        let cause = if trigger == Trigger::Explicit { Cause::Report } else { Cause::Failed(trigger) };
        for retry in [None, Some(policy())] {
            let failed = changed(&failing(status, retry), &event, moment(0));
            assert_eq!((failed.cause(), failed.attempt().map(|a| a.cause)), (cause, Some(cause)));
        }
    }
}

#[test]
fn a_failure_that_is_not_retried_ends_the_task() {
    let used_up = Policy { max_retries: ATTEMPT, ..policy() };
    for (status, event, trigger) in failures() {
        let others = Trigger::ALL.into_iter().filter(|t| *t != trigger).collect();
        let unnamed = Policy { retry_on: others, ..policy() };
        let cases = [
            (None, Final::NoPolicy),
            (Some(used_up.clone()), Final::Exhausted),
            (Some(unnamed), Final::Trigger(trigger)),
        ];
        for (retry, refusal) in cases {
            let before = failing(status, retry);
            let failed = changed(&before, &event, moment(0));
            let record = failed.attempt().expect("a record");
            let failure = record.failure.clone().expect("the failure");
            let expected = Task {
                status: Status::Failure,
                claimed_by: None,
                slots: Vec::new(),
                timeout_at: None,
                ended_at: Some(at(0)),
                failure_type: Some(failure.failure_type),
                failure_reason: Some(failure.reason.clone()),
                ..before.clone()
            };
            assert_eq!(*failed.task(), expected, "attempt and run stay: {event:?}");
            assert_eq!(failed.notice(), Some(Notice::Failure));
            assert_eq!((record.outcome, record.refusal), (AttemptOutcome::Failed, Some(refusal)));
            assert_eq!((record.delay_ms, record.jitter_ms, record.next_retry_at), (None, None, None));
            assert!(record.reason.starts_with("not retried: "), "{}", record.reason);
        }
    }
}

#[test]
fn exactly_the_final_failure_types_are_not_retried() {
    for failure_type in FailureType::ALL {
        let is_final = match failure_type {
            FailureType::ValidationError | FailureType::AuthenticationError | FailureType::Dependency => true,
            FailureType::RateLimit
            | FailureType::NetworkError
            | FailureType::Timeout
            | FailureType::ServerError
            | FailureType::Unknown => false,
        };
        let events = [
            (Status::Running, report(None, Err(failure(Trigger::Explicit, failure_type)))),
            (
                Status::Claimed,
                Event::StartFailed {
                    by: INSTANCE,
                    claim: CLAIM,
                    failure: failure(Trigger::WebhookFailure, failure_type),
                },
            ),
        ];
        for (status, event) in events {
            let failed = changed(&task(status), &event, moment(0));
            let expected = if is_final { Status::Failure } else { Status::RetryPending };
            assert_eq!(failed.task().status, expected, "{failure_type:?}");
            assert_eq!(failed.task().attempt, ATTEMPT + i16::from(!is_final), "{failure_type:?}");
            assert_eq!(failed.task().failure_type, Some(failure_type));
            let refusal = failed.attempt().expect("a record").refusal;
            assert_eq!(refusal, is_final.then_some(Final::Type(failure_type)));
        }
    }
}

#[test]
fn three_retries_make_four_executions() {
    let mut now = Task { attempt: 0, run: 0, ..task(Status::Pending) };
    let mut runs = Vec::new();
    let mut clock = 0;
    while now.status == Status::Pending {
        let claim = Event::Claimed { by: INSTANCE, lease: TimeDelta::seconds(1) };
        now = changed(&now, &claim, moment(clock)).task().clone();
        let failed = changed(&now, &report(None, Err(broke())), moment(clock));
        let record = failed.attempt().expect("a record");
        runs.push((record.run, record.attempt, record.delay_ms, record.refusal));
        now = failed.task().clone();
        clock += 1000;
        if now.status == Status::RetryPending {
            now = changed(&now, &Event::RetryDue, moment(clock)).task().clone();
        }
    }
    let expected = [
        (0, 0, Some(10_000), None),
        (1, 1, Some(20_000), None),
        (2, 2, Some(40_000), None),
        (3, 3, None, Some(Final::Exhausted)),
    ];
    assert_eq!(runs, expected);
    assert_eq!((now.status, now.attempt, now.run), (Status::Failure, 3, 3));
}

#[test]
fn success_ends_the_task_and_clears_earlier_failures() {
    let cases = [
        (task(Status::Claimed), None),
        (task(Status::Running), None),
        (task(Status::Running), Some(RUN)),
        (lease_ran_out(), Some(RUN)),
    ];
    for (before, run) in cases {
        let before = Task { failure_type: Some(FailureType::Unknown), failure_reason: Some("of old".into()), ..before };
        let done = changed(&before, &report(run, Ok(())), moment(6));
        let expected = Task {
            status: Status::Success,
            claimed_by: None,
            slots: Vec::new(),
            timeout_at: None,
            started_at: began(&before),
            ended_at: Some(at(6)),
            failure_type: None,
            failure_reason: None,
            ..before.clone()
        };
        assert_eq!(*done.task(), expected);
        assert_eq!((done.cause(), done.notice()), (Cause::Report, Some(Notice::Success)));
        let record = done.attempt().expect("a record");
        assert_eq!((record.outcome, record.cause), (AttemptOutcome::Success, Cause::Report));
        assert_eq!((record.ended_at, record.failure.as_ref(), record.refusal), (at(6), None, None));
        assert_eq!((record.delay_ms, record.jitter_ms, record.next_retry_at), (None, None, None));
    }
}

#[test]
fn a_pending_task_accepts_only_reports_of_the_worker_of_its_run() {
    for result in [Ok(()), Err(broke())] {
        let reported = |run| report(run, result.clone());
        assert!(decide(&lease_ran_out(), &reported(Some(RUN)), moment(0)).is_ok_and(|t| t.is_some()));
        assert!(refused(&lease_ran_out(), &reported(None), moment(0)), "any worker could send it without a run");
        assert!(refused(&lease_ran_out(), &reported(Some(RUN - 1)), moment(0)));
        assert!(refused(&lease_ran_out(), &reported(Some(RUN + 1)), moment(0)));
        for claimed_run in [None, Some(RUN - 1)] {
            let unclaimed = Task { claimed_run, ..task(Status::Pending) };
            assert!(refused(&unclaimed, &reported(Some(RUN)), moment(0)), "{claimed_run:?}");
        }
        for status in [Status::Waiting, Status::Paused, Status::RetryPending, Status::Canceled] {
            let other = Task { claimed_run: CLAIMED_BEFORE, ..task(status) };
            assert!(refused(&other, &reported(Some(RUN)), moment(0)), "{status:?}");
        }
    }
}

#[test]
fn a_report_that_matches_the_record_of_its_run_is_a_repetition() {
    use AttemptOutcome::{Canceled, Deferred, Failed, Lost, Retried, Success};
    use Status as S;
    let (good, bad) = (|| Ok(()), || Err(broke()));
    let before = RUN - 1;
    // The task is at RUN. Columns: its status; the run and the result of the report; the recorded run with its outcome
    // and whether a report ended it; whether the report is a repetition.
    let cases = [
        (S::RetryPending, Some(before), bad(), Some((before, Retried, true)), true),
        (S::RetryPending, None, bad(), Some((before, Retried, true)), true),
        (S::Paused, None, bad(), Some((before, Retried, true)), true),
        (S::Pending, None, bad(), Some((before, Retried, true)), true),
        (S::Pending, Some(before), bad(), Some((before, Retried, true)), true),
        (S::Claimed, Some(before), bad(), Some((before, Retried, true)), true),
        (S::Running, Some(before), bad(), Some((before, Retried, true)), true),
        (S::Success, Some(before), bad(), Some((before, Retried, true)), true),
        (S::Failure, Some(before), bad(), Some((before, Retried, true)), true),
        (S::Canceled, Some(before), bad(), Some((before, Retried, true)), true),
        (S::Running, Some(0), bad(), Some((0, Retried, true)), true),
        (S::Pending, Some(before), good(), Some((before, Success, true)), true),
        (S::Pending, Some(before), bad(), Some((before, Failed, true)), true),
        (S::RetryPending, Some(before), bad(), Some((before, Deferred, true)), true),
        (S::RetryPending, None, bad(), Some((before, Deferred, true)), true),
        // The report differs from the record.
        (S::RetryPending, Some(before), good(), Some((before, Deferred, true)), false),
        (S::RetryPending, Some(before), good(), Some((before, Retried, true)), false),
        (S::RetryPending, None, good(), Some((before, Retried, true)), false),
        (S::Pending, Some(before), good(), Some((before, Failed, true)), false),
        (S::Pending, Some(before), bad(), Some((before, Success, true)), false),
        // The run was ended by a timeout or a refused start, not by a report.
        (S::RetryPending, Some(before), bad(), Some((before, Retried, false)), false),
        (S::RetryPending, None, bad(), Some((before, Retried, false)), false),
        (S::Running, Some(before), bad(), Some((before, Retried, false)), false),
        // A cancel is never reported by a worker.
        (S::Canceled, Some(RUN), good(), Some((RUN, Canceled, false)), false),
        (S::Canceled, Some(RUN), bad(), Some((RUN, Canceled, true)), false),
        (S::Canceled, None, bad(), Some((before, Canceled, true)), false),
        // The worker of a lost run never reported.
        (S::Pending, Some(before), good(), Some((before, Lost, false)), false),
        (S::Pending, Some(before), bad(), Some((before, Lost, true)), false),
        // A report without a run is about the current run once that is executing or over.
        (S::Claimed, None, bad(), Some((before, Retried, true)), false),
        (S::Running, None, bad(), Some((before, Retried, true)), false),
        (S::Success, None, bad(), Some((before, Retried, true)), false),
        (S::Canceled, None, bad(), Some((before, Retried, true)), false),
        // There is no record, or it belongs to another run.
        (S::RetryPending, Some(before), bad(), None, false),
        (S::RetryPending, None, bad(), None, false),
        (S::RetryPending, Some(before), bad(), Some((before - 1, Retried, true)), false),
        (S::RetryPending, None, bad(), Some((RUN, Retried, true)), false),
        (S::RetryPending, None, bad(), Some((before - 1, Retried, true)), false),
    ];
    for (status, run, result, recorded, expected) in cases {
        let reported = Report { run, result };
        assert_eq!(repeats(&task(status), &reported, recorded), expected, "{status:?}, {reported:?}, {recorded:?}");
    }
    let first = Task { run: 0, ..task(Status::Pending) };
    assert!(!repeats(&first, &Report { run: None, result: bad() }, None), "there was no run before the first");
}

#[test]
fn a_report_sent_twice_takes_effect_once() {
    let running = task(Status::Running);
    for retry in [None, Some(policy())] {
        let running = Task { retry, ..running.clone() };
        for run in [None, Some(RUN)] {
            for result in [Ok(()), Err(broke())] {
                let reported = report(run, result.clone());
                let once = changed(&running, &reported, moment(0));
                let record = once.attempt().expect("a record");
                let recorded = Some((record.run, record.outcome, record.cause == Cause::Report));
                match decide(once.task(), &reported, moment(1)) {
                    Ok(None) => assert!(once.task().status.is_terminal()),
                    Err(Refused) => assert!(repeats(once.task(), &Report { run, result }, recorded)),
                    Ok(Some(twice)) => panic!("{twice:?}"),
                }
            }
        }
    }
}
