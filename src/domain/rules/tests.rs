use std::collections::BTreeMap;

use serde_json::json;

use super::*;

fn read(rules: &Value) -> Result<Vec<Rule>, Vec<String>> {
    let mut problems = Problems::default();
    let mut fields = Fields::open(json!({"rules": rules}), "[0]", &mut problems).unwrap();
    let rules = read_rules(&mut fields, "own", &mut problems);
    problems.or(Some(rules))
}

fn matcher(kind: &str, fields: &[&str]) -> RuleMatcher {
    let fields = fields.iter().map(|field| (*field).to_owned()).collect();
    RuleMatcher { kind: kind.into(), status: Counted::Running, fields }
}

#[test]
fn both_spellings_of_concurrency_are_read_and_one_is_written() {
    let with = |kind: &str, max: &str| {
        let rule = json!([{"type": kind, max: 3, "matcher": {"kind": "k", "status": "running", "fields": ["b", "a"]}}]);
        read(&rule).unwrap()
    };
    let rule = Rule::Concurrency { max: 3, matcher: matcher("k", &["a", "b"]) };
    for (kind, max) in
        [("Concurency", "max_concurency"), ("Concurrency", "max_concurrency"), ("Concurency", "max_concurrency")]
    {
        assert_eq!(with(kind, max), std::slice::from_ref(&rule));
    }
    let written = json!({"type": "Concurency", "max_concurency": 3,
                         "matcher": {"kind": "k", "status": "Running", "fields": ["a", "b"]}});
    assert_eq!(serde_json::to_value(&rule).unwrap(), written);
    assert_eq!(serde_json::from_value::<Rule>(written).unwrap(), rule);
}

#[test]
fn a_rule_matcher_defaults_to_the_own_kind_and_no_fields() {
    let rules = read(&json!([{"type": "Capacity", "max_capacity": 10, "matcher": {}}])).unwrap();
    assert_eq!(rules, [Rule::Capacity { max: 10, matcher: matcher("own", &[]) }]);
}

#[test]
fn each_problem_of_a_rule_names_its_path() {
    let problems = read(&json!([
        {"type": "Concurency", "matcher": {"kind": "k"}},
        {"type": "Concurency", "max_concurency": 0, "matcher": {"kind": "k", "status": "Pending"}},
        {"type": "Capacity", "max_concurency": 1, "matcher": {"kind": "k", "fields": [1, "a", "a"]}},
        {"type": "Speed", "max_capacity": 1, "matcher": 7},
        {"max_capacity": 1, "matcher": {"kinds": "k"}},
        "none",
    ]))
    .unwrap_err();
    assert_eq!(
        problems,
        [
            "[0].rules[0].max_concurency: is required",
            "[0].rules[1].matcher.status: must be Running, which counts Claimed and Running tasks",
            "[0].rules[1].max_concurency: must be a whole number from 1 to 2147483647, not 0",
            "[0].rules[2].matcher.fields[0]: must be a string, not a number",
            "[0].rules[2].matcher.fields[2]: \"a\" is named twice",
            "[0].rules[2].max_capacity: is required",
            "[0].rules[2].max_concurency: unknown field",
            "[0].rules[3].type: must be one of Concurency, Concurrency, Capacity, not \"Speed\"",
            "[0].rules[3].matcher: must be an object, not a number",
            "[0].rules[4].type: is required",
            "[0].rules[4].matcher.kinds: unknown field",
            "[0].rules[5]: must be an object, not a string",
        ]
    );
}

#[test]
fn a_task_must_have_the_fields_that_its_rules_compare() {
    let metadata = json!({"a": null});
    let target = RuleTarget { metadata: Some(&metadata), has_expected_count: false };
    let rule = |fields: &[&str]| Rule::Concurrency { max: 1, matcher: matcher("k", fields) };
    assert_eq!(target.problem(&rule(&[])), None);
    assert_eq!(target.problem(&rule(&["a"])), None);
    assert!(target.problem(&rule(&["a", "b"])).unwrap().contains("\"b\""));
    let capacity = Rule::Capacity { max: 1, matcher: matcher("k", &[]) };
    assert!(target.problem(&capacity).unwrap().contains("expected_count"));
    assert_eq!(RuleTarget { has_expected_count: true, ..target }.problem(&capacity), None);
}

