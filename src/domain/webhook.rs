//! Webhooks as values: what a task may call, and what the call says about the task.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::lifecycle::Notice;

/// A webhook that a task calls.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Action {
    pub kind: ActionKind,
    pub params: WebhookParams,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum ActionKind {
    Webhook,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WebhookParams {
    /// `http` or `https`.
    #[schema(example = "http://127.0.0.1:9000/start")]
    pub url: String,
    pub verb: Verb,
    /// Sent as JSON. Notifications add the task's state under the key `reprise`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<Value>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum Verb {
    Get,
    Post,
    Put,
    Patch,
    Delete,
}

/// Headers that a caller may not set: they are ours, or the transport's.
pub const RESERVED_HEADERS: [&str; 12] = [
    "host",
    "content-length",
    "transfer-encoding",
    "connection",
    "idempotency-key",
    "x-task-id",
    "x-task-trigger",
    "x-task-attempt",
    "traceparent",
    "webhook-id",
    "webhook-timestamp",
    "webhook-signature",
];

/// The actions of a task, by the moment they are called.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Actions {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_start: Option<Action>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_success: Vec<Action>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_failure: Vec<Action>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_retry: Vec<Action>,
    /// What the answer to `on_start` said to call if the task is canceled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cancel: Option<Action>,
}

impl Actions {
    pub fn is_empty(&self) -> bool {
        *self == Actions::default()
    }
}

impl Notice {
    pub const fn trigger(self) -> &'static str {
        match self {
            Notice::Success | Notice::Failure => "end",
            Notice::Retry => "retry",
            Notice::Cancel => "cancel",
        }
    }

    pub const fn condition(self) -> &'static str {
        match self {
            Notice::Success | Notice::Retry | Notice::Cancel => "success",
            Notice::Failure => "failure",
        }
    }
}

/// What makes a repeated call recognizable to its receiver.
pub fn idempotency_key(task: Uuid, trigger: &str, condition: &str, run: i32) -> String {
    format!("{task}:{trigger}:{condition}:{run}")
}

pub fn batch_idempotency_key(batch: Uuid, completion: i32) -> String {
    format!("batch:{batch}:complete:{completion}")
}

/// The body of a notification: the caller's own, with our part beside it.
pub fn notification_body(body: Option<Value>, state: Value) -> Value {
    match body {
        Some(Value::Object(mut object)) => {
            object.insert("reprise".into(), state);
            Value::Object(object)
        }
        None => serde_json::json!({ "reprise": state }),
        Some(other) => serde_json::json!({ "body": other, "reprise": state }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn our_part_stands_beside_any_body() {
        let state = json!({"run": 1});
        assert_eq!(notification_body(Some(json!({"a": 1})), state.clone()), json!({"a": 1, "reprise": {"run": 1}}));
        assert_eq!(notification_body(Some(json!([1])), state.clone()), json!({"body": [1], "reprise": {"run": 1}}));
        assert_eq!(notification_body(None, state), json!({"reprise": {"run": 1}}));
    }
}
