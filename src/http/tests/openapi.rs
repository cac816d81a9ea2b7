use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::document;
use crate::domain::request::new_policy::read_default_policy;
use crate::domain::request::new_task::{RequestLimits, read_batch};
use crate::domain::request::patch::{read_patch, read_progress, read_retry_request};
use crate::domain::retry;
use crate::domain::rules::read_rules_change;

const LIMITS: RequestLimits = RequestLimits {
    tasks_per_batch: 10,
    dependencies_per_task: 10,
    links_per_batch: 1000,
    actions_per_task: 10,
    metadata_bytes: 65_536,
    action_bytes: 262_144,
    task_bytes: 1_048_576,
    retry: retry::RetryLimits {
        max_retries: 10,
        max_delay_secs: 3600,
        max_schedule_delay_secs: 86_400,
        max_retry_after_secs: 86_400,
        max_deferrals: 100,
    },
    dead_end_cancel: false,
};

/// A shape of the API description, and the reader of its objects.
struct Shape {
    schema: &'static str,
    /// The path of the object in the request, as problems name it.
    path: &'static str,
    read: fn(Value) -> Vec<String>,
}

const SHAPES: [Shape; 14] = [
    Shape { schema: "NewBatch", path: "", read: batch_problems },
    Shape { schema: "NewTask", path: "[0].", read: |task| batch_problems(json!([task])) },
    Shape {
        schema: "NewDependency",
        path: "[0].dependencies[0].",
        read: |dependency| task_problems("dependencies", &json!([dependency])),
    },
    Shape {
        schema: "NewMatcher",
        path: "[0].dedupe_strategy[0].",
        read: |matcher| task_problems("dedupe_strategy", &json!([matcher])),
    },
    Shape { schema: "NewRetry", path: "[0].retry.", read: |retry| task_problems("retry", &with_its_strategy(retry)) },
    Shape { schema: "NewRetry", path: "", read: |retry| policy_problems(with_its_strategy(retry)) },
    Shape {
        schema: "Delay",
        path: "schedule[0].",
        read: |delay| policy_problems(json!({"max_retries": 1, "strategy": "custom", "schedule": [delay]})),
    },
    Shape { schema: "Action", path: "[0].on_start.", read: |action| task_problems("on_start", &action) },
    Shape {
        schema: "WebhookParams",
        path: "[0].on_start.params.",
        read: |params| task_problems("on_start", &json!({"kind": "Webhook", "params": params})),
    },
    Shape {
        schema: "NewRuleMatcher",
        path: "[0].rules[0].matcher.",
        read: |matcher| task_problems("rules", &json!([{"type": "Capacity", "max_capacity": 1, "matcher": matcher}])),
    },
    Shape { schema: "NewRules", path: "", read: |body| read_rules_change(body).err().unwrap_or_default() },
    Shape { schema: "TaskPatch", path: "", read: |body| read_patch(body, &LIMITS).err().unwrap_or_default() },
    Shape { schema: "RetryRequest", path: "", read: |body| read_retry_request(body).err().unwrap_or_default() },
    Shape { schema: "Heartbeat", path: "", read: |body| read_progress(body).err().unwrap_or_default() },
];

#[allow(clippy::needless_pass_by_value, reason = "called with `json!`")]
fn batch_problems(body: Value) -> Vec<String> {
    read_batch(body.to_string().as_bytes(), &LIMITS).err().unwrap_or_default()
}

fn task_problems(field: &str, value: &Value) -> Vec<String> {
    batch_problems(json!([{"name": "n", "kind": "k", field: value}]))
}

fn policy_problems(body: Value) -> Vec<String> {
    read_default_policy(body, &LIMITS.retry).err().unwrap_or_default()
}

/// Adds the strategy that a field of a policy requires.
fn with_its_strategy(mut retry: Value) -> Value {
    for (field, strategy) in [("delay_secs", "fixed_delay"), ("schedule", "custom")] {
        if retry.get(field).is_some() {
            retry["strategy"] = json!(strategy);
        }
    }
    retry
}

