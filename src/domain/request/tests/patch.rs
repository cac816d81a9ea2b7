use serde_json::json;

use super::*;
use crate::domain::sample::LIMITS;

fn patch(body: Value) -> Result<Patch, Vec<FieldProblem>> {
    read_patch(body, &LIMITS)
}

/// Checks that the patch is refused for one reason, which names this field.
fn refuse_patch(field: &str, body: Value) {
    let shown = body.to_string();
    let found = patch(body).expect_err(&shown);
    assert!(found.len() == 1 && found[0].starts_with(&format!("{field}: ")), "{shown}: {found:?}");
}

#[test]
fn an_empty_patch_changes_nothing() {
    assert_eq!(patch(json!({})).unwrap(), Patch::default());
    let nulls = json!({
        "status": null, "failure_reason": null, "failure_type": null, "retry_after_secs": null, "metadata": null,
        "new_success": null, "new_failures": null, "expected_count": null, "priority": null, "run": null,
    });
    assert_eq!(patch(nulls).unwrap(), Patch::default());
    assert_eq!(patch(json!(null)).unwrap_err(), ["body: must be an object, not null"]);
    assert_eq!(
        read_heartbeat(json!(null)).unwrap(),
        HeartbeatRequest::default(),
        "the body of a heartbeat may be left out"
    );
    assert_eq!(read_retry_request(json!(null)), read_retry_request(json!({})), "the body of a retry may be left out");
    for (body, what) in [(json!([]), "an array"), (json!("x"), "a string"), (json!(1), "a number")] {
        assert_eq!(patch(body.clone()).unwrap_err(), [format!("body: must be an object, not {what}")]);
        assert_eq!(read_heartbeat(body).unwrap_err(), [format!("body: must be an object, not {what}")]);
    }
}

#[test]
fn all_fields_of_a_patch_are_read() {
    let read = patch(json!({
        "status": "Failure", "failure_reason": "no", "failure_type": "server_error", "retry_after_secs": 7,
        "metadata": {"a": 1}, "new_success": 2, "new_failures": 3, "expected_count": 4, "priority": -5, "run": 6,
    }));
    let failure = Failure {
        trigger: Trigger::Explicit,
        failure_type: FailureType::ServerError,
        reason: "no".into(),
        http_status: None,
        retry_after: Some(RetryAfter::Secs(7)),
    };
    let expected = Patch {
        result: Some(Err(failure)),
        metadata: Some(json!({"a": 1})),
        progress: HeartbeatRequest { success: 2, failures: 3 },
        expected_count: Some(4),
        priority: Some(-5),
        run: Some(6),
        proven: false,
    };
    assert_eq!(read.unwrap(), expected);
}

#[test]
fn a_reported_status_is_success_or_failure_in_any_spelling() {
    for text in ["Success", "success", "SUCCESS", "sUcCeSs"] {
        assert_eq!(patch(json!({"status": text})).unwrap().result, Some(Ok(())), "{text}");
    }
    for text in ["Failure", "failure", "FAILURE"] {
        let read = patch(json!({"status": text, "failure_reason": "x"})).unwrap();
        assert!(matches!(read.result, Some(Err(_))), "{text}");
    }
    for status in Status::ALL.into_iter().filter(|s| !matches!(s, Status::Success | Status::Failure)) {
        refuse_patch("status", json!({"status": status}));
        refuse_patch("status", json!({"status": status.as_str()}));
    }
    for wrong in [json!("done"), json!(""), json!(1), json!([]), json!({}), json!(true)] {
        refuse_patch("status", json!({"status": wrong}));
    }
}

#[test]
fn a_reported_failure_requires_a_reason() {
    refuse_patch("failure_reason", json!({"status": "Failure"}));
    refuse_patch("failure_reason", json!({"status": "Failure", "failure_reason": null}));
    refuse_patch("failure_reason", json!({"status": "Failure", "failure_reason": ""}));
    refuse_patch("failure_reason", json!({"status": "Failure", "failure_reason": 7}));
    refuse_patch("failure_reason", json!({"status": "Failure", "failure_reason": "x".repeat(65_537)}));
    assert!(patch(json!({"status": "Failure", "failure_reason": "x".repeat(65_536)})).is_ok());
}

