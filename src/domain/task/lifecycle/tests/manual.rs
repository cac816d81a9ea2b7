use super::*;

/// What a task that is taken up anew looks like, behind so many open parents.
fn anew(before: &Task, wait_count: i32, run: i32) -> Task {
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

fn nothing(task: &Task, event: &Event, moment: Moment) -> bool {
    matches!(decide(task, event, moment), Ok(None))
}

#[test]
fn a_retry_by_hand_starts_anew() {
    let runs = [
        (Status::Failure, RUN + 1),
        (Status::Canceled, RUN + 1),
        (Status::RetryPending, RUN),
        (Status::Claimed, RUN + 1),
        (Status::Running, RUN + 1),
    ];
    for (status, run) in runs {
        for wait_count in [0, 1, 3] {
            // What the count said before means nothing: the open parents were counted again.
            let before = Task { wait_count: 2, manual_run: Some(1), ..task(status) };
            let retried = changed(&before, &manual_retry(wait_count, 30), moment(0));
            let expected = Task { manual_run: Some(run), ..anew(&before, wait_count, run) };
            assert_eq!(*retried.task(), expected, "{status:?}");
            assert_eq!((retried.cause(), retried.notice()), (Cause::Manual, None));
            assert!(retried.settled().is_none());
            assert_eq!(retried.attempt().is_some(), status.is_executing(), "{status:?}");
        }
    }
}

#[test]
fn a_scheduled_retry_is_dropped_with_its_date() {
    let before = Task { next_retry_at: Some(at(1_000_000)), ..task(Status::RetryPending) };
    let retried = changed(&before, &manual_retry(0, 30), moment(0));
    let after = retried.task();
    assert_eq!((after.status, after.run, after.next_retry_at), (Status::Pending, RUN, None));
    assert!(refused(after, &Event::RetryDue, moment(1_000_000)), "nothing is due any more");
}

#[test]
fn what_is_executed_is_given_up_only_when_it_is_stuck() {
    for status in [Status::Claimed, Status::Running] {
        let before = Task { last_updated: at(-1800), timeout_at: Some(at(1000)), ..task(status) };
        assert!(refused(&before, &manual_retry(0, 1801), moment(0)), "{status:?} and not stuck");
        assert!(refused(&before, &manual_retry(0, 1800), moment(-1)), "{status:?} and not stuck yet");
        let given_up = changed(&before, &manual_retry(0, 1800), moment(0));
        let record = given_up.attempt().expect("a record");
        assert_eq!((record.outcome, record.cause), (AttemptOutcome::Lost, Cause::Manual));
        assert_eq!((record.run, record.attempt, record.instance), (RUN, ATTEMPT, Some(ME)));
        assert_eq!((record.started_at, record.ended_at), (began(&before), at(0)));
        assert_eq!((record.failure.as_ref(), record.refusal), (None, None));
        assert_eq!((record.delay_ms, record.jitter_ms, record.next_retry_at), (None, None, None));
        assert!(record.reason.contains("no sign of life"), "{}", record.reason);

        // Its worker may come back: that run is over.
        for result in [Ok(()), Err(broke())] {
            let said = Report { run: Some(RUN), result };
            assert!(refused(given_up.task(), &Event::Reported(said.clone()), moment(1)));
            assert!(!repeats(given_up.task(), &said, Some((RUN, AttemptOutcome::Lost, false))));
        }
    }
}

#[test]
fn there_is_nothing_to_retry_in_a_task_that_is_paused_done_or_in_line() {
    for status in [Status::Paused, Status::Success, Status::Pending, Status::Waiting] {
        for manual_run in [None, Some(RUN - 1), Some(RUN + 1)] {
            let other = Task { manual_run, ..task(status) };
            assert!(refused(&other, &manual_retry(0, 30), moment(0)), "{status:?} {manual_run:?}");
        }
    }
    for status in [Status::Paused, Status::Success] {
        let asked_for = Task { manual_run: Some(RUN), ..task(status) };
        assert!(refused(&asked_for, &manual_retry(0, 30), moment(0)), "{status:?}");
    }
}

#[test]
fn a_second_press_does_nothing() {
    for status in [Status::Failure, Status::Canceled, Status::RetryPending, Status::Claimed, Status::Running] {
        for wait_count in [0, 2] {
            let once = changed(&task(status), &manual_retry(wait_count, 30), moment(0)).task().clone();
            for again in [0, 2] {
                assert!(nothing(&once, &manual_retry(again, 30), moment(1)), "{status:?}");
            }
        }
    }
    // As long as it is in line; then it is being executed like any other.
    let once = changed(&task(Status::Failure), &manual_retry(0, 30), moment(0)).task().clone();
    let claimed = changed(&once, &Event::Claimed { by: ME, lease: TimeDelta::seconds(9) }, moment(1)).task().clone();
    let claimed = Task { last_updated: at(1), ..claimed };
    assert!(refused(&claimed, &manual_retry(0, 30), moment(2)));
    let given_back = changed(&claimed, &Event::LeaseRanOut, moment(10)).task().clone();
    assert!(nothing(&given_back, &manual_retry(0, 30), moment(10)), "still the run that was asked for");
    let failed = changed(&claimed, &report(None, Err(broke())), moment(2)).task().clone();
    assert_eq!(failed.status, Status::RetryPending);
    let again = changed(&failed, &manual_retry(0, 30), moment(3));
    assert_eq!((again.task().run, again.task().attempt), (RUN + 2, 0));
}

#[test]
fn retries_are_counted_from_zero_again() {
    let mut now = changed(&task(Status::Failure), &manual_retry(0, 30), moment(0)).task().clone();
    let mut delays = Vec::new();
    let mut clock = 0;
    while now.status == Status::Pending {
        now = changed(&now, &Event::Claimed { by: ME, lease: TimeDelta::seconds(1) }, moment(clock)).task().clone();
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
fn only_what_failed_of_a_dependency_is_revived() {
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
                let expected = Task { manual_run: Some(RUN + 1), ..anew(&before, wait_count, RUN + 1) };
                assert_eq!(*revived.task(), expected);
                assert_eq!((revived.cause(), revived.notice()), (Cause::Manual, None));
                assert!(revived.attempt().is_none() && revived.settled().is_none());
            }
        }
    }
}