impl Shape {
    /// The problems of an object that has only this field.
    fn problems(&self, field: &str, value: &Value) -> Vec<String> {
        let start = format!("{}{field}", self.path);
        let own = |line: &String| line.strip_prefix(&start).is_some_and(|rest| rest.starts_with([':', '[', '.']));
        (self.read)(json!({field: value})).into_iter().filter(own).collect()
    }

    fn knows(&self, field: &str) -> bool {
        let unknown = format!("{}{field}: unknown field", self.path);
        !(self.read)(json!({field: true})).contains(&unknown)
    }

    /// Whether the value is refused for its size, not for another reason such as an unknown dependency.
    fn is_out_of_bounds(&self, field: &str, value: &Value) -> bool {
        self.problems(field, value).iter().any(|line| line.contains(": must "))
    }

    /// Whether the list is refused for the number of its entries.
    fn has_too_many(&self, field: &str, entries: u64) -> bool {
        let entries = json!(vec![Value::Null; usize::try_from(entries).unwrap()]);
        let start = format!("{}{field}: must ", self.path);
        self.problems(field, &entries).iter().any(|line| line.starts_with(&start))
    }
}

fn schemas() -> Value {
    let document: Value = serde_json::from_str(&document()).expect("JSON");
    document["components"]["schemas"].clone()
}

/// The properties of an object, or of all its alternatives.
fn properties(schemas: &Value, name: &str) -> Vec<(String, Value)> {
    let schema = &schemas[name];
    let objects = schema["oneOf"].as_array().map_or(std::slice::from_ref(schema), Vec::as_slice);
    let described: Vec<(String, Value)> = objects
        .iter()
        .flat_map(|object| object["properties"].as_object().into_iter().flatten())
        .map(|(name, schema)| (name.clone(), schema.clone()))
        .collect();
    assert!(!described.is_empty(), "{name} has no properties");
    described
}

/// Every word in the source of the readers that could be the name of a field.
fn words_in_the_readers() -> BTreeSet<String> {
    let sources = [
        include_str!("../../domain/request/new_action.rs"),
        include_str!("../../domain/request/new_task.rs"),
        include_str!("../../domain/matcher/mod.rs"),
        include_str!("../../domain/request/new_policy.rs"),
        include_str!("../../domain/request/patch.rs"),
        include_str!("../../domain/rules/mod.rs"),
    ];
    let is_word = |text: &&str| !text.is_empty() && text.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    sources.iter().flat_map(|source| source.split('"')).filter(is_word).map(String::from).collect()
}

#[test]
fn readers_and_description_have_the_same_fields() {
    let schemas = schemas();
    let readers = words_in_the_readers();
    let described: BTreeSet<String> =
        SHAPES.iter().flat_map(|shape| properties(&schemas, shape.schema)).map(|(name, _)| name).collect();
    assert_eq!(
        described.difference(&readers).collect::<Vec<_>>(),
        [""; 0],
        "described, but not in the source of the readers"
    );
    for shape in &SHAPES {
        let names: BTreeSet<String> = properties(&schemas, shape.schema).into_iter().map(|(name, _)| name).collect();
        let known: BTreeSet<String> = readers.iter().filter(|word| shape.knows(word)).cloned().collect();
        assert_eq!(known, names, "{}: fields of the reader, and described fields", shape.schema);
    }
}

#[test]
fn readers_and_description_require_the_same_fields() {
    let schemas = schemas();
    for shape in &SHAPES {
        let empty = (shape.read)(json!({}));
        let strip = |line: &String| Some(line.strip_prefix(shape.path)?.strip_suffix(": is required")?.to_owned());
        let demanded: BTreeSet<String> = empty.iter().filter_map(strip).collect();
        let described = schemas[shape.schema]["required"].as_array().cloned().unwrap_or_default();
        let described: BTreeSet<String> = described.iter().filter_map(|name| name.as_str().map(String::from)).collect();
        assert_eq!(demanded, described, "{}", shape.schema);
    }
}

