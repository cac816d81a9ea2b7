use super::*;
use crate::domain::retry::failure::RetryAfter;
use crate::domain::retry::policy::{StatusPattern, Strategy};
use crate::domain::sample::{at, failure, policy};

fn context(attempt: i16) -> RetryContext {
    RetryContext {
        attempt,
        deferrals: 0,
        created_at: at(-100),
        now: at(0),
        jitter: 0.0,
        limits: RetryLimits::default(),
    }
}

fn patterns(list: &[&str]) -> Vec<StatusPattern> {
    list.iter().map(|text| StatusPattern::parse(text).unwrap()).collect()
}

fn answered(status: u16) -> Failure {
    Failure { http_status: Some(status), ..failure(Trigger::WebhookFailure, FailureType::of_http_status(status)) }
}

fn decision(policy: &Policy, failure: &Failure, context: RetryContext) -> RetryDecision {
    judge(Some(policy), failure, context).decision
}

#[test]
fn policy_failure_and_attempt_decide_about_a_retry() {
    use FailureType as F;
    let only_timeout = Policy { retry_on: vec![Trigger::Timeout], ..policy() };
    let cases = [
        (policy(), Trigger::Timeout, F::Timeout, 0, None),
        (policy(), Trigger::Explicit, F::Unknown, 2, None),
        (policy(), Trigger::Explicit, F::RateLimit, 0, None),
        (policy(), Trigger::Explicit, F::Unknown, 3, Some(Final::Exhausted)),
        (policy(), Trigger::Explicit, F::ValidationError, 0, Some(Final::Type(F::ValidationError))),
        (policy(), Trigger::Explicit, F::AuthenticationError, 3, Some(Final::Type(F::AuthenticationError))),
        (policy(), Trigger::WebhookFailure, F::NetworkError, 0, None),
        (only_timeout.clone(), Trigger::Timeout, F::Timeout, 0, None),
        (only_timeout, Trigger::Explicit, F::Unknown, 0, Some(Final::Trigger(Trigger::Explicit))),
    ];
    for (policy, trigger, failure_type, attempt, expected) in cases {
        let found = decision(&policy, &failure(trigger, failure_type), context(attempt));
        match expected {
            Some(why) => assert_eq!(found, RetryDecision::Final(why), "{trigger:?} {failure_type:?} {attempt}"),
            None => assert!(matches!(found, RetryDecision::Retry { .. }), "{trigger:?} {failure_type:?}: {found:?}"),
        }
    }
    let none = judge(None, &failure(Trigger::Timeout, F::Timeout), context(0));
    assert_eq!(none.decision, RetryDecision::Final(Final::NoPolicy));
}

#[test]
fn status_lists_override_the_failure_type() {
    let lists = Policy {
        retry_on_status: patterns(&["4xx", "302"]),
        no_retry_on_status: patterns(&["404", "503"]),
        ..policy()
    };
    let cases = [
        (400, None),
        (401, None),
        (404, Some(Final::Status(404))),
        (429, None),
        (500, None),
        (503, Some(Final::Status(503))),
        (302, None),
    ];
    for (status, expected) in cases {
        match (expected, decision(&lists, &answered(status), context(0))) {
            (Some(why), found) => assert_eq!(found, RetryDecision::Final(why), "{status}"),
            (None, found) => assert!(matches!(found, RetryDecision::Retry { .. }), "{status}: {found:?}"),
        }
    }
    for (status, fails) in [(400, true), (403, true), (408, false), (429, false), (502, false), (301, false)] {
        let found = decision(&policy(), &answered(status), context(0));
        assert_eq!(matches!(found, RetryDecision::Final(_)), fails, "{status} without lists");
    }
}