#[test]
fn a_missing_reason_is_reported_with_other_problems() {
    let found = patch(json!({"status": "Failure", "failure_type": "nonsense", "metadata": {"a": "\0"}, "run": -1}));
    let mut paths: Vec<String> = found.unwrap_err().iter().map(|problem| problem.path.clone()).collect();
    paths.sort_unstable();
    assert_eq!(paths, ["failure_reason", "failure_type", "metadata.a", "run"]);
}

#[test]
fn a_worker_reports_any_failure_type_but_dependency() {
    let read =
        |failure_type: Value| patch(json!({"status": "failure", "failure_reason": "x", "failure_type": failure_type}));
    for failure_type in FailureType::ALL.into_iter().filter(|t| *t != FailureType::Dependency) {
        let Some(Err(failure)) = read(json!(failure_type)).unwrap().result else { panic!("{failure_type:?}") };
        assert_eq!((failure.failure_type, failure.trigger), (failure_type, Trigger::Explicit));
    }
    let Some(Err(failure)) = read(json!(null)).unwrap().result else { panic!("a failure") };
    assert_eq!(failure.failure_type, FailureType::Unknown, "the default");
    for wrong in [json!("dependency"), json!("oops"), json!("Timeout"), json!(1), json!([])] {
        let found = read(wrong).unwrap_err();
        assert!(found.len() == 1 && found[0].starts_with("failure_type: must be one of "), "{found:?}");
    }
}

#[test]
fn failure_fields_require_status_failure() {
    for status in [json!("Success"), json!(null)] {
        refuse_patch("failure_reason", json!({"status": status, "failure_reason": "x"}));
        refuse_patch("failure_type", json!({"status": status, "failure_type": "timeout"}));
        refuse_patch("retry_after_secs", json!({"status": status, "retry_after_secs": 5}));
    }
}

#[test]
fn numbers_of_a_patch_have_limits() {
    let cases = [
        ("new_success", 0, i32::MAX),
        ("new_failures", 0, i32::MAX),
        ("expected_count", 0, i32::MAX),
        ("run", 0, i32::MAX),
        ("priority", -1000, 1000),
    ];
    for (field, low, high) in cases {
        for value in [low, high] {
            assert!(patch(json!({field: value})).is_ok(), "{field} = {value}");
        }
        let past = [json!(i64::from(low) - 1), json!(i64::from(high) + 1), json!(u64::MAX), json!(0.5)];
        for value in past.into_iter().chain([json!("1"), json!(true), json!([]), json!({})]) {
            refuse_patch(field, json!({field: value}));
        }
    }
}

#[test]
fn wrong_metadata_and_unknown_fields_of_a_patch_are_refused() {
    for wrong in [json!([]), json!("x"), json!(1), json!({"m": "x".repeat(65_536)})] {
        refuse_patch("metadata", json!({"metadata": wrong}));
    }
    refuse_patch("metadata.a[0]", json!({"metadata": {"a": ["\0"]}}));
    for typo in ["stauts", "Status", "id", "name", "timeout", "attempt", "success"] {
        assert_eq!(patch(json!({typo: 1})).unwrap_err(), [format!("{typo}: unknown field")]);
    }
}

#[test]
fn a_heartbeat_adds_to_counters() {
    assert_eq!(read_heartbeat(json!({})).unwrap(), HeartbeatRequest::default());
    let read = read_heartbeat(json!({"new_success": 5, "new_failures": i32::MAX})).unwrap();
    assert_eq!(read, HeartbeatRequest { success: 5, failures: i64::from(i32::MAX) });
    for field in ["new_success", "new_failures"] {
        for wrong in [json!(-1), json!(1_i64 << 31), json!(1.5), json!("1"), json!([]), json!(true)] {
            let found = read_heartbeat(json!({field: wrong})).unwrap_err();
            assert!(found.len() == 1 && found[0].starts_with(&format!("{field}: ")), "{found:?}");
        }
    }
    for typo in ["success", "failures", "status", "run"] {
        assert_eq!(read_heartbeat(json!({typo: 1})).unwrap_err(), [format!("{typo}: unknown field")]);
    }
}