#[test]
fn slot_keys_are_equal_exactly_when_the_values_are() {
    let fields = ["a".to_owned(), "b".to_owned()];
    let key = |metadata: Value| key_of(&fields, Some(&metadata));
    assert_eq!(key(json!({"a": 1, "b": {"x": 1, "y": 2}})), key(json!({"c": 9, "b": {"y": 2.0, "x": 1}, "a": 1.0})));
    assert_ne!(key(json!({"a": 1, "b": 2})), key(json!({"a": "1", "b": 2})));
    assert_ne!(key(json!({"a": [1], "b": 2})), key(json!({"a": 1, "b": [2]})));
    assert_ne!(key(json!({"a": null, "b": 2})), None);
    assert_eq!(key(json!({"a": 1})), None);
    assert_eq!(key_of(&fields, None), None);
    let long = |end: &str| key(json!({"a": "x".repeat(5000) + end, "b": 1})).unwrap();
    assert_eq!(long("1").len(), "sha256:".len() + 64);
    assert_ne!(long("1"), long("2"));
}

#[test]
fn the_lowest_of_several_limits_on_one_slot_counts() {
    let concurrency = |max| Rule::Concurrency { max, matcher: matcher("k", &[]) };
    let capacity = Rule::Capacity { max: 7, matcher: matcher("k", &[]) };
    let rules = [(concurrency(5), 2), (concurrency(3), 2), (capacity, 2), (concurrency(9), 1)];
    assert_eq!(
        limits(rules.iter().map(|(rule, slot)| (rule, *slot))),
        [
            SlotLimit { slot: 1, max_tasks: Some(9), max_load: None },
            SlotLimit { slot: 2, max_tasks: Some(3), max_load: Some(7) }
        ]
    );
}

fn limit(slot: i64, max_tasks: i32) -> SlotLimit {
    SlotLimit { slot, max_tasks: Some(max_tasks), max_load: None }
}

fn task(takes: &[i64], limits: &[SlotLimit]) -> Candidate {
    Candidate { takes: takes.to_vec(), remaining: 0, limits: limits.to_vec() }
}

#[test]
fn blocked_tasks_do_not_hold_up_tasks_behind_them() {
    use Admission::{Blocked, Later, Starts};
    let limited = task(&[1], &[limit(1, 2)]);
    let unlimited = task(&[], &[]);
    let mut slots = BTreeMap::from([(1, Slot { used: 1, load: 0 })]);
    let queue = [limited.clone(), limited.clone(), unlimited.clone(), limited, unlimited.clone(), unlimited];
    assert_eq!(admit(&queue, &mut slots, 3), [Starts, Blocked, Starts, Blocked, Starts, Later]);
    assert_eq!(slots[&1].used, 2);
}

#[test]
fn a_task_starts_only_if_all_its_rules_allow_it() {
    use Admission::{Blocked, Starts};
    let mut slots = BTreeMap::from([(1, Slot::default()), (2, Slot { used: 1, load: 0 })]);
    let both = task(&[1, 2], &[limit(1, 1), limit(2, 1)]);
    let one = task(&[1], &[limit(1, 1)]);
    assert_eq!(admit(&[both.clone(), one, both], &mut slots, 9), [Blocked, Starts, Blocked]);
    assert_eq!((slots[&1].used, slots[&2].used), (1, 1));
}

#[test]
fn capacity_counts_the_remaining_work() {
    use Admission::{Blocked, Starts};
    let heavy = |remaining| Candidate {
        takes: vec![1],
        remaining,
        limits: vec![SlotLimit { slot: 1, max_tasks: None, max_load: Some(100) }],
    };
    let mut slots = BTreeMap::from([(1, Slot { used: 1, load: 40 })]);
    // The load must be below the limit before the start, however much the task adds.
    assert_eq!(admit(&[heavy(59), heavy(500), heavy(0)], &mut slots, 9), [Starts, Starts, Blocked]);
    assert_eq!(slots[&1], Slot { used: 3, load: 599 });
}

#[test]
fn tasks_without_the_rule_are_counted_but_not_blocked() {
    use Admission::{Blocked, Starts};
    let mut slots = BTreeMap::from([(1, Slot::default())]);
    let bare = task(&[1], &[]);
    let ruled = task(&[1], &[limit(1, 2)]);
    assert_eq!(admit(&[bare.clone(), bare.clone(), ruled, bare], &mut slots, 9), [Starts, Starts, Blocked, Starts]);
    assert_eq!(slots[&1].used, 3);
}
