//! Webhooks as values: the actions of a task, and the headers and bodies of their calls.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::json::{self, RawJson};
use super::task::lifecycle::Notice;

/// A webhook that a task calls.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Action {
    pub kind: ActionKind,
    pub params: WebhookParams,
}

/// The kind of an action.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum ActionKind {
    #[default]
    Webhook,
}

/// The call that a webhook makes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WebhookParams {
    /// `http` or `https`.
    #[schema(example = "http://127.0.0.1:9000/start")]
    pub url: String,
    pub verb: Verb,
    /// Sent as JSON. Notifications add the task's state under the key `reprise`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Value>)]
    pub body: Option<RawJson>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
}

impl WebhookParams {
    /// Replaces the values of secret headers by `***`.
    pub fn hide_secrets(&mut self) {
        for (_, value) in self.headers.iter_mut().filter(|(name, _)| is_secret(name)) {
            "***".clone_into(value);
        }
    }
}

/// The HTTP method of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum Verb {
    Get,
    #[default]
    Post,
    Put,
    Patch,
    Delete,
}

impl Verb {
    pub const ALL: [Verb; 5] = [Verb::Get, Verb::Post, Verb::Put, Verb::Patch, Verb::Delete];

    pub const fn as_str(self) -> &'static str {
        match self {
            Verb::Get => "Get",
            Verb::Post => "Post",
            Verb::Put => "Put",
            Verb::Patch => "Patch",
            Verb::Delete => "Delete",
        }
    }
}

/// Headers that a client may not set, because the service or the transport sets them.
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

/// Whether the name of a header suggests that its value is a secret.
fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    ["authorization", "proxy-authorization", "cookie", "set-cookie"].contains(&name.as_str())
        || ["key", "token", "secret", "password"].iter().any(|part| name.contains(part))
}

/// The actions of a task, by when they are called, as they are stored.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Actions {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_start: Option<Action>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_success: Vec<Action>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_failure: Vec<Action>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_retry: Vec<Action>,
    /// The action to call if the task is canceled, from the answer to `on_start`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cancel: Option<Action>,
}

impl Actions {
    /// Returns the approximate number of bytes to store.
    pub fn bytes(&self) -> usize {
        let lists = [&self.on_success, &self.on_failure, &self.on_retry];
        let all = self.on_start.iter().chain(lists.into_iter().flatten());
        all.map(|action| {
            let params = &action.params;
            let headers: usize = params.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
            params.url.len() + headers + params.body.as_ref().map_or(0, |body| body.get().len())
        })
        .sum()
    }

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

/// Returns the key by which a receiver recognizes a repeated call. `position` is the place of the action in its list.
pub fn idempotency_key(task: Uuid, trigger: &str, condition: &str, run: i32, position: i32) -> String {
    with_position(format!("{task}:{trigger}:{condition}:{run}"), position)
}

/// Returns the key of a batch's notification. `position` is the place of the action in its list.
pub fn batch_idempotency_key(batch: Uuid, completion: i32, position: i32) -> String {
    with_position(format!("batch:{batch}:complete:{completion}"), position)
}

/// Appends the place of an action in its list. The first action has the plain key.
fn with_position(key: String, position: i32) -> String {
    if position == 0 { key } else { format!("{key}:{position}") }
}

/// Returns the body of a notification: that of the action, with `state` added under the key `reprise`.
pub fn notification_body(body: Option<&RawJson>, state: &RawJson) -> String {
    let state = state.get();
    let Some(body) = body.map(RawJson::get) else { return format!("{{\"reprise\":{state}}}") };
    json::with_field(body, "reprise", state).unwrap_or_else(|| format!("{{\"body\":{body},\"reprise\":{state}}}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_action_of_a_list_has_a_key_of_its_own() {
        let id = Uuid::nil();
        let key = |position| idempotency_key(id, "end", "success", 3, position);
        assert_eq!(key(0), format!("{id}:end:success:3"));
        assert_eq!(key(1), format!("{id}:end:success:3:1"));
        assert_eq!(batch_idempotency_key(id, 0, 0), format!("batch:{id}:complete:0"));
        assert_eq!(batch_idempotency_key(id, 1, 2), format!("batch:{id}:complete:1:2"));
    }

    #[test]
    fn a_notification_adds_the_state_to_any_body() {
        let cases = [
            (Some(r#"{"a":1}"#), r#"{"a":1,"reprise":{"run":1}}"#),
            (Some("{}"), r#"{"reprise":{"run":1}}"#),
            (
                Some(r#"{"reprise":[{}],"b":"\"}","repr\u0069se":1,"a":1.50}"#),
                r#"{"b":"\"}","a":1.50,"reprise":{"run":1}}"#,
            ),
            (Some("[1]"), r#"{"body":[1],"reprise":{"run":1}}"#),
            (Some(r#""{}""#), r#"{"body":"{}","reprise":{"run":1}}"#),
            (None, r#"{"reprise":{"run":1}}"#),
        ];
        for (body, expected) in cases {
            let body: Option<RawJson> = body.map(|text| serde_json::from_str(text).unwrap());
            let state: RawJson = serde_json::from_str(r#"{"run":1}"#).unwrap();
            assert_eq!(notification_body(body.as_ref(), &state), expected);
        }
    }
}
