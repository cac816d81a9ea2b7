//! The actions of requests and of answers to `on_start`. Their bodies stay text.

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::RequestLimits;
use super::fields::{name_of, not_a};
use super::input::{Ignored, Input, Schemas, input};
use super::limits::ACTIONS_PER_TASK;
use super::problems::{FieldProblem, ProblemCode};
use super::reading::{Place, Reading, Source};
use super::values::{Text, read_word};
use crate::domain::json::{self, Object, RawJson};
use crate::domain::webhook::{Action, ActionKind, RESERVED_HEADERS, Verb, WebhookParams};

/// An object in an answer counts as an action if it has one of these fields.
const ACTION_FIELDS: [&str; 3] = ["kind", "params", "url"];
/// The most items of an answer that are searched for actions.
const MAX_ANSWER_ITEMS: usize = 100;
/// The most characters of the reason why the action of an answer is ignored.
const MAX_REASON_CHARS: usize = 500;

input! {
    /// A webhook that Reprise calls.
    pub struct ActionInput as "ActionInput" {
        /// The kind of the action.
        kind: ActionKind,
        params: WebhookInput,
        /// Ignored. `GET /task/{id}` shows it, so that its actions can be sent back.
        trigger: Ignored,
        /// Ignored, like `trigger`.
        condition: Ignored,
    }
}

input! {
    /// The call that a webhook makes.
    pub struct WebhookInput as "WebhookInput" {
        /// The address to call: `http` or `https`.
        url: WebhookUrl,
        /// The HTTP method.
        verb: Verb,
        /// Sent as JSON. Notifications add the state of the task under the key `reprise`. Not sent with the verb Get.
        body: Option<RawJson>,
        /// Headers of the call. Those that Reprise sets itself are refused: `Host`, `Content-Length`,
        /// `Idempotency-Key`, `X-Task-…`, `traceparent`, `webhook-…` and others.
        headers: Option<HeadersInput>,
    }
}

impl Input for Action {
    const KEEPS_TEXT: bool = true;

    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<Action> {
        let most = reading.limits.action_bytes;
        if let Source::Text(text) = source
            && reading.strict
            && text.get().len() > most
            && let size = json::compact_len(text.get())
            && size > most
        {
            let message = format!("must have at most {most} bytes, not {size} (MAX_ACTION_BYTES)");
            reading.add(at, ProblemCode::TooLarge, message);
            return None;
        }
        let ActionInput { kind, params, .. } = ActionInput::read(source, at, reading)?;
        let WebhookInput { url, verb, body, headers } = params;
        let headers = headers.unwrap_or_default().0;
        Some(Action { kind, params: WebhookParams { url: url.0, verb, body, headers } })
    }

    fn schema() -> Value {
        ActionInput::schema()
    }

    fn define(schemas: &mut Schemas) {
        ActionInput::define(schemas);
    }
}

/// A list of actions: the first ones, at most as many as a task may have, and the number of all.
#[derive(Debug, Default)]
pub struct ActionList {
    pub actions: Vec<Action>,
    pub total: usize,
}

impl Input for ActionList {
    const KEEPS_TEXT: bool = true;

    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<ActionList> {
        let (items, total) = texts(&source, reading.limits.actions_per_task, at, reading)?;
        let read = |(i, item)| Action::read(Source::Text(item), at.item(i), reading);
        Some(ActionList { actions: items.into_iter().enumerate().filter_map(read).collect(), total })
    }

    fn schema() -> Value {
        json!({"type": "array", "items": ActionInput::schema(), "x-limit": ACTIONS_PER_TASK})
    }

    fn define(schemas: &mut Schemas) {
        ActionInput::define(schemas);
    }
}

/// Returns the first entries of an array that stayed text, at most `most` of them, and the number of all.
pub(super) fn texts<'a>(
    source: &Source<'a>,
    most: usize,
    at: Place,
    reading: &mut Reading,
) -> Option<(Vec<&'a RawValue>, usize)> {
    let text = match source {
        Source::Text(text) => text.get(),
        // Objects keep lists of actions and tasks as text, so this is never a list.
        Source::Tree(value) => {
            not_a("an array", name_of(value), at, reading);
            return None;
        }
    };
    if !text.starts_with('[') {
        not_a("an array", super::fields::name_of_text(text), at, reading);
        return None;
    }
    let malformed = |error| reading.add(at, ProblemCode::Malformed, format!("is not valid JSON: {error}"));
    json::items(text, most).map_err(malformed).ok()
}

impl Input for ActionKind {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<ActionKind> {
        let find = |word: &str| (word == "Webhook").then_some(ActionKind::Webhook);
        read_word(source, at, &["Webhook"], find, reading)
    }

    fn schema() -> Value {
        json!({"type": "string", "const": "Webhook"})
    }
}

/// Reads the verb in any letter case: `Post`, `POST`, `post`.
impl Input for Verb {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<Verb> {
        let find = |word: &str| Verb::ALL.into_iter().find(|verb| verb.as_str().eq_ignore_ascii_case(word));
        read_word(source, at, &Verb::ALL.map(Verb::as_str), find, reading)
    }

    fn schema() -> Value {
        json!({"type": "string", "enum": Verb::ALL.map(Verb::as_str)})
    }
}