#[test]
fn a_delay_has_one_unit() {
    let schemas = schemas();
    let objects = schemas["Delay"]["oneOf"].as_array().cloned().unwrap_or_default();
    let required: Vec<&Value> = objects.iter().map(|object| &object["required"]).collect();
    assert_eq!(required, [&json!(["secs"]), &json!(["hours"]), &json!(["days"])]);
}

#[test]
fn readers_and_description_have_the_same_limits() {
    let schemas = schemas();
    let mut limits = 0;
    for shape in &SHAPES {
        for (field, schema) in properties(&schemas, shape.schema) {
            let mut hold = |allowed: Value, refused: Value| {
                limits += 1;
                let place = format!("{}.{field}", shape.schema);
                assert!(!shape.is_out_of_bounds(&field, &allowed), "{place}: the limit itself is allowed");
                assert!(shape.is_out_of_bounds(&field, &refused), "{place}: {refused} is past the limit");
            };
            if let Some(least) = schema["minimum"].as_f64() {
                hold(schema["minimum"].clone(), number(least - 1.0));
            }
            if let Some(most) = schema["maximum"].as_f64() {
                hold(schema["maximum"].clone(), number(most + 1.0));
            }
            let text = |length: u64| json!("x".repeat(usize::try_from(length).unwrap()));
            if let Some(least) = schema["minLength"].as_u64() {
                hold(text(least), text(least - 1));
            }
            if let Some(most) = schema["maxLength"].as_u64() {
                hold(text(most), text(most + 1));
            }
            if schema["minItems"] == json!(1) {
                hold(json!(null), json!([]));
            }
            if let Some(most) = schema["maxItems"].as_u64() {
                limits += 1;
                assert!(!shape.has_too_many(&field, most), "{}.{field}: the limit itself is allowed", shape.schema);
                assert!(shape.has_too_many(&field, most + 1), "{}.{field}: {most} are not the limit", shape.schema);
            }
        }
    }
    assert!(limits > 30, "only {limits} limits are described");
}

/// A limit as a whole number.
#[allow(clippy::cast_possible_truncation)]
fn number(value: f64) -> Value {
    json!(value as i64)
}

#[test]
fn readers_and_description_have_the_same_choices() {
    let schemas = schemas();
    let mut lists = 0;
    for shape in &SHAPES {
        for (field, schema) in properties(&schemas, shape.schema) {
            let described = choices(&schemas, &schema);
            if described.is_empty() {
                continue;
            }
            lists += 1;
            let place = format!("{}.{field}", shape.schema);
            let given = |word: &str| if is_array(&schema) { json!([word]) } else { json!(word) };
            for word in &described {
                assert!(!shape.is_out_of_bounds(&field, &given(word)), "{place}: {word} is described, but refused");
            }
            let refusal = shape.problems(&field, &given("nonsense")).join("; ");
            assert!(refusal.contains(": must be "), "{place}: {refusal}");
            if let Some(words) = refusal.split("must be one of ").nth(1).and_then(|rest| rest.split(", not ").next()) {
                let allowed: BTreeSet<&str> = words.split(", ").collect();
                assert_eq!(allowed, described.iter().map(String::as_str).collect(), "{place}");
            }
        }
    }
    assert!(lists >= 6, "only {lists} lists of words are described");
}

fn is_array(schema: &Value) -> bool {
    schema["type"].to_string().contains("array")
}

/// The values of an enumeration, however the property refers to it.
fn choices(schemas: &Value, schema: &Value) -> Vec<String> {
    if let Some(words) = schema["enum"].as_array() {
        return words.iter().filter_map(|word| word.as_str().map(String::from)).collect();
    }
    if let Some(name) = schema["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
        return choices(schemas, &schemas[name]);
    }
    let parts = schema["oneOf"].as_array().into_iter().flatten().chain(schema.get("items"));
    parts.flat_map(|part| choices(schemas, part)).collect()
}
