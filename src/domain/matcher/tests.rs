use serde_json::json;

use super::*;

const METADATA: &str = r#"{"a": 1, "b": {"x": null}, "c": null}"#;

fn metadata() -> Value {
    serde_json::from_str(METADATA).unwrap()
}

fn read(strategy: &Value) -> Result<Vec<DedupeMatcher>, Vec<String>> {
    let mut problems = Problems::default();
    let task = json!({"dedupe_strategy": strategy});
    let mut fields = Fields::open(task, "[0]", &mut problems).unwrap();
    let matchers = read_strategy(&mut fields, "own", Some(&metadata()), &mut problems);
    fields.close(&mut problems);
    problems.or(Some(matchers))
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
    let found = read(&json!([
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
        "[0].dedupe_strategy[1].kind: must have 1 to 100 characters, not 0".into(),
        format!("[0].dedupe_strategy[1].status: {statuses}, not \"done\""),
        "[0].dedupe_strategy[1].feilds: unknown field".into(),
        "[0].dedupe_strategy[2].kind: must have 1 to 100 characters, not 101".into(),
        format!("[0].dedupe_strategy[2].status: {statuses}, not 3"),
        "[0].dedupe_strategy[2].fields: must be an array, not a string".into(),
        "[0].dedupe_strategy[3]: must be an object, not a string".into(),
    ];
    assert_eq!(found, expected);
    assert_eq!(read(&json!({})).unwrap_err(), ["[0].dedupe_strategy: must be an array, not an object"]);
    assert!(read(&json!(vec![json!({}); 10])).is_ok());
    let many = read(&json!(vec![json!({}); 11])).unwrap_err();
    assert_eq!(many, ["[0].dedupe_strategy: must have at most 10 entries, not 11"]);
    let many = read(&json!([{"fields": vec!["a"; 21]}])).unwrap_err();
    assert_eq!(many, ["[0].dedupe_strategy[0].fields: must have at most 20 entries, not 21"]);
}

#[test]
fn values_contain_only_the_listed_fields() {
    let fields = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let found = values(&fields(&["a", "c"]), Some(&metadata())).map(Value::Object);
    assert_eq!(found, Some(json!({"a": 1, "c": null})));
    assert_eq!(values(&fields(&["a", "z"]), Some(&metadata())), None);
    assert_eq!(values(&fields(&["a"]), None), None);
    assert_eq!(values(&[], None), Some(Map::new()));
    assert!(key("k", &[], None).is_some() && key("k", &fields(&["a"]), None).is_none());
}

fn key_of(value: &str) -> String {
    let value: Value = serde_json::from_str(value).unwrap();
    key("k", &["a".into()], Some(&json!({"a": value, "b": 1}))).unwrap()
}

#[test]
fn keys_are_equal_exactly_when_postgresql_values_are() {
    let classes: [&[&str]; 22] = [
        &["1", "1.0", "1e0", "10e-1", "0.1E1"],
        &["-1", "-1.00"],
        &["0", "-0", "0.0", "0e5", "-0.0"],
        &["10", "1e1", "10.0"],
        &["100"],
        &["0.5", "5e-1", "0.50"],
        &["1.05"],
        &["10000000000000000000", "1e19"],
        &["9007199254740993"],
        &["9007199254740992", "9007199254740992.0"],
        &["1e300"],
        &["\"1\""],
        &["null"],
        &["\"null\""],
        &["true"],
        &["[]"],
        &["[1, 2]", "[1.0,2]"],
        &["[2, 1]"],
        &["[[1], 2]"],
        &["{}"],
        &[r#"{"x": 1, "y": {"z": [1]}}"#, r#"{"y": {"z": [1.0]}, "x": 1}"#],
        &[r#"{"x": 1}"#],
    ];
    for (i, class) in classes.iter().enumerate() {
        for (j, other) in classes.iter().enumerate() {
            for (a, b) in class.iter().flat_map(|a| other.iter().map(move |b| (a, b))) {
                assert_eq!(key_of(a) == key_of(b), i == j, "{a} and {b}");
            }
        }
    }
}

#[test]
fn keys_separate_kinds_and_field_names() {
    let all = json!({"a": 1, "b": 1, "a\":1e0,\"b": 1, "": 1});
    let lists: [&[&str]; 5] = [&[], &["a"], &["b"], &["a", "b"], &["a\":1e0,\"b"]];
    let mut keys = BTreeSet::new();
    for kind in ["k", "k\",\"a\":1e0", ""] {
        for list in lists {
            let list: Vec<String> = list.iter().map(|name| (*name).to_owned()).collect();
            assert!(keys.insert(key(kind, &list, Some(&all)).unwrap()), "{kind} {list:?}");
        }
    }
}
