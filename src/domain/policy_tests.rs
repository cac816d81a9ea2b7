use super::*;

fn read_retry(mut retry: Value) -> Result<Policy, Vec<String>> {
    if let Value::Object(retry) = &mut retry {
        retry.entry("max_retries").or_insert(json!(3));
    }
    read_one(json!({"retry": retry})).map(|task| task.retry.expect("the policy"))
}

/// Refused for one reason, which names this field.
fn refuse_retry(field: &str, retry: Value) {
    let shown = retry.to_string();
    let found = read_retry(retry).expect_err(&shown);
    assert!(found.len() == 1 && found[0].starts_with(&format!("[0].retry.{field}: ")), "{shown}: {found:?}");
}

fn default_policy() -> Policy {
    Policy {
        max_retries: 3,
        strategy: Strategy::ExponentialBackoff,
        initial_delay_secs: 5,
        backoff_multiplier: 2.0,
        max_delay_secs: 300,
        jitter_ms: 500,
        retry_on: vec![Trigger::Timeout, Trigger::WebhookFailure, Trigger::Explicit],
    }
}

#[test]
fn only_max_retries_is_required() {
    assert_eq!(read_retry(json!({})).unwrap(), default_policy());
    let nulls = json!({
        "strategy": null, "initial_delay_secs": null, "backoff_multiplier": null, "max_delay_secs": null,
        "jitter_ms": null, "retry_on": null,
    });
    assert_eq!(read_retry(nulls).unwrap(), default_policy());
    assert_eq!(read_one(json!({"retry": {}})).unwrap_err(), ["[0].retry.max_retries: is required"]);
    assert_eq!(read_one(json!({"retry": null})).unwrap().retry, None);
}

#[test]
fn a_whole_policy_arrives() {
    let policy = read_retry(json!({
        "max_retries": 10, "strategy": "exponential_backoff", "initial_delay_secs": 1, "backoff_multiplier": 1.5,
        "max_delay_secs": 3600, "jitter_ms": 0, "retry_on": ["explicit", "timeout", "explicit"],
    }));
    let expected = Policy {
        max_retries: 10,
        strategy: Strategy::ExponentialBackoff,
        initial_delay_secs: 1,
        backoff_multiplier: 1.5,
        max_delay_secs: 3600,
        jitter_ms: 0,
        retry_on: vec![Trigger::Explicit, Trigger::Timeout],
    };
    assert_eq!(policy.unwrap(), expected);
}

#[test]
fn whole_numbers_have_limits() {
    let cases = [("max_retries", 1, 10), ("initial_delay_secs", 1, 3600), ("max_delay_secs", 1, 3600)];
    for (field, low, high) in cases {
        for value in [low, high] {
            assert!(read_retry(json!({field: value})).is_ok(), "{field} = {value}");
        }
        for value in [json!(low - 1), json!(high + 1), json!(-1), json!(i64::MIN), json!(u64::MAX), json!(2.5)] {
            refuse_retry(field, json!({field: value}));
        }
    }
    assert_eq!(read_retry(json!({"jitter_ms": 3_600_000})).unwrap().jitter_ms, 3_600_000);
    for value in [json!(-1), json!(3_600_001), json!(0.5)] {
        refuse_retry("jitter_ms", json!({"jitter_ms": value}));
    }
    for field in ["max_retries", "initial_delay_secs", "max_delay_secs", "jitter_ms"] {
        for wrong in [json!("3"), json!(true), json!([]), json!({})] {
            refuse_retry(field, json!({field: wrong}));
        }
    }
}

#[test]
fn the_limits_come_from_the_configuration() {
    let limits = Limits { retry: PolicyLimits { max_retries: 2, max_delay_secs: 60 }, ..LIMITS };
    let read = |retry| read_batch(json!([task_with(json!({"retry": retry}))]), &limits);
    assert!(read(json!({"max_retries": 2, "max_delay_secs": 60})).is_ok());
    assert!(read(json!({"max_retries": 3})).is_err());
    assert!(read(json!({"max_retries": 1, "max_delay_secs": 61})).is_err());
    let batch = read(json!({"max_retries": 1})).unwrap();
    assert_eq!(batch.tasks[0].retry.as_ref().map(|p| p.max_delay_secs), Some(60), "the default obeys it too");
}

#[test]
fn the_multiplier_is_at_least_one() {
    for value in [json!(1), json!(1.0), json!(7.25), json!(1e300)] {
        assert!(read_retry(json!({"backoff_multiplier": value})).is_ok(), "{value}");
    }
    for value in [json!(0.999), json!(0), json!(-2), json!(-1e300), json!("2"), json!([2]), json!({}), json!(true)] {
        refuse_retry("backoff_multiplier", json!({"backoff_multiplier": value}));
    }
    assert!(serde_json::from_str::<Value>("1e999").is_err(), "JSON has no infinite numbers");
}

#[test]
fn the_first_delay_does_not_exceed_the_longest() {
    assert!(read_retry(json!({"initial_delay_secs": 7, "max_delay_secs": 7})).is_ok());
    refuse_retry("initial_delay_secs", json!({"initial_delay_secs": 8, "max_delay_secs": 7}));
    let delays = |retry| read_retry(retry).map(|p| (p.initial_delay_secs, p.max_delay_secs)).unwrap();
    assert_eq!(delays(json!({"max_delay_secs": 3})), (3, 3), "the default gives way");
    assert_eq!(delays(json!({"initial_delay_secs": 1000})), (1000, 1000));
    assert_eq!(delays(json!({"initial_delay_secs": 3600})), (3600, 3600));
}

#[test]
fn retry_on_names_triggers() {
    for trigger in Trigger::ALL {
        let policy = read_retry(json!({"retry_on": [trigger.as_str()]})).unwrap();
        assert_eq!(policy.retry_on, [trigger]);
    }
    refuse_retry("retry_on", json!({"retry_on": []}));
    for wrong in [json!("timeout"), json!({}), json!(1)] {
        refuse_retry("retry_on", json!({"retry_on": wrong}));
    }
    for wrong in [json!("Timeout"), json!("rate_limit"), json!(1), json!(null), json!([])] {
        refuse_retry("retry_on[1]", json!({"retry_on": ["timeout", wrong]}));
    }
}

#[test]
fn strategies() {
    for wrong in [json!("linear"), json!("ExponentialBackoff"), json!(""), json!(1), json!({})] {
        refuse_retry("strategy", json!({"strategy": wrong}));
    }
}
