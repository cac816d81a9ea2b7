use std::collections::BTreeMap;

use serde_json::json;

use super::*;

fn matcher(kind: &str, fields: &[&str]) -> RuleMatcher {
    let fields = fields.iter().map(|field| (*field).to_owned()).collect();
    RuleMatcher { kind: kind.into(), status: Counted::Running, fields }
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
