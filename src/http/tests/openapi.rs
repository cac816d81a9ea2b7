use std::collections::{BTreeMap, BTreeSet};

use jsonschema::Validator;
use serde_json::{Value, json};

use super::{document, document_text};
use crate::domain::request::new_batch::read_batch;
use crate::domain::request::new_policy::read_default_policy;
use crate::domain::request::new_rule::read_rules_change;
use crate::domain::request::patch::{read_heartbeat, read_patch, read_retry_request};
use crate::domain::request::problems::{FieldProblem, ProblemCode};
use crate::domain::sample::LIMITS;
use crate::http::Code;

type Reader = fn(Value) -> Result<(), Vec<FieldProblem>>;

/// The reader of each operation with a body.
const READERS: [(&str, Reader); 7] = [
    ("createTasks", |body| read_batch(body.to_string().as_bytes(), &LIMITS).map(drop)),
    ("patchTask", |body| read_patch(body, &LIMITS).map(drop)),
    ("putTask", |body| read_heartbeat(body).map(drop)),
    ("retryTask", |body| read_retry_request(body).map(drop)),
    ("retryBatch", |body| read_retry_request(body).map(drop)),
    ("putRetryPolicy", |body| read_default_policy(body, &LIMITS).map(drop)),
    ("changeRules", |body| read_rules_change(body).map(drop)),
];

/// Problems that a schema cannot express: they concern several fields, or the syntax of a URL or a timestamp.
const BEYOND_SCHEMA: [ProblemCode; 5] = [
    ProblemCode::UnknownDependency,
    ProblemCode::MissingMetadataField,
    ProblemCode::NotUnique,
    ProblemCode::NotAllowed,
    ProblemCode::Malformed,
];

/// Values that are put in the place of each value of an example.
fn substitutes() -> Vec<Value> {
    let words = ["", " ", "x", "Pending", "timeout", "custom", "2030-01-01T00:00:00Z", "429", "9xx"];
    let numbers = [json!(-1001), json!(-1), json!(0), json!(1), json!(1.5), json!(86_401), json!(1_i64 << 40)];
    let others = [json!(null), json!(true), json!([]), json!([7]), json!(["x"]), json!({}), json!({"x": 1})];
    let long = [100, 101, 255, 256, 2049, 65_537].map(|length| json!("x".repeat(length)));
    let many = [10, 11, 20, 21, 1001].map(|count| Value::Array(vec![json!({"secs": 1}); count]));
    words.map(Value::from).into_iter().chain(numbers).chain(others).chain(long).chain(many).collect()
}

fn operations(document: &Value) -> Vec<&Value> {
    let items = document["paths"].as_object().into_iter().flatten();
    items.flat_map(|(_, item)| item.as_object().into_iter().flatten()).map(|(_, operation)| operation).collect()
}

fn validator(document: &Value, schema: &Value) -> Validator {
    let mut schema = schema.clone();
    schema["components"] = document["components"].clone();
    jsonschema::draft202012::new(&schema).expect("a valid schema")
}

