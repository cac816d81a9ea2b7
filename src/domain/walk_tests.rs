use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

/// Any event, for a task that is at `run`; times are chosen by the walk.
fn event(choice: u8, run: i32) -> Event {
    let failure_type = if choice.is_multiple_of(7) { FailureType::ValidationError } else { FailureType::Unknown };
    match choice % 18 {
        0 => Event::ParentsSettled { count: 1, doomed: false },
        1 => Event::ParentsSettled { count: 2, doomed: choice > 200 },
        2 | 3 => Event::Claimed { by: ME, lease: TimeDelta::seconds(20) },
        4 | 5 => Event::Started { by: ME },
        6 => Event::StartFailed { by: ME, failure: failure(Trigger::WebhookFailure, failure_type) },
        7 => Event::LeaseRanOut,
        8 => Event::TimedOut,
        9 => report(None, Err(failure(Trigger::Explicit, failure_type))),
        10 => report(Some(run), Err(failure(Trigger::Explicit, failure_type))),
        11 => report(Some(run - 1), Err(broke())),
        12 => report(Some(run), Ok(())).clone(),
        13 | 14 => Event::RetryDue,
        15 => Event::Paused,
        16 => Event::Resumed,
        _ if choice > 230 => Event::Canceled,
        _ => report(Some(run - 1), Ok(())),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever happens in whatever order: each change is sound, runs have no gaps, each is recorded at most once,
    /// the retries never exceed the policy, and a terminal task never changes again.
    #[test]
    fn any_walk_is_sound(steps in prop::collection::vec((any::<u8>(), 0i64..30), 1..200), has_policy in any::<bool>()) {
        let mut now = Task {
            attempt: 0,
            run: 0,
            claimed_run: None,
            wait_count: 2,
            retry: has_policy.then(policy),
            ..task(Status::Waiting)
        };
        let mut clock = 0;
        let mut recorded = BTreeSet::new();
        for (choice, pause) in steps {
            clock += pause;
            let event = event(choice, now.run);
            let Ok(Some(transition)) = decide(&now, &event, moment(clock)) else { continue };
            check(&now, &transition);
            if let Some(record) = transition.attempt() {
                prop_assert!(recorded.insert(record.run), "run {} is recorded twice", record.run);
            }
            now = transition.task().clone();
            prop_assert!(now.attempt <= now.retry.as_ref().map_or(0, |p| p.max_retries));
            prop_assert_eq!(i32::from(now.attempt), now.run);
            prop_assert!(now.wait_count >= 0);
            prop_assert!(recorded.iter().copied().eq(0..i32::try_from(recorded.len()).unwrap()));
            prop_assert!(recorded.last().is_none_or(|last| *last <= now.run));
        }
    }
}
