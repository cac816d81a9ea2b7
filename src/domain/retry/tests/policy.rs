use super::*;
use crate::domain::sample::{backoff, policy};

#[test]
fn backoff_delays_double_up_to_the_cap() {
    let doubling = Policy { strategy: backoff(5, 2.0, 300), ..policy() };
    let delays: Vec<u64> = (0..9).map(|a| doubling.delay_ms(a)).collect();
    assert_eq!(delays, [5000, 10_000, 20_000, 40_000, 80_000, 160_000, 300_000, 300_000, 300_000]);
}

#[test]
fn backoff_delays_that_overflow_are_capped() {
    for multiplier in [10.0, 1e300, f64::MAX] {
        let steep = Policy { strategy: backoff(5, multiplier, 300), ..policy() };
        assert_eq!((steep.delay_ms(0), steep.delay_ms(300)), (5000, 300_000), "{multiplier}");
        assert_eq!(steep.delay_ms(i16::MAX), 300_000);
    }
    let flat = Policy { strategy: backoff(5, 1.0, 300), ..policy() };
    assert_eq!(flat.delay_ms(i16::MAX), 5000);
}

#[test]
fn immediate_fixed_and_custom_delays_follow_the_policy() {
    let delays = |strategy: Strategy| {
        (0..5).map(|a| Policy { strategy: strategy.clone(), ..policy() }.delay_ms(a)).collect::<Vec<_>>()
    };
    assert_eq!(delays(Strategy::Immediate), [0; 5]);
    assert_eq!(delays(Strategy::FixedDelay { delay_secs: 7 }), [7000; 5]);
    let schedule = vec![Delay::Secs(30), Delay::Hours(2), Delay::Days(14)];
    let fortnight = 14 * 86_400_000;
    assert_eq!(delays(Strategy::Custom { schedule }), [30_000, 7_200_000, fortnight, fortnight, fortnight]);
}

#[test]
fn every_delay_is_explained() {
    let reason = |strategy: Strategy, attempt| Policy { strategy, ..policy() }.explain_delay(attempt);
    assert_eq!(reason(Strategy::Immediate, 0), "immediate");
    assert_eq!(reason(Strategy::FixedDelay { delay_secs: 7 }, 3), "fixed delay of 7 s");
    assert_eq!(reason(backoff(10, 1.5, 60), 2), "backoff of 10 s × 1.5^2, at most 60 s");
    let schedule = vec![Delay::Secs(30), Delay::Hours(2)];
    let custom = Strategy::Custom { schedule };
    assert_eq!(reason(custom.clone(), 0), "entry 1 of 2 in the schedule");
    assert_eq!(reason(custom, 9), "entry 2 of 2 in the schedule", "the last one repeats");
}

#[test]
fn jitter_stays_inside_its_bounds() {
    assert_eq!(policy().jitter(0.0), 0);
    assert_eq!(policy().jitter(0.999_999), 500);
    assert_eq!(policy().jitter(1.0), 500);
    assert_eq!(Policy { jitter_ms: 0, ..policy() }.jitter(0.9), 0);
}

#[test]
fn an_exact_status_pattern_wins_over_a_class() {
    let parse = |list: &[&str]| list.iter().map(|text| StatusPattern::parse(text).unwrap()).collect::<Vec<_>>();
    let policy =
        Policy { retry_on_status: parse(&["429", "5xx"]), no_retry_on_status: parse(&["4xx", "501"]), ..policy() };
    let cases = [(429, Some(true)), (404, Some(false)), (500, Some(true)), (501, Some(false)), (302, None)];
    for (status, wanted) in cases {
        assert_eq!(policy.wants_retry_of(status), wanted, "{status}");
    }
}

#[test]
fn status_patterns_are_codes_or_classes() {
    for good in ["300", "404", "599", "3xx", "4xx", "5xx"] {
        assert_eq!(String::from(StatusPattern::parse(good).unwrap()), good);
    }
    for bad in ["", "200", "2xx", "6xx", "600", "4x", "4XX", "xx", "0404", "+404", "44", "4xxx", "+4xx", "04xx", "-4xx"]
    {
        assert_eq!(StatusPattern::parse(bad), None, "{bad}");
    }
}

#[test]
fn a_policy_serializes_to_one_flat_object() {
    let schedule = vec![Delay::Secs(5), Delay::Days(1)];
    let policy = Policy { strategy: Strategy::Custom { schedule }, expires_after_secs: Some(9), ..policy() };
    let shown = serde_json::to_value(&policy).unwrap();
    assert_eq!(shown["strategy"], "custom");
    assert_eq!(shown["schedule"], serde_json::json!([{"secs": 5}, {"days": 1}]));
    assert_eq!(serde_json::from_value::<Policy>(shown).unwrap(), policy);
}