#[test]
fn retry_after_secs_requires_a_retryable_failure() {
    let failed = |more: Value| {
        let mut body = json!({"status": "Failure", "failure_reason": "later"});
        if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
            body.extend(more);
        }
        body
    };
    for secs in [1, i32::MAX] {
        let Some(Err(failure)) = patch(failed(json!({"retry_after_secs": secs}))).unwrap().result else { panic!() };
        assert_eq!(failure.retry_after, Some(RetryAfter::Secs(u64::try_from(secs).unwrap())));
        assert_eq!(failure.failure_type, FailureType::Unknown);
    }
    for wrong in [json!(0), json!(-1), json!(1_i64 << 31), json!(u64::MAX), json!(1.5), json!("5"), json!([])] {
        refuse_patch("retry_after_secs", failed(json!({"retry_after_secs": wrong})));
    }
    for failure_type in FailureType::ALL.into_iter().filter(|t| *t != FailureType::Dependency) {
        let body = failed(json!({"failure_type": failure_type, "retry_after_secs": 5}));
        if matches!(failure_type, FailureType::ValidationError | FailureType::AuthenticationError) {
            refuse_patch("retry_after_secs", body);
        } else {
            assert!(patch(body).is_ok(), "{failure_type:?}");
        }
        assert!(patch(failed(json!({"failure_type": failure_type, "retry_after_secs": null}))).is_ok());
    }
}

#[test]
fn a_retry_request_is_read_or_refused() {
    let read = |body: Value| read_retry_request(body);
    let default = RetryRequest { requested_by: None, cascade: true, dry_run: false };
    assert_eq!(read(json!({})).unwrap(), default);
    assert_eq!(read(json!({"requested_by": null, "cascade": null, "dry_run": null})).unwrap(), default);
    let whole = read(json!({"requested_by": "Ann Ö", "cascade": false, "dry_run": true})).unwrap();
    assert_eq!(whole, RetryRequest { requested_by: Some("Ann Ö".into()), cascade: false, dry_run: true });
    assert!(read(json!({"requested_by": "ä".repeat(255)})).is_ok());

    let refuse = |field: &str, value: Value| {
        let found = read(json!({field: value})).unwrap_err();
        assert!(found.len() == 1 && found[0].starts_with(&format!("{field}: ")), "{found:?}");
    };
    for wrong in [json!(""), json!("x".repeat(256)), json!(1), json!([]), json!({}), json!(true), json!("a\0b")] {
        refuse("requested_by", wrong);
    }
    for field in ["cascade", "dry_run"] {
        for wrong in [json!("true"), json!(1), json!(0), json!([]), json!({})] {
            refuse(field, wrong);
        }
    }
    for typo in ["cascad", "force", "run", "id"] {
        assert_eq!(read(json!({typo: true})).unwrap_err(), [format!("{typo}: unknown field")]);
    }
    for (body, what) in [(json!([]), "an array"), (json!("x"), "a string"), (json!(true), "a boolean")] {
        assert_eq!(read(body).unwrap_err(), [format!("body: must be an object, not {what}")]);
    }
}

#[test]
fn a_heartbeat_may_carry_the_nulls_of_a_patch() {
    let nulls = json!({"status": null, "failure_reason": null, "failure_type": null, "retry_after_secs": null,
                       "metadata": null, "expected_count": null, "priority": null, "run": null, "new_success": 2});
    assert_eq!(read_heartbeat(nulls), Ok(HeartbeatRequest { success: 2, failures: 0 }));
    assert_eq!(read_heartbeat(json!({"status": "Success"})).unwrap_err(), ["status: unknown field"]);
    assert_eq!(read_heartbeat(json!({"typo": null})).unwrap_err(), ["typo: unknown field"]);
}
