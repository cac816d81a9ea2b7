//! Actions of requests and of answers to `on_start`, from JSON to values that obey every limit. Their bodies stay text.

use std::collections::BTreeMap;

use serde_json::Value;
use serde_json::value::RawValue;

use super::fields::Fields;
use super::problems::Problems;
use crate::domain::json::{self, Object, RawJson};
use crate::domain::webhook::{Action, ActionKind, RESERVED_HEADERS, Verb, WebhookParams};

/// Names that make an object of an answer look like an action.
const MARKS: [&str; 3] = ["kind", "params", "url"];
/// Characters of the reason why an answered action is ignored.
const LONGEST_REASON: usize = 500;

/// What is asked of an action.
#[derive(Clone, Copy)]
enum From {
    /// At most so many bytes, and no unknown fields.
    Request { most: usize },
    /// Unknown fields are the receiver's own business.
    Answer,
}

/// The actions of a list, at most `count` of them with `bytes` each, and how many there are.
pub(in crate::domain) fn read_actions(
    fields: &mut Fields,
    name: &str,
    (count, bytes): (usize, usize),
    problems: &mut Problems,
) -> (Vec<Action>, usize) {
    let path = fields.path(name);
    let Some((items, all)) = fields.texts(name, count, problems) else { return (Vec::new(), 0) };
    let read = |(i, item)| read(item, &format!("{path}[{i}]"), From::Request { most: bytes }, problems);
    (items.into_iter().enumerate().filter_map(read).collect(), all)
}

pub(in crate::domain) fn read_action(
    fields: &mut Fields,
    name: &str,
    most: usize,
    problems: &mut Problems,
) -> Option<Action> {
    let path = fields.path(name);
    fields.text(name).and_then(|text| read(text, &path, From::Request { most }, problems))
}

/// An action as it may come back in the answer to `on_start`. The error says why something that looks like an action is
/// none.
pub fn read_answered_action(answer: &[u8]) -> Result<Option<Action>, String> {
    let text = match serde_json::from_slice::<&RawValue>(answer) {
        Ok(text) => text,
        // Long answers are cut off.
        Err(error) if holds(answer, b"\"params\"") => return Err(format!("answer: is not valid JSON: {error}")),
        Err(_) => return Ok(None),
    };
    let object = if text.get().starts_with('{') { Object::read(text.get(), |_| true).ok() } else { None };
    if !object.is_some_and(|object| MARKS.iter().any(|name| object.texts.contains_key(*name))) {
        return Ok(None);
    }
    let mut problems = Problems::default();
    let action = read(text, "answer", From::Answer, &mut problems);
    let reason = |problems: Vec<String>| problems.join("; ").chars().take(LONGEST_REASON).collect();
    problems.or(action).map(Some).map_err(reason)
}

fn holds(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

fn read(text: &RawValue, path: &str, from: From, problems: &mut Problems) -> Option<Action> {
    if let From::Request { most } = from
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
    let params = fields.text("params").and_then(|text| read_params(text, &params_path, from, problems));
    close(fields, from, problems);
    Some(Action { kind: kind?, params: params? })
}

fn close(fields: Fields, from: From, problems: &mut Problems) {
    if matches!(from, From::Request { .. }) {
        fields.close(problems);
    }
}

fn read_params(text: &RawValue, path: &str, from: From, problems: &mut Problems) -> Option<WebhookParams> {
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
    close(fields, from, problems);
    Some(WebhookParams { url: url?, verb: verb?, body: body.flatten(), headers: checked })
}

/// In any case: `Post`, `POST`, `post`.
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
        return Some("is not a header name".into());
    }
    if RESERVED_HEADERS.contains(&name.to_ascii_lowercase().as_str()) {
        return Some("is set by the service itself".into());
    }
    match value.as_str() {
        None => Some("must be a string".into()),
        Some(text) if text.len() > 8192 => Some("must have at most 8192 bytes".into()),
        Some(text) if !text.chars().all(|c| c == ' ' || c == '\t' || c.is_ascii_graphic()) => {
            Some("must be visible ASCII".into())
        }
        Some(_) => None,
    }
}