#[test]
fn a_requested_delay_defers_the_task() {
    let limited = |after| Failure { retry_after: Some(after), ..answered(429) };
    let day = 86_400;
    let cases = [
        (RetryAfter::Secs(7), Some(7000)),
        (RetryAfter::At(at(9)), Some(9000)),
        (RetryAfter::Secs(10 * day), Some(day * 1000)),
        (RetryAfter::Secs(u64::MAX), Some(day * 1000)),
        (RetryAfter::At(at(-1)), None),
        (RetryAfter::At(at(0)), None),
        (RetryAfter::Secs(0), None),
    ];
    for (after, wait) in cases {
        match (wait, decision(&policy(), &limited(after), context(0))) {
            (Some(ms), RetryDecision::Defer { delay_ms, at: due }) => {
                assert_eq!(delay_ms, ms, "{after:?}");
                assert_eq!((due - at(0)).num_milliseconds().cast_unsigned(), ms);
            }
            (None, RetryDecision::Retry { .. }) => {}
            (wait, found) => panic!("{after:?}: {wait:?}, {found:?}"),
        }
    }
    // Fractions of a millisecond are rounded up: the retry is never before the requested time.
    let odd = at(9) + TimeDelta::microseconds(1);
    let RetryDecision::Defer { at: due, .. } = decision(&policy(), &limited(RetryAfter::At(odd)), context(0)) else {
        panic!()
    };
    assert!(due >= odd, "{due}");
    // A deferral needs no retry to be left, but the policy must allow a retry.
    assert!(matches!(decision(&policy(), &limited(RetryAfter::Secs(1)), context(3)), RetryDecision::Defer { .. }));
    let never = Policy { no_retry_on_status: patterns(&["429"]), ..policy() };
    assert_eq!(decision(&never, &limited(RetryAfter::Secs(1)), context(0)), RetryDecision::Final(Final::Status(429)));
    let other = Policy { retry_on: vec![Trigger::Timeout], ..policy() };
    assert!(matches!(
        decision(&other, &limited(RetryAfter::Secs(1)), context(0)),
        RetryDecision::Final(Final::Trigger(_))
    ));
    // The number of deferrals is limited.
    let often = RetryContext { deferrals: 100, ..context(0) };
    assert!(matches!(decision(&policy(), &limited(RetryAfter::Secs(1)), often), RetryDecision::Retry { .. }));
    let often = RetryContext { deferrals: 100, ..context(3) };
    assert_eq!(decision(&policy(), &limited(RetryAfter::Secs(1)), often), RetryDecision::Final(Final::Exhausted));
}

#[test]
fn no_retry_or_deferral_is_scheduled_past_the_expiry() {
    // The task was created 100 s ago, and the first delay is 10 s.
    for (secs, expires) in [(111, false), (110, false), (109, true), (1, true)] {
        let policy = Policy { expires_after_secs: Some(secs), jitter_ms: 0, ..policy() };
        let found = judge(Some(&policy), &answered(500), context(0));
        assert_eq!(found.decision == RetryDecision::Final(Final::Expired), expires, "{secs}");
        assert_eq!(found.reason.contains("expired"), expires);
        let limited = Failure { retry_after: Some(RetryAfter::Secs(10)), ..answered(429) };
        assert_eq!(
            decision(&policy, &limited, context(0)) == RetryDecision::Final(Final::Expired),
            expires,
            "a deferral too"
        );
    }
    let at_once = Policy { strategy: Strategy::Immediate, expires_after_secs: Some(100), jitter_ms: 0, ..policy() };
    assert!(matches!(decision(&at_once, &answered(500), context(0)), RetryDecision::Retry { .. }));
}

#[test]
fn a_retry_is_due_after_delay_and_jitter() {
    let context = RetryContext { jitter: 1.0, ..context(1) };
    let found = decision(&policy(), &failure(Trigger::Timeout, FailureType::Timeout), context);
    let RetryDecision::Retry { delay_ms, jitter_ms, at: due } = found else { panic!("{found:?}") };
    assert_eq!((delay_ms, jitter_ms), (20_000, 500));
    assert_eq!((due - at(0)).num_milliseconds(), 20_500);
}

#[test]
fn every_judgement_has_a_reason() {
    let reason = |failure: &Failure, attempt| judge(Some(&policy()), failure, context(attempt)).reason;
    assert_eq!(reason(&answered(500), 1), "retry 2 of 3: backoff of 10 s × 2^1, at most 300 s, 0 ms of jitter");
    assert_eq!(reason(&answered(500), 3), "not retried: all 3 retries are used up");
    assert_eq!(reason(&answered(400), 0), "not retried: validation_error is final");
    let limited = Failure { retry_after: Some(RetryAfter::Secs(5)), ..answered(429) };
    assert_eq!(reason(&limited, 0), "deferred for 5000 ms as requested; no retry is used up");
}
