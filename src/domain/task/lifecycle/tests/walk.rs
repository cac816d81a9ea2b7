use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::domain::retry::failure::RetryAfter;

fn some_failure(trigger: Trigger, choice: u8) -> Failure {
    let failure_type = if choice.is_multiple_of(7) { FailureType::ValidationError } else { FailureType::Unknown };
    let retry_after = choice.is_multiple_of(5).then_some(RetryAfter::Secs(u64::from(choice)));
    Failure { retry_after, ..failure(trigger, failure_type) }
}

/// Picks an event that fits the run and claim of the task. The walk chooses the times.
fn event(choice: u8, task: &Task) -> Event {
    let (run, claim) = (task.run, task.claim);
    match choice % 18 {
        0 => Event::ParentsSettled { count: 1, doomed: false },
        1 => Event::ParentsSettled { count: 2, doomed: choice > 200 },
        2 | 3 => Event::Claimed { by: INSTANCE, lease: TimeDelta::seconds(20) },
        4 | 5 => Event::Started { by: INSTANCE, claim },
        6 => Event::StartFailed { by: INSTANCE, claim, failure: some_failure(Trigger::WebhookFailure, choice) },
        7 => Event::LeaseRanOut,
        8 => Event::TimedOut,
        9 => report(None, Err(some_failure(Trigger::Explicit, choice))),
        10 => report(Some(run), Err(some_failure(Trigger::Explicit, choice))),
        11 => report(Some(run - 1), Err(broke())),
        12 => report(Some(run), Ok(())).clone(),
        13 | 14 => Event::RetryDue,
        15 => Event::Paused,
        16 => Event::Resumed,
        _ if choice > 230 => Event::Canceled { reason: "canceled by ada".into() },
        _ => report(Some(run - 1), Ok(())),
    }
}

/// Picks an event of a manual retry of the task or of its parents.
fn manual_event(choice: u8) -> Event {
    let wait_count = i32::from(choice % 3);
    match choice % 5 {
        0..3 => manual_retry(wait_count, 15),
        3 => Event::Revived { wait_count: wait_count + 1 },
        _ => Event::ParentsReopened { count: wait_count + 1 },
    }
}

fn beginning(has_policy: bool) -> Task {
    Task {
        attempt: 0,
        run: 0,
        deferrals: 0,
        claimed_run: None,
        wait_count: 2,
        retry: has_policy.then(policy),
        ..task(Status::Waiting)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// After any sequence of events, each change is valid, runs have no gaps, each run is recorded at most once, the
    /// retries never exceed the policy, and a terminal task never changes again.
    #[test]
    fn any_sequence_of_events_keeps_the_invariants(
        steps in prop::collection::vec((any::<u8>(), 0i64..30), 1..200),
        has_policy in any::<bool>(),
    ) {
        let mut now = beginning(has_policy);
        let mut clock = 0;
        let mut recorded = BTreeSet::new();
        for (choice, pause) in steps {
            clock += pause;
            let event = event(choice, &now);
            let Ok(Some(transition)) = decide(&now, &event, moment(clock)) else { continue };
            check(&now, &event, &transition);
            if let Some(record) = transition.attempt() {
                prop_assert!(recorded.insert(record.run), "run {} is recorded twice", record.run);
            }
            now = transition.task().clone();
            prop_assert!(now.attempt <= now.retry.as_ref().map_or(0, |p| p.max_retries));
            prop_assert_eq!(i32::from(now.attempt) + now.deferrals, now.run);
            prop_assert!(now.wait_count >= 0);
            prop_assert!(recorded.iter().copied().eq(0..i32::try_from(recorded.len()).unwrap()));
            prop_assert!(recorded.last().is_none_or(|last| *last <= now.run));
        }
    }

    /// After any sequence of events and manual retries, each change is valid, runs are recorded at most once and in
    /// order, each record has the right retry type, and a queued or waiting task has no traces of its last execution.
    #[test]
    fn any_sequence_with_manual_retries_keeps_the_invariants(
        steps in prop::collection::vec((any::<u8>(), 0i64..30, prop::bool::weighted(0.2)), 1..200),
        has_policy in any::<bool>(),
    ) {
        let mut now = beginning(has_policy);
        let mut clock = 0;
        let mut recorded = Vec::new();
        let mut requested = BTreeSet::new();
        for (choice, pause, is_manual) in steps {
            clock += pause;
            let event = if is_manual { manual_event(choice) } else { event(choice, &now) };
            let Ok(Some(transition)) = decide(&now, &event, moment(clock)) else { continue };
            check(&now, &event, &transition);
            if let Some(record) = transition.attempt() {
                prop_assert!(recorded.last().is_none_or(|last| *last < record.run));
                prop_assert_eq!(record.retry_type == Some(RetryType::Manual), requested.contains(&record.run));
                recorded.push(record.run);
            }
            now = Task { last_updated: at(clock), ..transition.task().clone() };
            if matches!(event, Event::RetriedManually { .. } | Event::Revived { .. }) {
                requested.insert(now.run);
            }
            prop_assert!(now.attempt <= now.retry.as_ref().map_or(0, |p| p.max_retries));
            prop_assert!(now.wait_count >= 0);
            if matches!(now.status, Status::Pending | Status::Waiting) {
                prop_assert_eq!((now.failure_type, now.started_at), (None, None));
            }
            prop_assert!(!now.status.is_executing() || now.wait_count == 0, "an executing task waits for no parent");
        }
    }
}
