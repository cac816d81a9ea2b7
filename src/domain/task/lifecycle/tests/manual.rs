use super::*;

/// The task after a reset, with `wait_count` open parents.
fn after_reset(before: &Task, wait_count: i32, run: i32) -> Task {
    Task {
        status: if wait_count > 0 { Status::Waiting } else { Status::Pending },
        attempt: 0,
        run,
        deferrals: 0,
        wait_count,
        claimed_by: None,
        slots: Vec::new(),
        timeout_at: None,
        next_retry_at: None,
        started_at: None,
        ended_at: None,
        failure_type: None,
        failure_reason: None,
        ..before.clone()
    }
}

fn ignored(task: &Task, event: &Event, moment: Moment) -> bool {
    matches!(decide(task, event, moment), Ok(None))
}

#[test]
fn a_manual_retry_resets_the_task() {
    let runs = [
        (Status::Failure, RUN + 1),
        (Status::Canceled, RUN + 1),
        (Status::RetryPending, RUN),
        (Status::Claimed, RUN + 1),
        (Status::Running, RUN + 1),
    ];
    for (status, run) in runs {
        for wait_count in [0, 1, 3] {
            // The old count does not matter: the event carries the current number of open parents.
            let before = Task { wait_count: 2, manual_run: Some(1), ..task(status) };
            let retried = changed(&before, &manual_retry(wait_count, 30), moment(0));
            let expected = Task { manual_run: Some(run), ..after_reset(&before, wait_count, run) };
            assert_eq!(*retried.task(), expected, "{status:?}");
            assert_eq!((retried.cause(), retried.notice()), (Cause::Manual, None));
            assert!(retried.settled().is_none());
            assert_eq!(retried.attempt().is_some(), status.is_executing(), "{status:?}");
        }
    }
}

#[test]
fn a_manual_retry_replaces_a_scheduled_retry() {
    let before = Task { next_retry_at: Some(at(1_000_000)), ..task(Status::RetryPending) };
    let retried = changed(&before, &manual_retry(0, 30), moment(0));
    let after = retried.task();
    assert_eq!((after.status, after.run, after.next_retry_at), (Status::Pending, RUN, None));
    assert!(refused(after, &Event::RetryDue, moment(1_000_000)), "the scheduled retry is gone");
}

#[test]
fn a_manual_retry_gives_up_an_execution_only_if_it_is_stuck() {
    for status in [Status::Claimed, Status::Running] {
        let before = Task { last_updated: at(-1800), timeout_at: Some(at(1000)), ..task(status) };
        assert!(refused(&before, &manual_retry(0, 1801), moment(0)), "{status:?} and not stuck");
        assert!(refused(&before, &manual_retry(0, 1800), moment(-1)), "{status:?} and not stuck yet");
        let given_up = changed(&before, &manual_retry(0, 1800), moment(0));
        let record = given_up.attempt().expect("a record");
        assert_eq!((record.outcome, record.cause), (AttemptOutcome::Lost, Cause::Manual));
        assert_eq!((record.run, record.attempt, record.instance), (RUN, ATTEMPT, Some(INSTANCE)));
        assert_eq!((record.started_at, record.ended_at), (began(&before), at(0)));
        assert_eq!((record.failure.as_ref(), record.refusal), (None, None));
        assert_eq!((record.delay_ms, record.jitter_ms, record.next_retry_at), (None, None, None));
        assert!(record.reason.contains("no heartbeat since"), "{}", record.reason);

        // The worker may still report, but the run is over.
        for result in [Ok(()), Err(broke())] {
            let reported = Report { run: Some(RUN), result };
            assert!(refused(given_up.task(), &Event::Reported(reported.clone()), moment(1)));
            assert!(!repeats(given_up.task(), &reported, Some((RUN, AttemptOutcome::Lost, false))));
        }
    }
}

#[test]
fn paused_succeeded_and_queued_tasks_cannot_be_retried() {
    for status in [Status::Paused, Status::Success, Status::Pending, Status::Waiting] {
        for manual_run in [None, Some(RUN - 1), Some(RUN + 1)] {
            let other = Task { manual_run, ..task(status) };
            assert!(refused(&other, &manual_retry(0, 30), moment(0)), "{status:?} {manual_run:?}");
        }
    }
    for status in [Status::Paused, Status::Success] {
        let requested = Task { manual_run: Some(RUN), ..task(status) };
        assert!(refused(&requested, &manual_retry(0, 30), moment(0)), "{status:?}");
    }
}

#[test]
fn a_repeated_manual_retry_changes_nothing() {
    for status in [Status::Failure, Status::Canceled, Status::RetryPending, Status::Claimed, Status::Running] {
        for wait_count in [0, 2] {
            let once = changed(&task(status), &manual_retry(wait_count, 30), moment(0)).task().clone();
            for again in [0, 2] {
                assert!(ignored(&once, &manual_retry(again, 30), moment(1)), "{status:?}");
            }
        }
    }
    // This holds while the task is queued. Once claimed, it is like any other execution.
    let once = changed(&task(Status::Failure), &manual_retry(0, 30), moment(0)).task().clone();
    let claimed =
        changed(&once, &Event::Claimed { by: INSTANCE, lease: TimeDelta::seconds(9) }, moment(1)).task().clone();
    let claimed = Task { last_updated: at(1), ..claimed };
    assert!(refused(&claimed, &manual_retry(0, 30), moment(2)));
    let given_back = changed(&claimed, &Event::LeaseRanOut, moment(10)).task().clone();
    assert!(ignored(&given_back, &manual_retry(0, 30), moment(10)), "the run is still the requested one");
    let failed = changed(&claimed, &report(None, Err(broke())), moment(2)).task().clone();
    assert_eq!(failed.status, Status::RetryPending);
    let again = changed(&failed, &manual_retry(0, 30), moment(3));
    assert_eq!((again.task().run, again.task().attempt), (RUN + 2, 0));
}

