use serde_json::json;

use super::*;
use crate::domain::retry::RetryLimits;
use crate::domain::sample::{LIMITS, backoff};

fn read(retry: Value) -> Result<Policy, Vec<FieldProblem>> {
    read_default_policy(retry, &LIMITS)
}

/// Reads a policy with its required fields and these.
fn read_with(mut retry: Value) -> Result<Policy, Vec<FieldProblem>> {
    if let Value::Object(retry) = &mut retry {
        retry.entry("max_retries").or_insert(json!(3));
    }
    read(retry)
}

fn strategy_of(retry: Value) -> Strategy {
    read_with(retry).unwrap().strategy
}

/// Checks that the policy is refused for one reason, which names this field.
fn refuse(field: &str, retry: Value) {
    let shown = retry.to_string();
    let found = read_with(retry).expect_err(&shown);
    assert!(found.len() == 1 && found[0].starts_with(&format!("{field}: ")), "{shown}: {found:?}");
}

fn default_policy() -> Policy {
    Policy {
        max_retries: 3,
        strategy: backoff(5, 2.0, 300),
        jitter_ms: 500,
        retry_on: vec![Trigger::Timeout, Trigger::WebhookFailure, Trigger::Explicit],
        retry_on_status: Vec::new(),
        no_retry_on_status: Vec::new(),
        expires_after_secs: None,
    }
}

#[test]
fn a_policy_requires_only_max_retries() {
    assert_eq!(read_with(json!({})).unwrap(), default_policy());
    let nulls = json!({
        "strategy": null, "initial_delay_secs": null, "backoff_multiplier": null, "max_delay_secs": null,
        "delay_secs": null, "schedule": null, "jitter_ms": null, "retry_on": null, "retry_on_status": null,
        "no_retry_on_status": null, "expires_after_secs": null,
    });
    assert_eq!(read_with(nulls).unwrap(), default_policy());
    assert_eq!(read(json!({})).unwrap_err(), ["max_retries: is required"]);
    for (body, what) in [(json!(null), "null"), (json!([]), "an array"), (json!("immediate"), "a string")] {
        assert_eq!(read(body).unwrap_err(), [format!("body: must be an object, not {what}")]);
    }
}

#[test]
fn a_policy_with_all_fields_is_read() {
    let policy = read(json!({
        "max_retries": 10, "strategy": "exponential_backoff", "initial_delay_secs": 1, "backoff_multiplier": 1.5,
        "max_delay_secs": 3600, "jitter_ms": 0, "retry_on": ["explicit", "timeout", "explicit"],
        "retry_on_status": ["429", "5xx", "429"], "no_retry_on_status": ["4xx", "501"], "expires_after_secs": 86_400,
    }));
    let expected = Policy {
        max_retries: 10,
        strategy: backoff(1, 1.5, 3600),
        jitter_ms: 0,
        retry_on: vec![Trigger::Explicit, Trigger::Timeout],
        retry_on_status: vec![StatusPattern::Exact(429), StatusPattern::Class(5)],
        no_retry_on_status: vec![StatusPattern::Class(4), StatusPattern::Exact(501)],
        expires_after_secs: Some(86_400),
    };
    assert_eq!(policy.unwrap(), expected);
}

#[test]
fn whole_numbers_of_a_policy_have_limits() {
    let cases = [("max_retries", 1, 10), ("initial_delay_secs", 1, 3600), ("max_delay_secs", 1, 3600)];
    for (field, low, high) in cases {
        for value in [low, high] {
            assert!(read_with(json!({field: value})).is_ok(), "{field} = {value}");
        }
        for value in [json!(low - 1), json!(high + 1), json!(-1), json!(i64::MIN), json!(u64::MAX), json!(2.5)] {
            refuse(field, json!({field: value}));
        }
    }
    assert_eq!(read_with(json!({"jitter_ms": 3_600_000})).unwrap().jitter_ms, 3_600_000);
    for value in [json!(-1), json!(3_600_001), json!(0.5)] {
        refuse("jitter_ms", json!({"jitter_ms": value}));
    }
    for value in [1, i32::MAX] {
        let policy = read_with(json!({"expires_after_secs": value})).unwrap();
        assert_eq!(policy.expires_after_secs, u64::try_from(value).ok());
    }
    for value in [json!(0), json!(-1), json!(1_i64 << 31), json!(u64::MAX), json!(1.5)] {
        refuse("expires_after_secs", json!({"expires_after_secs": value}));
    }
    for field in ["max_retries", "initial_delay_secs", "max_delay_secs", "jitter_ms", "expires_after_secs"] {
        for wrong in [json!("3"), json!(true), json!([]), json!({})] {
            refuse(field, json!({field: wrong}));
        }
    }
}

