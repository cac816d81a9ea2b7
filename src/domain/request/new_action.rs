//! Reads the actions of requests and of answers to `on_start` and checks them against every limit. Their bodies stay
//! text.

use std::collections::BTreeMap;

use serde_json::Value;
use serde_json::value::RawValue;

use super::fields::Fields;
use super::problems::Problems;
use crate::domain::json::{self, Object, RawJson};
use crate::domain::webhook::{Action, ActionKind, RESERVED_HEADERS, Verb, WebhookParams};

/// An object in an answer counts as an action if it has one of these fields.
const ACTION_FIELDS: [&str; 3] = ["kind", "params", "url"];
/// The most items of an answer that are searched for actions.
const MAX_ANSWER_ITEMS: usize = 100;
/// The most characters of the reason why the action of an answer is ignored.
const MAX_REASON_CHARS: usize = 500;

/// Where an action comes from, which decides how strictly it is read.
#[derive(Clone, Copy)]
enum Source {
    /// The action has at most `most` bytes and no unknown fields.
    Request { most: usize },
    /// Unknown fields are ignored: they are for the receiver's own use.
    Answer,
}

/// Reads a list of actions: the first ones, at most `count`, with at most `bytes` each. Also returns the number of all.
pub(in crate::domain) fn read_actions(
    fields: &mut Fields,
    name: &str,
    (count, bytes): (usize, usize),
    problems: &mut Problems,
) -> (Vec<Action>, usize) {
    let path = fields.path(name);
    let Some((items, total)) = fields.texts(name, count, problems) else { return (Vec::new(), 0) };
    let read = |(i, item)| read(item, &format!("{path}[{i}]"), Source::Request { most: bytes }, problems);
    (items.into_iter().enumerate().filter_map(read).collect(), total)
}

pub(in crate::domain) fn read_action(
    fields: &mut Fields,
    name: &str,
    most: usize,
    problems: &mut Problems,
) -> Option<Action> {
    let path = fields.path(name);
    fields.text(name).and_then(|text| read(text, &path, Source::Request { most }, problems))
}

/// Reads the action that an answer to `on_start` may contain. The error says why an object that looks like an action is
/// invalid.
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
    let mut problems = Problems::default();
    let action = read(text, "answer", Source::Answer, &mut problems);
    let reason = |problems: Vec<String>| problems.join("; ").chars().take(MAX_REASON_CHARS).collect();
    problems.or(action).map(Some).map_err(reason)
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

fn read(text: &RawValue, path: &str, source: Source, problems: &mut Problems) -> Option<Action> {
    if let Source::Request { most } = source
        && text.get().len() > most
        && let size = json::compact_len(text.get())
        && size > most
    {
        problems.add(path, format!("must have at most {most} bytes, not {size} (MAX_ACTION_BYTES)"));
        return None;
    }
    let mut fields = Fields::open_text(text, path, |name| name != "kind", problems)?;
    fields.require("kind", problems);
    let kind = fields.choice("kind", &[("Webhook", ActionKind::Webhook)], problems);
    fields.require("params", problems);
    let params_path = fields.path("params");
    let params = fields.text("params").and_then(|text| read_params(text, &params_path, source, problems));
    close(fields, source, problems);
    Some(Action { kind: kind?, params: params? })
}

fn close(fields: Fields, source: Source, problems: &mut Problems) {
    if matches!(source, Source::Request { .. }) {
        fields.close(problems);
    }
}

fn read_params(text: &RawValue, path: &str, source: Source, problems: &mut Problems) -> Option<WebhookParams> {
    let mut fields = Fields::open_text(text, path, |name| !["url", "verb", "headers"].contains(&name), problems)?;
    let url = fields.required_string("url", 1..=2048, problems);
    if let Some(problem) = url.as_deref().and_then(url_problem) {
        problems.add(fields.path("url"), problem);
    }
    let verb = read_verb(&mut fields, problems);
    let body_path = fields.path("body");
    let body = fields.text("body").map(|text| RawJson::read(text, &body_path, problems));
    let headers = fields.object("headers", problems);
    let mut checked = BTreeMap::new();
    if let Some(Value::Object(headers)) = headers {
        for (name, value) in headers {
            match header_problem(&name, &value) {
                Some(problem) => problems.add(fields.path(&format!("headers.{name}")), problem),
                None => {
                    checked.insert(name, value.as_str().unwrap_or_default().to_owned());
                }
            }
        }
    }
    close(fields, source, problems);
    Some(WebhookParams { url: url?, verb: verb?, body: body.flatten(), headers: checked })
}

/// Reads the verb in any letter case: `Post`, `POST`, `post`.
fn read_verb(fields: &mut Fields, problems: &mut Problems) -> Option<Verb> {
    fields.require("verb", problems);
    let value = fields.take("verb")?;
    let word = |(_, verb): &(&str, Verb)| value.as_str().is_some_and(|text| verb.as_str().eq_ignore_ascii_case(text));
    let verbs = Verb::ALL.map(|verb| (verb.as_str(), verb));
    match verbs.iter().find(|verb| word(verb)) {
        Some((_, verb)) => Some(*verb),
        None => fields.pick("verb", &value, &verbs, problems),
    }
}

fn url_problem(text: &str) -> Option<String> {
    match url::Url::parse(text) {
        Err(error) => Some(format!("is not a URL: {error}")),
        Ok(url) if !matches!(url.scheme(), "http" | "https") => Some("must start with http:// or https://".into()),
        Ok(_) => None,
    }
}

fn header_problem(name: &str, value: &Value) -> Option<String> {
    let token = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
    if name.is_empty() || !name.chars().all(token) {
        return Some("is not a valid header name".into());
    }
    if RESERVED_HEADERS.contains(&name.to_ascii_lowercase().as_str()) {
        return Some("is reserved for the service".into());
    }
    match value.as_str() {
        None => Some("must be a string".into()),
        Some(text) if text.len() > 8192 => Some("must have at most 8192 bytes".into()),
        Some(text) if !text.chars().all(|c| c == ' ' || c == '\t' || c.is_ascii_graphic()) => {
            Some("must contain only visible ASCII characters, spaces and tabs".into())
        }
        Some(_) => None,
    }
}
