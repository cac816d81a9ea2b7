use serde_json::json;

use super::*;
use crate::domain::rules::RuleTarget;
use crate::domain::sample::LIMITS;

fn read(rules: &Value) -> Result<Vec<Rule>, Vec<FieldProblem>> {
    let mut reading = Reading::new(&LIMITS);
    let task = Place::named("[0]");
    let rules = RuleList::read(Source::Tree(rules.clone()), task.field("rules"), &mut reading);
    let rules = rules.map(|list| list.0.into_iter().map(|rule| rule.rule("own")).collect());
    reading.problems.or(rules)
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
            "[0].rules[0].max_concurrency: is required",
            "[0].rules[1].max_concurency: must be a whole number from 1 to 2147483647, not 0",
            "[0].rules[1].matcher.status: must be Running, which counts Claimed and Running tasks",
            "[0].rules[2].max_capacity: is required",
            "[0].rules[2].matcher.fields[0]: must be a string, not a number",
            "[0].rules[2].matcher.fields[2]: \"a\" is named twice",
            "[0].rules[2].max_concurency: unknown field",
            "[0].rules[3].type: must be one of Concurrency, Capacity, not \"Speed\"",
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