#[test]
fn the_limits_of_a_policy_come_from_the_configuration() {
    let retry = RetryLimits { max_retries: 2, max_delay_secs: 60, max_schedule_delay_secs: 7200, ..LIMITS.retry };
    let limits = RequestLimits { retry, ..LIMITS };
    let read = |retry| read_default_policy(retry, &limits);
    assert!(read(json!({"max_retries": 2, "max_delay_secs": 60})).is_ok());
    assert!(read(json!({"max_retries": 3})).is_err());
    assert!(read(json!({"max_retries": 1, "max_delay_secs": 61})).is_err());
    let policy = read(json!({"max_retries": 1})).unwrap();
    assert_eq!(policy.strategy, backoff(5, 2.0, 60), "the default obeys it too");

    let fixed = |secs| read(json!({"max_retries": 1, "strategy": "fixed_delay", "delay_secs": secs}));
    assert!(fixed(60).is_ok() && fixed(61).is_err());
    let custom = |delay| read(json!({"max_retries": 1, "strategy": "custom", "schedule": [delay]}));
    assert!(custom(json!({"secs": 7200})).is_ok() && custom(json!({"hours": 2})).is_ok());
    assert!(custom(json!({"secs": 7201})).is_err() && custom(json!({"hours": 3})).is_err());
    assert!(custom(json!({"days": 1})).is_err());
}

#[test]
fn the_backoff_multiplier_is_at_least_one() {
    for value in [json!(1), json!(1.0), json!(7.25), json!(1e300)] {
        assert!(read_with(json!({"backoff_multiplier": value})).is_ok(), "{value}");
    }
    for value in [json!(0.999), json!(0), json!(-2), json!(-1e300), json!("2"), json!([2]), json!({}), json!(true)] {
        refuse("backoff_multiplier", json!({"backoff_multiplier": value}));
    }
    assert!(serde_json::from_str::<Value>("1e999").is_err(), "JSON has no infinite numbers");
}

#[test]
fn the_initial_delay_does_not_exceed_the_maximum() {
    assert!(read_with(json!({"initial_delay_secs": 7, "max_delay_secs": 7})).is_ok());
    refuse("initial_delay_secs", json!({"initial_delay_secs": 8, "max_delay_secs": 7}));
    assert_eq!(strategy_of(json!({"max_delay_secs": 3})), backoff(3, 2.0, 3), "the default yields");
    assert_eq!(strategy_of(json!({"initial_delay_secs": 1000})), backoff(1000, 2.0, 1000));
    assert_eq!(strategy_of(json!({"initial_delay_secs": 3600})), backoff(3600, 2.0, 3600));
}

#[test]
fn retry_on_lists_triggers() {
    for trigger in Trigger::ALL {
        let policy = read_with(json!({"retry_on": [trigger.as_str()]})).unwrap();
        assert_eq!(policy.retry_on, [trigger]);
    }
    refuse("retry_on", json!({"retry_on": []}));
    for wrong in [json!("timeout"), json!({}), json!(1)] {
        refuse("retry_on", json!({"retry_on": wrong}));
    }
    for wrong in [json!("Timeout"), json!("rate_limit"), json!(1), json!(null), json!([])] {
        refuse("retry_on[1]", json!({"retry_on": ["timeout", wrong]}));
    }
}