/// The examples of an operation, and bodies with the fields that they do not show.
fn bodies(operation: &Value) -> Vec<Value> {
    let examples = operation["requestBody"]["content"]["application/json"]["examples"].as_object();
    let shown = examples.into_iter().flatten().map(|(_, example)| example["value"].clone());
    let webhook = json!({"kind": "Webhook", "trigger": "End", "condition": "Success", "params": {
        "url": "http://127.0.0.1/x", "verb": "Post", "body": {"a": 1}, "headers": {"X-Mine": "1"}}});
    let more = match operation["operationId"].as_str().unwrap() {
        "createTasks" => vec![json!({
            "tasks": [{"id": "a", "name": "n", "kind": "k", "timeout": 60, "priority": 5, "metadata": {"a": 1},
                "on_start": webhook, "on_success": [webhook], "on_failure": [webhook], "on_retry": [webhook],
                "expected_count": 3, "dead_end_barrier": true, "run_at": "2030-01-01T00:00:00Z", "fair_key": "t",
                "rules": [{"type": "Capacity", "max_capacity": 5, "matcher": {"kind": "k", "status": "Running", "fields": ["a"]}},
                          {"type": "Concurrency", "max_concurrency": 5, "matcher": {"kind": "k"}}],
                "dedupe_strategy": [{"kind": "k", "status": "Pending", "fields": ["a"]}]},
                {"name": "n", "kind": "k", "dependencies": [{"id": "a", "requires_success": false}],
                 "retry": {"max_retries": 1, "strategy": "exponential_backoff", "initial_delay_secs": 1,
                           "backoff_multiplier": 2.5, "max_delay_secs": 9, "jitter_ms": 0, "retry_on": ["timeout"],
                           "retry_on_status": ["5xx"], "no_retry_on_status": ["429"], "expires_after_secs": 5}}],
            "on_batch_complete": [webhook], "scope": "s", "metadata": {"a": 1}, "fair_key": "t", "dead_end_cancel": true,
        })],
        "patchTask" => vec![json!({
            "status": "Failure", "failure_reason": "no", "failure_type": "server_error", "retry_after_secs": 7,
            "metadata": {"a": 1}, "new_success": 2, "new_failures": 3, "expected_count": 4, "priority": -5, "run": 6,
        })],
        "retryTask" | "retryBatch" => vec![json!({"requested_by": "me", "cascade": false, "dry_run": false})],
        "putRetryPolicy" => vec![
            json!({"max_retries": 1, "strategy": "fixed_delay", "delay_secs": 5}),
            json!({"max_retries": 1, "strategy": "custom", "schedule": [{"secs": 5}, {"hours": 1}, {"days": 1}]}),
            json!({"max_retries": 1, "strategy": "immediate", "jitter_ms": 5}),
        ],
        _ => Vec::new(),
    };
    shown.chain(more).collect()
}

/// The paths of all values in a body.
fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    match value {
        Value::Object(map) => map.iter().for_each(|(name, item)| pointers(item, &format!("{at}/{name}"), found)),
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(i, item)| pointers(item, &format!("{at}/{i}"), found));
        }
        _ => {}
    }
}

/// All bodies that differ from `body` in one place.
fn variants(body: &Value) -> Vec<(String, Value)> {
    let mut places = Vec::new();
    pointers(body, "", &mut places);
    let mut variants = Vec::new();
    for place in places.iter().filter(|place| !place.contains("/metadata/") && !place.contains("/params/body/")) {
        for substitute in substitutes() {
            let mut changed = body.clone();
            *changed.pointer_mut(place).unwrap() = substitute;
            variants.push((place.clone(), changed));
        }
        if let Some((parent, name)) = place.rsplit_once('/') {
            let mut changed = body.clone();
            if changed.pointer_mut(parent).and_then(Value::as_object_mut).is_some_and(|map| map.remove(name).is_some())
            {
                variants.push((format!("{place} removed"), changed));
            }
        }
        let mut changed = body.clone();
        if let Some(map) = changed.pointer_mut(place).and_then(Value::as_object_mut) {
            map.insert("unexpected".into(), json!(1));
            variants.push((format!("{place}/unexpected"), changed));
        }
    }
    variants
}

