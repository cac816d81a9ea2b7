//! The calls that Reprise makes, as OpenAPI webhooks: what workers and receivers of notifications get.

use serde_json::{Value, json};

use crate::domain::retry::failure::FailureType;
use crate::domain::webhook::Verb;

pub fn describe(document: &mut Value) {
    document["components"]["schemas"]["TaskNotification"] = json!({
        "type": "object",
        "description": "The body of a notification: the body of the action, with the state of the task under `reprise`. \
                        A body that is not an object is sent under the key `body`.",
        "required": ["reprise"],
        "properties": {"reprise": {"$ref": "#/components/schemas/TaskNotificationState"}},
    });
    document["components"]["schemas"]["TaskNotificationState"] = task_state();
    document["components"]["schemas"]["BatchNotification"] = json!({
        "type": "object",
        "description": "The body of a notification about a batch: the body of the action, with the state of the batch \
                        under `reprise`.",
        "required": ["reprise"],
        "properties": {"reprise": {"$ref": "#/components/schemas/BatchNotificationState"}},
    });
    document["components"]["schemas"]["BatchNotificationState"] = batch_state();
    document["webhooks"] = json!({
        "start": call(
            "The start of a task",
            "Calls the `on_start` webhook of a task. An answer with 2xx means that the worker has accepted the task. The \
             worker reports to the URL in the query parameter `handle`.",
            &json!({"description": "The body of the action, unchanged"}),
            &start_parameters(),
            &json!({
                "2XX": {
                    "description": "The worker has accepted the task. The body may hold an action, which Reprise calls \
                                    if the task is canceled during this run.",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ActionInput"}}},
                },
                "default": {"description": "The run fails. docs/retries.md says which statuses are retried."},
            }),
        ),
        "notification": call(
            "A notification about a task",
            "Calls the `on_success`, `on_failure` and `on_retry` webhooks of a task, and its cancel action. At least \
             once: a receiver recognizes a repeated call by its `Idempotency-Key`.",
            &body("TaskNotification"),
            &headers(),
            &received(),
        ),
        "batchNotification": call(
            "A notification about a batch",
            "Calls the `on_batch_complete` webhooks when every task of the batch has ended. At least once, like a \
             notification about a task.",
            &body("BatchNotification"),
            &headers(),
            &received(),
        ),
    });
}

fn call(summary: &str, description: &str, body: &Value, parameters: &Value, responses: &Value) -> Value {
    let verbs = Verb::ALL.map(Verb::as_str).join(", ");
    json!({"post": {
        "summary": summary,
        "description": format!("{description} The method is the `verb` of the action, one of {verbs}; Get has no body."),
        "tags": ["webhooks"],
        "parameters": parameters,
        "requestBody": {"content": {"application/json": body}},
        "responses": responses,
    }})
}

fn body(schema: &str) -> Value {
    json!({"schema": {"$ref": format!("#/components/schemas/{schema}")}})
}

fn received() -> Value {
    json!({
        "2XX": {"description": "The notification is delivered."},
        "default": {"description": "Reprise repeats the call with growing delays, WEBHOOK_MAX_ATTEMPTS times in all."},
    })
}

fn header(name: &str, schema: &Value, description: &str) -> Value {
    json!({"name": name, "in": "header", "required": false, "schema": schema, "description": description})
}

fn headers() -> Value {
    let text = json!({"type": "string"});
    json!([
        header(
            "Idempotency-Key",
            &text,
            "The same for every repetition of the call: `<task>:<trigger>:<condition>:<run>`"
        ),
        header("X-Task-Id", &json!({"type": "string", "format": "uuid"}), "The task; absent for batches"),
        header("X-Task-Trigger", &json!({"type": "string"}), "What triggered the call"),
        header("X-Task-Attempt", &json!({"type": "integer"}), "The number of retries so far"),
        header("traceparent", &text, "W3C trace context"),
        header("webhook-id", &text, "Standard Webhooks: the id of the message, if a signing secret is set"),
        header("webhook-timestamp", &text, "Standard Webhooks: seconds since 1970"),
        header("webhook-signature", &text, "Standard Webhooks: the signatures"),
    ])
}

fn start_parameters() -> Value {
    let mut parameters = headers();
    if let Some(list) = parameters.as_array_mut() {
        list.insert(
            0,
            json!({"name": "handle", "in": "query", "required": true, "schema": {"type": "string", "format": "uri"},
                   "description": "The URL for heartbeats (PUT) and the report (PATCH) of this run"}),
        );
    }
    parameters
}

fn task_state() -> Value {
    let time = json!({"type": ["string", "null"], "format": "date-time"});
    let text = json!({"type": ["string", "null"]});
    let id = json!({"type": "string", "format": "uuid"});
    let failure_types: Vec<Value> =
        FailureType::ALL.iter().map(|kind| json!(kind.as_str())).chain([Value::Null]).collect();
    json!({
        "type": "object",
        "description": "The state of a task at the time of a notification. More fields may come.",
        "required": ["task_id", "batch_id", "status", "trigger", "attempt", "run", "max_retries", "will_retry",
                     "next_retry_at", "failure_type", "failure_reason", "ended_at", "name", "kind", "scope", "metadata"],
        "properties": {
            "task_id": id,
            "batch_id": id,
            "status": {"$ref": "#/components/schemas/Status"},
            "trigger": {"type": "string", "enum": ["end", "retry", "cancel"]},
            "attempt": {"type": "integer", "format": "int32", "description": "The number of retries so far"},
            "run": {"type": "integer", "format": "int32", "description": "The number of the execution"},
            "max_retries": {"type": ["integer", "null"], "format": "int32", "description": "Null without a retry policy"},
            "will_retry": {"type": "boolean", "description": "Whether the task will be executed again by itself"},
            "next_retry_at": time,
            "failure_type": {"type": ["string", "null"], "enum": failure_types},
            "failure_reason": text,
            "ended_at": time,
            "name": {"type": "string"},
            "kind": {"type": "string"},
            "scope": text,
            "metadata": {"$ref": "#/components/schemas/Metadata"},
        },
    })
}

fn batch_state() -> Value {
    json!({
        "type": "object",
        "description": "The state of a batch at its completion. More fields may come.",
        "required": ["batch_id", "trigger", "completion", "total_tasks", "success", "failure", "canceled", "scope",
                     "metadata", "status_counts"],
        "properties": {
            "batch_id": {"type": "string", "format": "uuid"},
            "trigger": {"type": "string", "const": "batch"},
            "completion": {"type": "integer", "format": "int32", "description": "0 for the first completion"},
            "total_tasks": {"type": "integer", "format": "int32"},
            "success": {"type": "integer", "format": "int32"},
            "failure": {"type": "integer", "format": "int32"},
            "canceled": {"type": "integer", "format": "int32"},
            "scope": {"type": ["string", "null"]},
            "metadata": {"$ref": "#/components/schemas/Metadata"},
            "status_counts": {"$ref": "#/components/schemas/StatusCounts"},
        },
    })
}