#[test]
fn who_has_not_begun_waits_again_for_parents_that_are_open_again() {
    let reopened = Event::ParentsReopened { count: 2 };
    let waiting = Task { wait_count: 1, ..task(Status::Waiting) };
    let again = changed(&waiting, &reopened, moment(0));
    assert_eq!(*again.task(), Task { wait_count: 3, ..waiting.clone() });
    assert_eq!((again.cause(), again.notice(), again.attempt()), (Cause::Manual, None, None));
    // One that waits was not begun in this run, whatever came before.
    let retried = Task { claimed_run: Some(RUN), ..waiting };
    assert_eq!(changed(&retried, &reopened, moment(0)).task().wait_count, 3);

    let pending = Task { claimed_run: None, ..task(Status::Pending) };
    let in_line = changed(&pending, &reopened, moment(0)).task().clone();
    assert_eq!(in_line, Task { wait_count: 2, ..pending }, "it stays in line and keeps count");
    let settled = Event::ParentsSettled { count: 1, doomed: false };
    assert_eq!(changed(&in_line, &settled, moment(0)).task().wait_count, 1);
    for claimed_run in [RUN - 1, RUN] {
        let begun = Task { claimed_run: Some(claimed_run), ..task(Status::Pending) };
        assert!(refused(&begun, &reopened, moment(0)), "its parents have done their part");
    }
    for (claimed_run, manual_run) in [(None, None), (Some(RUN - 1), Some(RUN))] {
        let paused = Task { claimed_run, manual_run, ..task(Status::Paused) };
        let again = changed(&paused, &reopened, moment(0)).task().clone();
        assert_eq!(again, Task { wait_count: 2, ..paused });
        assert_eq!(changed(&again, &Event::Resumed, moment(0)).task().status, Status::Waiting);
    }
    let claimed_before = Task { claimed_run: Some(RUN), ..task(Status::Paused) };
    assert!(refused(&claimed_before, &reopened, moment(0)), "its worker may be at it");
    let retrying = changed(&task(Status::RetryPending), &Event::Paused, moment(-1)).task().clone();
    assert!(refused(&retrying, &reopened, moment(0)), "it has begun, and only waits for its retry");
    for status in Status::ALL.into_iter().filter(|s| !matches!(s, Status::Waiting | Status::Pending | Status::Paused)) {
        assert!(refused(&task(status), &reopened, moment(0)), "{status:?}");
    }
}
