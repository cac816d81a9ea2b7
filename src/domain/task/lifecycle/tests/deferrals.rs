use super::*;
use crate::domain::retry::failure::RetryAfter;
use crate::domain::retry::policy::Policy;

fn limited(trigger: Trigger, secs: u64) -> Failure {
    Failure { retry_after: Some(RetryAfter::Secs(secs)), ..failure(trigger, FailureType::RateLimit) }
}

/// Every event that requests a delay of `secs` seconds, with the status in which it arrives.
fn requested_delays(secs: u64) -> [(Status, Event); 4] {
    let answer = Failure { http_status: Some(429), ..limited(Trigger::WebhookFailure, secs) };
    let reported = limited(Trigger::Explicit, secs);
    [
        (Status::Claimed, Event::StartFailed { by: INSTANCE, claim: CLAIM, failure: answer }),
        (Status::Claimed, report(None, Err(reported.clone()))),
        (Status::Running, report(Some(RUN), Err(reported.clone()))),
        (Status::Pending, report(Some(RUN), Err(reported))),
    ]
}

fn claimed_this_run(status: Status) -> Task {
    Task { claimed_run: Some(RUN), ..task(status) }
}

#[test]
fn a_deferral_counts_as_a_run_but_not_as_an_attempt() {
    for (status, event) in requested_delays(90) {
        for retry in [policy(), Policy { max_retries: ATTEMPT, ..policy() }] {
            let before = Task { retry: Some(retry), ..claimed_this_run(status) };
            let deferred = changed(&before, &event, Moment { jitter: Jitter::Exactly(1.0), ..moment(0) });
            let expected = Task {
                status: Status::RetryPending,
                run: RUN + 1,
                deferrals: before.deferrals + 1,
                claimed_by: None,
                slots: Vec::new(),
                timeout_at: None,
                next_retry_at: Some(at(90)),
                failure_type: Some(FailureType::RateLimit),
                failure_reason: Some("it broke".into()),
                ..before.clone()
            };
            assert_eq!(*deferred.task(), expected, "{event:?}");
            assert_eq!(deferred.task().attempt, ATTEMPT);
            assert_eq!(deferred.notice(), Some(Notice::Retry));
            assert!(deferred.settled().is_none());
            let record = deferred.attempt().expect("a record");
            assert_eq!((record.outcome, record.refusal), (AttemptOutcome::Deferred, None));
            assert_eq!((record.delay_ms, record.jitter_ms), (Some(90_000), Some(0)), "a requested delay has no jitter");
            assert_eq!(record.next_retry_at, Some(at(90)));
            assert_eq!(record.failure.as_ref().map(|f| f.failure_type), Some(FailureType::RateLimit));
        }
    }
}

#[test]
fn a_deferred_task_becomes_due_like_any_retry() {
    let (status, event) = requested_delays(90)[2].clone();
    let deferred = changed(&claimed_this_run(status), &event, moment(0)).task().clone();
    assert!(refused(&deferred, &Event::RetryDue, moment(89)));
    let due = changed(&deferred, &Event::RetryDue, moment(90)).task().clone();
    assert_eq!((due.status, due.attempt, due.run), (Status::Pending, ATTEMPT, RUN + 1));
    assert_eq!(due.deferrals, deferred.deferrals, "the count is kept");
}

#[test]
fn a_task_without_a_policy_is_not_deferred() {
    for (status, event) in requested_delays(90) {
        let failed = changed(&Task { retry: None, ..claimed_this_run(status) }, &event, moment(0));
        assert_eq!(failed.task().status, Status::Failure, "{event:?}");
        assert_eq!(failed.attempt().and_then(|a| a.refusal), Some(Final::NoPolicy));
    }
}

#[test]
fn past_the_deferral_limit_a_rate_limit_is_a_failure() {
    for (status, event) in requested_delays(90) {
        let most = moment(0).limits.max_deferrals;
        let last = changed(&Task { deferrals: most - 1, ..claimed_this_run(status) }, &event, moment(0));
        assert_eq!((last.task().deferrals, last.task().attempt), (most, ATTEMPT));
        let past = changed(&Task { deferrals: most, ..claimed_this_run(status) }, &event, moment(0));
        let after = past.task();
        assert_eq!((after.status, after.deferrals, after.attempt), (Status::RetryPending, most, ATTEMPT + 1));
        assert_eq!(after.next_retry_at, Some(at(40)), "the policy sets the delay");
        assert_eq!(past.attempt().map(|a| a.outcome), Some(AttemptOutcome::Retried));
    }
}