#[test]
fn a_manual_retry_starts_counting_retries_from_zero() {
    let mut now = changed(&task(Status::Failure), &manual_retry(0, 30), moment(0)).task().clone();
    let mut delays = Vec::new();
    let mut clock = 0;
    while now.status == Status::Pending {
        now =
            changed(&now, &Event::Claimed { by: INSTANCE, lease: TimeDelta::seconds(1) }, moment(clock)).task().clone();
        let failed = changed(&now, &report(None, Err(broke())), moment(clock));
        let record = failed.attempt().expect("a record");
        delays.push((record.run, record.attempt, record.delay_ms, record.retry_type));
        now = failed.task().clone();
        clock += 1000;
        if now.status == Status::RetryPending {
            now = changed(&now, &Event::RetryDue, moment(clock)).task().clone();
        }
    }
    let (manual, automatic) = (Some(RetryType::Manual), Some(RetryType::Automatic));
    let expected = [
        (RUN + 1, 0, Some(10_000), manual),
        (RUN + 2, 1, Some(20_000), automatic),
        (RUN + 3, 2, Some(40_000), automatic),
        (RUN + 4, 3, None, automatic),
    ];
    assert_eq!(delays, expected);
    assert_eq!(now.status, Status::Failure);
}

#[test]
fn only_tasks_that_failed_by_dependency_are_revived() {
    for status in Status::ALL {
        for failure_type in FailureType::ALL.into_iter().map(Some).chain([None]) {
            for wait_count in [1, 3] {
                let before = Task { failure_type, manual_run: Some(1), ..task(status) };
                let event = Event::Revived { wait_count };
                if (status, failure_type) != (Status::Failure, Some(FailureType::Dependency)) {
                    assert!(refused(&before, &event, moment(0)), "{status:?} {failure_type:?}");
                    continue;
                }
                let revived = changed(&before, &event, moment(0));
                let expected = Task { manual_run: Some(RUN + 1), ..after_reset(&before, wait_count, RUN + 1) };
                assert_eq!(*revived.task(), expected);
                assert_eq!((revived.cause(), revived.notice()), (Cause::Manual, None));
                assert!(revived.attempt().is_none() && revived.settled().is_none());
            }
        }
    }
}

#[test]
fn a_task_that_has_not_begun_waits_for_reopened_parents() {
    let reopened = Event::ParentsReopened { count: 2 };
    let waiting = Task { wait_count: 1, ..task(Status::Waiting) };
    let again = changed(&waiting, &reopened, moment(0));
    assert_eq!(*again.task(), Task { wait_count: 3, ..waiting.clone() });
    assert_eq!((again.cause(), again.notice(), again.attempt()), (Cause::Manual, None, None));
    // A waiting task has not begun this run, even if it was claimed before.
    let retried = Task { claimed_run: Some(RUN), ..waiting };
    assert_eq!(changed(&retried, &reopened, moment(0)).task().wait_count, 3);

    let pending = Task { claimed_run: None, ..task(Status::Pending) };
    let queued = changed(&pending, &reopened, moment(0)).task().clone();
    assert_eq!(queued, Task { wait_count: 2, ..pending }, "it stays in the queue and keeps count");
    let settled = Event::ParentsSettled { count: 1, doomed: false };
    assert_eq!(changed(&queued, &settled, moment(0)).task().wait_count, 1);
    for claimed_run in [RUN - 1, RUN] {
        let begun = Task { claimed_run: Some(claimed_run), ..task(Status::Pending) };
        assert!(refused(&begun, &reopened, moment(0)), "its parents no longer matter");
    }
    for (claimed_run, manual_run) in [(None, None), (Some(RUN - 1), Some(RUN))] {
        let paused = Task { claimed_run, manual_run, ..task(Status::Paused) };
        let again = changed(&paused, &reopened, moment(0)).task().clone();
        assert_eq!(again, Task { wait_count: 2, ..paused });
        assert_eq!(changed(&again, &Event::Resumed, moment(0)).task().status, Status::Waiting);
    }
    let claimed_before = Task { claimed_run: Some(RUN), ..task(Status::Paused) };
    assert!(refused(&claimed_before, &reopened, moment(0)), "its worker may still be executing it");
    let retrying = changed(&task(Status::RetryPending), &Event::Paused, moment(-1)).task().clone();
    assert!(refused(&retrying, &reopened, moment(0)), "it has begun and waits only for its retry");
    for status in Status::ALL.into_iter().filter(|s| !matches!(s, Status::Waiting | Status::Pending | Status::Paused)) {
        assert!(refused(&task(status), &reopened, moment(0)), "{status:?}");
    }
}