#[test]
fn all_strategies_are_read() {
    for wrong in [json!("linear"), json!("ExponentialBackoff"), json!(""), json!(1), json!({})] {
        refuse("strategy", json!({"strategy": wrong}));
        let beside = json!({"strategy": wrong, "delay_secs": 0, "schedule": 1, "max_delay_secs": "x"});
        refuse("strategy", beside);
    }
    assert_eq!(strategy_of(json!({"strategy": "immediate"})), Strategy::Immediate);
    assert_eq!(strategy_of(json!({"strategy": "exponential_backoff"})), backoff(5, 2.0, 300));
    let fixed = json!({"strategy": "fixed_delay", "delay_secs": 3600});
    assert_eq!(strategy_of(fixed), Strategy::FixedDelay { delay_secs: 3600 });
    let schedule = vec![Delay::Secs(30), Delay::Hours(2), Delay::Days(14), Delay::Secs(1)];
    let custom = json!({"strategy": "custom", "schedule": [{"secs": 30}, {"hours": 2}, {"days": 14}, {"secs": 1}]});
    assert_eq!(strategy_of(custom), Strategy::Custom { schedule });
}

#[test]
fn a_strategy_accepts_only_its_own_fields() {
    let fields = [
        ("initial_delay_secs", json!(7), "exponential_backoff"),
        ("backoff_multiplier", json!(1.5), "exponential_backoff"),
        ("max_delay_secs", json!(70), "exponential_backoff"),
        ("delay_secs", json!(7), "fixed_delay"),
        ("schedule", json!([{"secs": 7}]), "custom"),
    ];
    // The required field of a strategy.
    let strategies = [
        ("immediate", json!({})),
        ("exponential_backoff", json!({})),
        ("fixed_delay", json!({"delay_secs": 5})),
        ("custom", json!({"schedule": [{"hours": 5}]})),
    ];
    for (strategy, needs) in strategies {
        for (field, value, owner) in &fields {
            let mut retry = needs.clone();
            retry["max_retries"] = json!(3);
            retry["strategy"] = json!(strategy);
            retry[field] = value.clone();
            let expected = if strategy == *owner {
                vec![]
            } else {
                vec![format!("{field}: is allowed only with strategy {owner}")]
            };
            assert_eq!(read(retry.clone()).err().unwrap_or_default(), expected, "{retry}");
            if strategy != *owner {
                retry[field] = json!(null);
                assert!(read(retry.clone()).is_ok(), "null is absent: {retry}");
            }
        }
        for (needed, _) in needs.as_object().into_iter().flatten() {
            for without in [json!({"strategy": strategy}), json!({"strategy": strategy, needed: null})] {
                assert_eq!(read_with(without).unwrap_err(), [format!("{needed}: is required")]);
            }
        }
    }
    // The default strategy is the backoff.
    refuse("delay_secs", json!({"delay_secs": 5}));
    refuse("schedule", json!({"schedule": [{"secs": 5}]}));
}

#[test]
fn a_fixed_delay_has_limits() {
    for value in [json!(0), json!(-1), json!(3601), json!(u64::MAX), json!(1.5), json!("5"), json!([]), json!({})] {
        refuse("delay_secs", json!({"strategy": "fixed_delay", "delay_secs": value}));
    }
    assert_eq!(
        strategy_of(json!({"strategy": "fixed_delay", "delay_secs": 1})),
        Strategy::FixedDelay { delay_secs: 1 }
    );
}

