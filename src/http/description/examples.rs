//! Examples for every operation: parameters and request bodies that the service accepts. A test sends them.

use serde_json::{Map, Value, json};

/// The id in the examples. Tests replace it by the id of a task or batch that exists.
const ID: &str = "01998b5e-7b6a-7c3e-9d55-3f2a1c0b4e77";

pub fn add(document: &mut Value) {
    let paths = document["paths"].as_object_mut().into_iter().flatten();
    for (_, operation) in paths.flat_map(|(_, item)| item.as_object_mut().into_iter().flatten()) {
        let id = operation["operationId"].as_str().unwrap_or_default().to_owned();
        let parameters = operation.get_mut("parameters").and_then(Value::as_array_mut);
        for parameter in parameters.into_iter().flatten() {
            let name = parameter["name"].as_str().unwrap_or_default().to_owned();
            if let Some(value) = parameter_example(&id, &name) {
                parameter["example"] = value;
            }
        }
        let bodies = bodies(&id);
        if !bodies.is_empty() && operation.get("requestBody").is_some() {
            operation["requestBody"]["content"]["application/json"]["examples"] = Value::Object(bodies);
        }
    }
}

/// An example for a parameter. Parameters of which only some can be combined have none.
fn parameter_example(operation: &str, name: &str) -> Option<Value> {
    Some(match name {
        "id" if operation == "redeliver" => json!(1),
        "id" | "batch_id" | "task_id" => json!(ID),
        "kind" => json!("import"),
        "name" => json!("orders of March"),
        "scope" => json!("nightly"),
        "status" if operation == "listWebhookDeliveries" => json!("exhausted"),
        "status" => json!("RetryPending"),
        "metadata" => json!(r#"{"tenant": "acme"}"#),
        "created_after" | "since" => json!("2026-01-01T00:00:00Z"),
        "created_before" => json!("2100-01-01T00:00:00Z"),
        "page_size" => json!(50),
        "state" => json!("failed"),
        "page" | "run" | "wait_secs" => json!(0),
        "until" => json!("terminal"),
        "fields" => json!("metadata"),
        "verbose" => json!(true),
        _ => return None,
    })
}

fn bodies(operation: &str) -> Map<String, Value> {
    let example = |summary: &str, value: Value| json!({"summary": summary, "value": value});
    let examples = match operation {
        "createTasks" => vec![
            ("pipeline", example("Two tasks, of which the second depends on the first", pipeline())),
            ("strategies", example("A batch with one task per retry strategy", strategies())),
            ("rules", example("A limit per tenant, and deduplication", rules())),
        ],
        "updateTask" | "patchTask" => vec![
            ("success", example("The run succeeded", json!({"status": "Success"}))),
            (
                "failure",
                example(
                    "The run failed",
                    json!({"status": "Failure", "failure_reason": "connection refused", "failure_type": "network_error"}),
                ),
            ),
            (
                "rate_limit",
                example(
                    "The run met a rate limit; try again in a minute",
                    json!({"status": "Failure", "failure_reason": "too many requests", "failure_type": "rate_limit",
                           "retry_after_secs": 60}),
                ),
            ),
            (
                "progress",
                example("Progress, and a field of the metadata", json!({"new_success": 10, "metadata": {"page": 2}})),
            ),
        ],
        "heartbeat" | "putTask" | "sendHeartbeat" => vec![
            ("alive", example("The worker is alive", json!({}))),
            (
                "progress",
                example("The worker is alive and has made progress", json!({"new_success": 10, "new_failures": 1})),
            ),
        ],
        "retryTask" | "retryBatch" => vec![
            ("dry_run", example("What would change", json!({"dry_run": true}))),
            ("retry", example("A manual retry", json!({"requested_by": "jo@example.com", "cascade": true}))),
        ],
        "putRetryPolicy" => vec![
            (
                "backoff",
                example(
                    "Delays of 10, 30, 90 s …",
                    json!({"max_retries": 5, "initial_delay_secs": 10, "backoff_multiplier": 3.0, "max_delay_secs": 600}),
                ),
            ),
            (
                "immediate",
                example(
                    "Three retries without a delay",
                    json!({"max_retries": 3, "strategy": "immediate", "jitter_ms": 0}),
                ),
            ),
        ],
        "changeRules" => vec![(
            "limit",
            example(
                "At most two imports at a time",
                json!({"kind": "import", "rules": [
                    {"type": "Concurrency", "max_concurrency": 2, "matcher": {"kind": "import"}}]}),
            ),
        )],
        _ => Vec::new(),
    };
    examples.into_iter().map(|(name, example)| (name.to_owned(), example)).collect()
}

fn pipeline() -> Value {
    json!([
        {"id": "fetch", "name": "fetch orders", "kind": "import", "timeout": 600, "retry": {"max_retries": 3}},
        {"id": "report", "name": "send report", "kind": "report", "dependencies": [{"id": "fetch"}]},
    ])
}

fn strategies() -> Value {
    json!({
        "scope": "nightly",
        "metadata": {"tenant": "acme"},
        "tasks": [
            {"name": "immediate", "kind": "import",
             "retry": {"max_retries": 3, "strategy": "immediate", "jitter_ms": 0}},
            {"name": "backoff", "kind": "import",
             "retry": {"max_retries": 5, "strategy": "exponential_backoff", "initial_delay_secs": 10,
                       "backoff_multiplier": 3.0, "max_delay_secs": 600, "retry_on_status": ["5xx", "429"],
                       "no_retry_on_status": ["501"]}},
            {"name": "fixed", "kind": "import",
             "retry": {"max_retries": 10, "strategy": "fixed_delay", "delay_secs": 60, "expires_after_secs": 3600}},
            {"name": "custom", "kind": "import",
             "retry": {"max_retries": 4, "strategy": "custom", "schedule": [{"secs": 30}, {"hours": 2}, {"days": 1}],
                       "retry_on": ["timeout", "explicit"]}},
        ],
    })
}

fn rules() -> Value {
    json!({
        "tasks": [{
            "name": "orders of March", "kind": "import", "metadata": {"tenant": "acme", "month": "2026-03"},
            "on_start": {"kind": "Webhook", "params": {"url": "http://127.0.0.1:9000/start", "verb": "Post"}},
            "on_failure": [{"kind": "Webhook", "params": {"url": "http://127.0.0.1:9000/failed", "verb": "Post"}}],
            "rules": [{"type": "Concurrency", "max_concurrency": 2, "matcher": {"fields": ["tenant"]}}],
            "dedupe_strategy": [{"fields": ["tenant", "month"]}],
        }],
    })
}
