use super::*;
use crate::domain::retry::failure::RetryAfter;
use crate::domain::retry::policy::{StatusPattern, Strategy};
use crate::domain::sample::{at, failure, policy};

fn around(attempt: i16) -> Circumstances {
    Circumstances {
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

fn verdict(policy: &Policy, failure: &Failure, around: Circumstances) -> Verdict {
    judge(Some(policy), failure, around).verdict
}

#[test]
fn policy_times_failure_times_attempt() {
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
        let found = verdict(&policy, &failure(trigger, failure_type), around(attempt));
        match expected {
            Some(why) => assert_eq!(found, Verdict::Final(why), "{trigger:?} {failure_type:?} {attempt}"),
            None => assert!(matches!(found, Verdict::Retry { .. }), "{trigger:?} {failure_type:?}: {found:?}"),
        }
    }
    let none = judge(None, &failure(Trigger::Timeout, F::Timeout), around(0));
    assert_eq!(none.verdict, Verdict::Final(Final::NoPolicy));
}

#[test]
fn the_status_lists_override_the_type() {
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
        match (expected, verdict(&lists, &answered(status), around(0))) {
            (Some(why), found) => assert_eq!(found, Verdict::Final(why), "{status}"),
            (None, found) => assert!(matches!(found, Verdict::Retry { .. }), "{status}: {found:?}"),
        }
    }
    for (status, fails) in [(400, true), (403, true), (408, false), (429, false), (502, false), (301, false)] {
        let found = verdict(&policy(), &answered(status), around(0));
        assert_eq!(matches!(found, Verdict::Final(_)), fails, "{status} without lists");
    }
}

#[test]
fn a_known_wait_is_a_deferral() {
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
        match (wait, verdict(&policy(), &limited(after), around(0))) {
            (Some(ms), Verdict::Defer { delay_ms, at: due }) => {
                assert_eq!(delay_ms, ms, "{after:?}");
                assert_eq!((due - at(0)).num_milliseconds().cast_unsigned(), ms);
            }
            (None, Verdict::Retry { .. }) => {}
            (wait, found) => panic!("{after:?}: {wait:?}, {found:?}"),
        }
    }
    // A part of a millisecond counts up: never before the time that was asked for.
    let odd = at(9) + TimeDelta::microseconds(1);
    let Verdict::Defer { at: due, .. } = verdict(&policy(), &limited(RetryAfter::At(odd)), around(0)) else { panic!() };
    assert!(due >= odd, "{due}");
    // It needs no retry to be left, but a retry to be allowed at all.
    assert!(matches!(verdict(&policy(), &limited(RetryAfter::Secs(1)), around(3)), Verdict::Defer { .. }));
    let never = Policy { no_retry_on_status: patterns(&["429"]), ..policy() };
    assert_eq!(verdict(&never, &limited(RetryAfter::Secs(1)), around(0)), Verdict::Final(Final::Status(429)));
    let other = Policy { retry_on: vec![Trigger::Timeout], ..policy() };
    assert!(matches!(verdict(&other, &limited(RetryAfter::Secs(1)), around(0)), Verdict::Final(Final::Trigger(_))));
    // So many, and no more.
    let often = Circumstances { deferrals: 100, ..around(0) };
    assert!(matches!(verdict(&policy(), &limited(RetryAfter::Secs(1)), often), Verdict::Retry { .. }));
    let often = Circumstances { deferrals: 100, ..around(3) };
    assert_eq!(verdict(&policy(), &limited(RetryAfter::Secs(1)), often), Verdict::Final(Final::Exhausted));
}

#[test]
fn nothing_is_scheduled_past_the_expiry() {
    // Created 100 s ago, the first delay is 10 s.
    for (secs, expires) in [(111, false), (110, false), (109, true), (1, true)] {
        let policy = Policy { expires_after_secs: Some(secs), jitter_ms: 0, ..policy() };
        let found = judge(Some(&policy), &answered(500), around(0));
        assert_eq!(found.verdict == Verdict::Final(Final::Expired), expires, "{secs}");
        assert_eq!(found.reason.contains("expired"), expires);
        let limited = Failure { retry_after: Some(RetryAfter::Secs(10)), ..answered(429) };
        assert_eq!(verdict(&policy, &limited, around(0)) == Verdict::Final(Final::Expired), expires, "a deferral too");
    }
    let at_once = Policy { strategy: Strategy::Immediate, expires_after_secs: Some(100), jitter_ms: 0, ..policy() };
    assert!(matches!(verdict(&at_once, &answered(500), around(0)), Verdict::Retry { .. }));
}

#[test]
fn the_due_time_is_delay_plus_jitter() {
    let around = Circumstances { jitter: 1.0, ..around(1) };
    let found = verdict(&policy(), &failure(Trigger::Timeout, FailureType::Timeout), around);
    let Verdict::Retry { delay_ms, jitter_ms, at: due } = found else { panic!("{found:?}") };
    assert_eq!((delay_ms, jitter_ms), (20_000, 500));
    assert_eq!((due - at(0)).num_milliseconds(), 20_500);
}

#[test]
fn every_judgement_says_why() {
    let said = |failure: &Failure, attempt| judge(Some(&policy()), failure, around(attempt)).reason;
    assert_eq!(said(&answered(500), 1), "retry 2 of 3: backoff of 10 s × 2^1, at most 300 s, 0 ms of jitter");
    assert_eq!(said(&answered(500), 3), "not retried: all 3 retries are used up");
    assert_eq!(said(&answered(400), 0), "not retried: validation_error is final");
    let limited = Failure { retry_after: Some(RetryAfter::Secs(5)), ..answered(429) };
    assert_eq!(said(&limited, 0), "deferred for 5000 ms as the other side wished; no retry is used up");
}