#[test]
fn a_schedule_has_1_to_1000_entries_of_one_unit() {
    let custom = |schedule: Value| json!({"strategy": "custom", "schedule": schedule});
    for wrong in [json!([]), json!({}), json!("30s"), json!(30), json!({"secs": 30})] {
        refuse("schedule", custom(wrong));
    }
    assert!(read_with(custom(json!(vec![json!({"secs": 1}); 1000]))).is_ok());
    refuse("schedule", custom(json!(vec![json!({"secs": 1}); 1001])));
    for wrong in [json!(null), json!(30), json!("30"), json!([]), json!({}), json!({"secs": null})] {
        refuse("schedule[1]", custom(json!([{"secs": 1}, wrong])));
    }
    for two in
        [json!({"secs": 1, "hours": 1}), json!({"hours": 1, "days": 1}), json!({"secs": 1, "hours": 1, "days": 1})]
    {
        let found = read_with(custom(json!([two]))).unwrap_err();
        assert_eq!(found, ["schedule[0]: must have exactly one of secs, hours and days"]);
    }
    let Strategy::Custom { schedule } = strategy_of(custom(json!([{"secs": null, "hours": 3, "days": null}]))) else {
        panic!("a schedule")
    };
    assert_eq!(schedule, [Delay::Hours(3)], "null is absent");
    let found = read_with(custom(json!([{"secs": 1, "minutes": 1}]))).unwrap_err();
    assert_eq!(found, ["schedule[0].minutes: unknown field"]);
}

#[test]
fn delays_of_a_schedule_have_limits() {
    let custom = |delay: Value| json!({"strategy": "custom", "schedule": [delay]});
    for (unit, most) in [("secs", 30 * 86_400), ("hours", 30 * 24), ("days", 30)] {
        for value in [1, most] {
            assert!(read_with(custom(json!({unit: value}))).is_ok(), "{value} {unit}");
        }
        let wrong =
            [json!(0), json!(-1), json!(most + 1), json!(u64::MAX), json!(0.5), json!("1"), json!([]), json!(true)];
        for value in wrong {
            refuse(&format!("schedule[0].{unit}"), custom(json!({unit: value})));
        }
    }
    let found = read_with(json!({"strategy": "custom", "schedule": [{"secs": 0}, 1, {"days": 31}, {"hours": 2}]}));
    let paths: Vec<String> = found.unwrap_err().iter().map(|problem| problem.path.clone()).collect();
    assert_eq!(paths, ["schedule[0].secs", "schedule[1]", "schedule[2].days"], "all of them at once");
}

#[test]
fn status_lists_accept_codes_and_classes() {
    for list in ["retry_on_status", "no_retry_on_status"] {
        for good in ["300", "404", "599", "3xx", "4xx", "5xx"] {
            assert!(read_with(json!({list: [good]})).is_ok(), "{good}");
        }
        assert!(read_with(json!({list: []})).is_ok());
        for wrong in [json!("429"), json!(429), json!({}), json!(true)] {
            refuse(list, json!({list: wrong}));
        }
        let no_status =
            ["", "200", "2xx", "6xx", "600", "4x", "4XX", "xx", "0404", "+404", "+4xx", "04xx", "4xx ", "*"];
        for wrong in no_status.map(Value::from).into_iter().chain([json!(429), json!(null), json!(["429"])]) {
            refuse(&format!("{list}[1]"), json!({list: ["500", wrong]}));
        }
    }
}

#[test]
fn a_status_pattern_is_in_one_list_only() {
    for (both, problem) in [("429", "\"429\""), ("5xx", "\"5xx\"")] {
        let found = read_with(json!({"retry_on_status": ["300", both], "no_retry_on_status": [both, "301"]}));
        assert_eq!(found.unwrap_err(), [format!("no_retry_on_status: {problem} is also in retry_on_status")]);
    }
    assert!(read_with(json!({"retry_on_status": ["429"], "no_retry_on_status": ["4xx"]})).is_ok(), "one is more exact");
    assert!(read_with(json!({"retry_on_status": ["4xx"], "no_retry_on_status": ["429"]})).is_ok());
}

#[test]
fn unknown_fields_and_nul_in_a_policy_are_refused() {
    for typo in ["max_retry", "delay", "retries", "Strategy", "kind"] {
        assert_eq!(read_with(json!({typo: 1})).unwrap_err(), [format!("{typo}: unknown field")]);
    }
    let found = read_with(json!({"strategy": "\0"})).unwrap_err();
    assert!(found.iter().any(|line| line.starts_with("strategy: ") && line.message.contains("NUL")), "{found:?}");
}
