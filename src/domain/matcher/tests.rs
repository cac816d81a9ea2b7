use std::collections::BTreeSet;

use serde_json::json;

use super::*;

const METADATA: &str = r#"{"a": 1, "b": {"x": null}, "c": null}"#;

fn metadata() -> Value {
    serde_json::from_str(METADATA).unwrap()
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