#[test]
fn an_expired_task_fails_with_its_last_error_and_the_expiry() {
    // The task was created 1000 s ago. Both the next delay of the policy and the requested delay are 40 s.
    let waits = requested_delays(40);
    let retries = [(Status::Running, report(None, Err(broke()))), (Status::Claimed, start_failed())];
    for (status, event) in waits.into_iter().chain(retries) {
        let expiring = |secs| {
            let retry = Policy { expires_after_secs: Some(secs), ..policy() };
            changed(&Task { retry: Some(retry), ..claimed_this_run(status) }, &event, moment(0))
        };
        assert_eq!(expiring(1040).task().status, Status::RetryPending, "{event:?}");
        let failed = expiring(1039);
        let after = failed.task();
        assert_eq!((after.status, after.attempt, after.run), (Status::Failure, ATTEMPT, RUN), "{event:?}");
        let reason = after.failure_reason.clone().unwrap_or_default();
        assert!(reason.starts_with("it broke") && reason.contains("expired"), "{reason}");
        let record = failed.attempt().expect("a record");
        assert_eq!((record.outcome, record.refusal), (AttemptOutcome::Failed, Some(Final::Expired)));
        assert_eq!(after.failure_type, record.failure.as_ref().map(|f| f.failure_type));
        assert_eq!(record.failure.as_ref().map(|f| f.reason.as_str()), Some("it broke"), "the error alone");
        assert!(record.reason.contains("expired"), "{}", record.reason);
    }
}

fn start_failed() -> Event {
    Event::StartFailed { by: INSTANCE, claim: CLAIM, failure: refusal() }
}

#[test]
fn jitter_counts_towards_the_expiry() {
    let retry = Policy { expires_after_secs: Some(1040), ..policy() };
    let before = Task { retry: Some(retry), ..claimed_this_run(Status::Running) };
    let late = changed(&before, &report(None, Err(broke())), Moment { jitter: Jitter::Exactly(0.5), ..moment(0) });
    assert_eq!(late.task().status, Status::Failure);
}

#[test]
fn an_attempt_records_the_type_of_its_retry() {
    let (automatic, manual) = (Some(RetryType::Automatic), Some(RetryType::Manual));
    let cases = [
        (0, None, None),
        (RUN, None, automatic),
        (RUN, Some(RUN), manual),
        (RUN, Some(RUN - 1), automatic),
        (1, Some(1), manual),
    ];
    let ends = [
        (Status::Running, report(None, Ok(()))),
        (Status::Running, report(None, Err(broke()))),
        (Status::Running, Event::TimedOut),
        (Status::Claimed, start_failed()),
        (Status::Running, Event::Canceled { reason: "canceled by ada".into() }),
        (Status::Claimed, manual_retry(0, 30)),
        (Status::Claimed, requested_delays(90)[0].1.clone()),
    ];
    for (run, manual_run, expected) in cases {
        for (status, event) in &ends {
            let before = Task { run, claimed_run: Some(run), manual_run, ..task(*status) };
            let ended = changed(&before, event, moment(0));
            assert_eq!(ended.attempt().map(|a| a.retry_type), Some(expected), "{run} {manual_run:?} {event:?}");
        }
    }
    assert_eq!([RetryType::Automatic.as_str(), RetryType::Manual.as_str()], ["automatic", "manual"]);
}

#[test]
fn only_the_scheduling_of_a_retry_is_announced() {
    let ends = [
        (Status::Running, report(None, Err(broke()))),
        (Status::Running, Event::TimedOut),
        (Status::Claimed, start_failed()),
        (Status::Pending, report(Some(RUN), Err(broke()))),
    ];
    for (status, event) in ends.into_iter().chain(requested_delays(90)) {
        let scheduled = changed(&claimed_this_run(status), &event, moment(0));
        assert_eq!(scheduled.task().status, Status::RetryPending);
        assert_eq!(scheduled.notice(), Some(Notice::Retry), "{event:?}");
        let final_ = changed(&Task { retry: None, ..claimed_this_run(status) }, &event, moment(0));
        assert_eq!(final_.notice(), Some(Notice::Failure), "{event:?}");
    }
    let paused = changed(&task(Status::RetryPending), &Event::Paused, moment(-2));
    let resumed = changed(paused.task(), &Event::Resumed, moment(-1));
    assert_eq!((resumed.task().status, resumed.notice()), (Status::RetryPending, None));
    assert_eq!(changed(resumed.task(), &Event::RetryDue, moment(0)).notice(), None);
    for (event, _) in table() {
        for status in Status::ALL {
            let Ok(Some(transition)) = decide(&task(status), &event, moment(0)) else { continue };
            let scheduled = transition.task().status == Status::RetryPending && status.is_executing();
            assert_eq!(transition.notice() == Some(Notice::Retry), scheduled, "{status:?} {event:?}");
        }
    }
}

#[test]
fn attempt_outcomes_have_stable_names() {
    use AttemptOutcome::{Canceled, Deferred, Failed, Lost, Retried, Success};
    let names = [Success, Retried, Deferred, Failed, Canceled, Lost].map(AttemptOutcome::as_str);
    assert_eq!(names, ["success", "retried", "deferred", "failed", "canceled", "lost"]);
    for name in names {
        assert_eq!(AttemptOutcome::parse(name).map(AttemptOutcome::as_str), Some(name));
    }
    assert_eq!(AttemptOutcome::parse("Lost"), None);
}