#[test]
fn request_bodies_are_accepted_exactly_as_described() {
    let document = document(&LIMITS);
    let readers: BTreeMap<&str, Reader> = READERS.into_iter().collect();
    let (mut compared, mut wrong) = (0, Vec::new());
    for operation in operations(&document).into_iter().filter(|operation| operation.get("requestBody").is_some()) {
        let id = operation["operationId"].as_str().unwrap();
        let read = readers.get(id).unwrap_or_else(|| panic!("{id} has a body but no reader in this test"));
        let schema = validator(&document, &operation["requestBody"]["content"]["application/json"]["schema"]);
        for body in bodies(operation) {
            let problems: Vec<String> = schema.iter_errors(&body).map(|error| error.to_string()).collect();
            assert!(problems.is_empty(), "{id}: {body}: {problems:?}");
            assert!(read(body.clone()).is_ok(), "{id}: {body}: {:?}", read(body.clone()));
            for (place, changed) in variants(&body) {
                compared += 1;
                let shown = || changed.to_string().chars().take(400).collect::<String>();
                match (schema.is_valid(&changed), read(changed.clone())) {
                    (true, Ok(())) | (false, Err(_)) => {}
                    (true, Err(problems)) => {
                        let known = problems.iter().all(|problem| BEYOND_SCHEMA.contains(&problem.code));
                        if !known {
                            wrong.push(format!("{id}: {place}: described, but refused: {problems:?}: {}", shown()));
                        }
                    }
                    (false, Ok(())) => {
                        // A body that may be left out may be null.
                        let optional = changed.is_null() && operation["requestBody"]["required"] == json!(false);
                        if !optional {
                            wrong.push(format!("{id}: {place}: accepted, but not described: {}", shown()));
                        }
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} bodies: {:#?}", wrong.len(), &wrong[..wrong.len().min(20)]);
    assert!(compared > 10_000, "only {compared} bodies were compared");
}

#[test]
fn the_bodies_of_this_test_have_every_described_field() {
    let document = document(&LIMITS);
    let mut seen = BTreeSet::new();
    for operation in operations(&document).into_iter().filter(|operation| operation.get("requestBody").is_some()) {
        for body in bodies(operation) {
            let mut places = Vec::new();
            pointers(&body, "", &mut places);
            seen.extend(places.iter().filter_map(|place| Some(place.rsplit_once('/')?.1.to_owned())));
        }
    }
    for (name, schema) in crate::domain::request::schemas() {
        for field in schema["properties"].as_object().into_iter().flatten().map(|(field, _)| field) {
            assert!(seen.contains(field), "{name}.{field} is in no body");
        }
    }
}

/// The values of all keywords with this name in a schema.
fn keywords<'a>(schema: &'a Value, name: &str, found: &mut Vec<&'a Value>) {
    match schema {
        Value::Object(map) => {
            found.extend(map.get(name));
            map.values().for_each(|value| keywords(value, name, found));
        }
        Value::Array(items) => items.iter().for_each(|item| keywords(item, name, found)),
        _ => {}
    }
}

#[test]
fn request_schemas_suit_generators() {
    let document = document(&LIMITS);
    for (name, schema) in crate::domain::request::schemas() {
        let mut defaults = Vec::new();
        keywords(&schema, "default", &mut defaults);
        assert!(defaults.is_empty(), "{name}: generated clients would send every default");
    }
    let schemas = document["components"]["schemas"].as_object().unwrap();
    for (name, schema) in schemas {
        assert!(!name.starts_with("New"), "{name} collides with constructors in Go");
        for alternative in schema["oneOf"].as_array().into_iter().flatten() {
            assert!(alternative.get("$ref").is_some(), "{name} has an alternative without a name: {alternative}");
        }
    }
    let mut references = Vec::new();
    keywords(&document, "$ref", &mut references);
    for reference in references.into_iter().filter_map(Value::as_str) {
        let name = reference.strip_prefix("#/components/schemas/").expect(reference);
        assert!(schemas.contains_key(name), "{name} is not described");
    }
}

#[test]
fn every_operation_is_described_completely() {
    for operation in operations(&document(&LIMITS)) {
        let id = operation["operationId"].as_str().unwrap();
        let responses = operation["responses"].as_object().unwrap();
        assert!(responses.contains_key("500") && responses.contains_key("431"), "{id}");
        let required =
            operation["parameters"].as_array().into_iter().flatten().filter(|p| p["required"] == json!(true));
        for parameter in required {
            assert!(parameter.get("example").is_some(), "{id}: {} has no example", parameter["name"]);
        }
        if let Some(body) = operation.get("requestBody") {
            let examples = body["content"]["application/json"]["examples"].as_object();
            assert!(examples.is_some_and(|examples| !examples.is_empty()), "{id} has no example");
        }
        if let Some(security) = operation["security"].as_array() {
            assert!(security.contains(&json!({})), "{id}: keys are optional");
        }
    }
}

#[test]
fn the_description_states_the_limits_of_the_configuration() {
    let document = document(&LIMITS);
    let max = &document["components"]["schemas"]["ImmediateRetry"]["properties"]["max_retries"]["maximum"];
    assert_eq!(max, &json!(LIMITS.retry.max_retries));
    let mut limits = Vec::new();
    keywords(&document, "x-limit", &mut limits);
    assert!(limits.len() > 10, "{limits:?}");
    for name in limits.into_iter().filter_map(Value::as_str) {
        assert!(crate::domain::request::limit(name, &LIMITS).is_some(), "{name} has no value");
    }
    assert!(document_text(&LIMITS).ends_with("}\n"));
}

#[test]
fn every_code_is_documented_and_no_other() {
    let page = include_str!("../../../docs/errors.md");
    let documented: BTreeSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("| <a id=\"")?.split('"').next()).collect();
    let codes = Code::ALL.iter().map(|code| code.as_str()).chain(ProblemCode::ALL.map(ProblemCode::as_str));
    assert_eq!(documented, codes.collect());
}
