use serde_json::json;

use super::*;
use crate::domain::request::problems::FieldProblem;
use crate::domain::sample::LIMITS;

const METADATA: &str = r#"{"a": 1, "b": {"x": null}, "c": null}"#;

fn metadata() -> Value {
    serde_json::from_str(METADATA).unwrap()
}

fn read(strategy: &Value) -> Result<Vec<DedupeMatcher>, Vec<FieldProblem>> {
    let mut reading = Reading::new(&LIMITS);
    let task = Place::named("[0]");
    let list = task.field("dedupe_strategy");
    if strategy.is_null() {
        return Ok(Vec::new());
    }
    let read = DedupeStrategy::read(Source::Tree(strategy.clone()), list, &mut reading);
    let matchers = read.map(|matchers| {
        let complete = |(i, matcher): (usize, DedupeMatcherInput)| {
            matcher.matcher("own", Some(&metadata()), list.item(i), &mut reading)
        };
        matchers.0.into_iter().enumerate().map(complete).collect()
    });
    reading.problems.or(matchers)
}

fn matcher(kind: &str, status: Option<Status>, fields: &[&str]) -> DedupeMatcher {
    DedupeMatcher { kind: kind.into(), status, fields: fields.iter().map(|name| (*name).to_owned()).collect() }
}

#[test]
fn a_matcher_defaults_to_alive_tasks_of_its_own_kind() {
    assert_eq!(read(&json!([])).unwrap(), []);
    assert_eq!(read(&json!(null)).unwrap(), []);
    let found = read(&json!([
        {},
        {"kind": null, "status": null, "fields": null},
        {"kind": "other", "status": "Pending", "fields": ["c", "a"]},
        {"status": "retry_pending", "fields": ["b"]},
        {"status": "SUCCESS", "fields": []},
    ]));
    let expected = [
        matcher("own", None, &[]),
        matcher("own", None, &[]),
        matcher("other", Some(Status::Pending), &["a", "c"]),
        matcher("own", Some(Status::RetryPending), &["b"]),
        matcher("own", Some(Status::Success), &[]),
    ];
    assert_eq!(found.unwrap(), expected);
    for status in Status::ALL {
        assert_eq!(matcher("k", None, &[]).accepts(status), !status.is_terminal());
        assert!(Status::ALL.iter().all(|other| matcher("k", Some(*other), &[]).accepts(status) == (*other == status)));
    }
}

#[test]
fn each_problem_of_a_matcher_names_its_path() {
    let mut found = read(&json!([
        {"fields": ["a", "z", "a", 7, "x"]},
        {"kind": "", "status": "done", "feilds": []},
        {"kind": "k".repeat(101), "status": 3, "fields": "a"},
        "a",
    ]))
    .unwrap_err();
    let statuses =
        "must be one of Waiting, Pending, Claimed, Running, RetryPending, Paused, Success, Failure, Canceled";
    let expected = [
        "[0].dedupe_strategy[0].fields[1]: the metadata of the task has no field \"z\"".into(),
        "[0].dedupe_strategy[0].fields[2]: \"a\" is named twice".into(),
        "[0].dedupe_strategy[0].fields[3]: must be a string, not a number".into(),
        "[0].dedupe_strategy[0].fields[4]: the metadata of the task has no field \"x\"".into(),
        "[0].dedupe_strategy[1].feilds: unknown field".into(),
        "[0].dedupe_strategy[1].kind: must have 1 to 100 characters, not 0".into(),
        format!("[0].dedupe_strategy[1].status: {statuses}, not \"done\""),
        "[0].dedupe_strategy[2].fields: must be an array, not a string".into(),
        "[0].dedupe_strategy[2].kind: must have 1 to 100 characters, not 101".into(),
        format!("[0].dedupe_strategy[2].status: {statuses}, not 3"),
        "[0].dedupe_strategy[3]: must be an object, not a string".into(),
    ];
    found.sort();
    assert_eq!(found, expected);
    assert_eq!(read(&json!({})).unwrap_err(), ["[0].dedupe_strategy: must be an array, not an object"]);
    assert!(read(&json!(vec![json!({}); 10])).is_ok());
    let many = read(&json!(vec![json!({}); 11])).unwrap_err();
    assert_eq!(many, ["[0].dedupe_strategy: must have at most 10 entries, not 11"]);
    let many = read(&json!([{"fields": vec!["a"; 21]}])).unwrap_err();
    assert_eq!(many, ["[0].dedupe_strategy[0].fields: must have at most 20 entries, not 21"]);
}