impl Input for RawJson {
    const KEEPS_TEXT: bool = true;

    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<RawJson> {
        match source {
            Source::Text(text) => RawJson::read_text(text, at, &mut reading.problems),
            Source::Tree(value) => serde_json::value::to_raw_value(&value)
                .ok()
                .and_then(|text| RawJson::read_text(&text, at, &mut reading.problems)),
        }
    }

    fn schema() -> Value {
        json!({})
    }
}

/// The address of a webhook.
#[derive(Debug, Default)]
pub struct WebhookUrl(pub String);

impl Input for WebhookUrl {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<WebhookUrl> {
        let Text(url) = Text::<1, 2048>::read(source, at, reading)?;
        let problem = match url::Url::parse(&url) {
            Err(error) => Some(format!("is not a URL: {error}")),
            Ok(url) if !matches!(url.scheme(), "http" | "https") => Some("must start with http:// or https://".into()),
            Ok(_) => None,
        };
        if let Some(problem) = problem {
            reading.add(at, ProblemCode::Malformed, problem);
            return None;
        }
        Some(WebhookUrl(url))
    }

    fn schema() -> Value {
        json!({"type": "string", "format": "uri", "minLength": 1, "maxLength": 2048,
               "examples": ["http://127.0.0.1:9000/start"]})
    }
}

/// The headers of a webhook.
#[derive(Debug, Default)]
pub struct HeadersInput(pub BTreeMap<String, String>);

const MAX_HEADER_BYTES: usize = 8192;

impl Input for HeadersInput {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<HeadersInput> {
        let headers = match source.tree(at, reading)? {
            Value::Object(headers) => headers,
            other => {
                not_a("an object", name_of(&other), at, reading);
                return None;
            }
        };
        let mut checked = BTreeMap::new();
        for (name, value) in headers {
            match header_problem(&name, &value) {
                Some((code, problem)) => reading.add(at.field(&name), code, problem),
                None => {
                    checked.insert(name, value.as_str().unwrap_or_default().to_owned());
                }
            }
        }
        Some(HeadersInput(checked))
    }

    fn schema() -> Value {
        let value = json!({"type": "string", "maxLength": MAX_HEADER_BYTES, "pattern": "^[\\t -~]*$"});
        let name = json!({"pattern": "^[!#$%&'*+.^_`|~0-9A-Za-z-]+$"});
        json!({"type": "object", "additionalProperties": value, "propertyNames": name})
    }
}

fn header_problem(name: &str, value: &Value) -> Option<(ProblemCode, String)> {
    let token = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
    if name.is_empty() || !name.chars().all(token) {
        return Some((ProblemCode::Malformed, "is not a valid header name".into()));
    }
    if RESERVED_HEADERS.contains(&name.to_ascii_lowercase().as_str()) {
        return Some((ProblemCode::NotAllowed, "is reserved for the service".into()));
    }
    match value.as_str() {
        None => Some((ProblemCode::WrongType, "must be a string".into())),
        Some(text) if text.len() > MAX_HEADER_BYTES => {
            Some((ProblemCode::WrongLength, format!("must have at most {MAX_HEADER_BYTES} bytes")))
        }
        Some(text) if !text.chars().all(|c| c == ' ' || c == '\t' || c.is_ascii_graphic()) => {
            Some((ProblemCode::Malformed, "must contain only visible ASCII characters, spaces and tabs".into()))
        }
        Some(_) => None,
    }
}

/// Reads the action that an answer to `on_start` may contain. Unknown fields are ignored: they are for the receiver's own
/// use. The error says why an object that looks like an action is invalid.
pub fn read_answered_action(answer: &[u8]) -> Result<Option<Action>, String> {
    let text = match serde_json::from_slice::<&RawValue>(answer) {
        Ok(text) => text,
        // A long answer is cut off and so is not valid JSON; `params` shows that it contained an action.
        Err(error) if holds(answer, b"\"params\"") => return Err(format!("answer: is not valid JSON: {error}")),
        Err(_) => return Ok(None),
    };
    if !fields_of(text).is_some_and(|object| ACTION_FIELDS.iter().any(|name| object.texts.contains_key(*name))) {
        return match wrapped_action(text) {
            Some(path) => Err(format!("{path}: looks like an action, but the answer itself must be the action")),
            None => Ok(None),
        };
    }
    let mut reading = Reading { strict: false, ..Reading::new(&RequestLimits::NONE) };
    let action = Action::read(Source::Text(text), Place::named("answer"), &mut reading);
    let reason = |problems: Vec<FieldProblem>| {
        let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
        lines.join("; ").chars().take(MAX_REASON_CHARS).collect()
    };
    reading.problems.or(action).map(Some).map_err(reason)
}

/// Returns the path of an action inside another object or an array: a mistake that must not pass silently.
fn wrapped_action(text: &RawValue) -> Option<String> {
    let is_action = |text: &RawValue| {
        fields_of(text).is_some_and(|object| ["kind", "params"].iter().all(|name| object.texts.contains_key(*name)))
    };
    if let Some(object) = fields_of(text) {
        let found = object.texts.into_iter().find(|(_, value)| is_action(value));
        return found.map(|(name, _)| format!("answer.{name}"));
    }
    let (items, _) = json::items(text.get(), MAX_ANSWER_ITEMS).ok()?;
    items.into_iter().position(is_action).map(|i| format!("answer[{i}]"))
}

fn fields_of(text: &RawValue) -> Option<Object<'_>> {
    if text.get().starts_with('{') { Object::read(text.get(), |_| true).ok() } else { None }
}

fn holds(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}
