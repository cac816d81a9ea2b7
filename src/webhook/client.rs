//! The one HTTP client for outgoing calls: no redirects, no proxies, a time limit, and answers cut off at a size.

use std::error::Error as _;
use std::time::{Duration, Instant};

use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::redirect::Policy;
use reqwest::{Method, Url};
use serde_json::Value;
use uuid::Uuid;

use crate::domain::failure::{FailureType, RetryAfter};
use crate::domain::webhook::{Action, Verb};

/// What is read of an answer: enough for an action and for an error message.
const ANSWER_LIMIT: usize = 64 * 1024;

#[derive(Clone, Debug)]
pub struct Client {
    inner: reqwest::Client,
    host_url: String,
}

/// One call to make.
#[derive(Debug)]
pub struct Call<'a> {
    pub action: &'a Action,
    pub body: Option<Value>,
    pub trigger: &'a str,
    pub idempotency_key: String,
    /// The task it is about; a batch's own calls have none.
    pub task: Option<(Uuid, i32)>,
    pub attempt: Option<i64>,
    /// Calls about the same task or batch belong to one trace.
    pub trace: Uuid,
}

/// A 2xx answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CallError {
    pub failure_type: FailureType,
    pub status: Option<u16>,
    pub message: String,
    /// What a 429 or 503 said about it.
    pub retry_after: Option<RetryAfter>,
}

impl Client {
    pub fn new(host_url: String, timeout: Duration) -> Result<Client, String> {
        // A second installation in the same process finds the first one, which is the same.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let inner = reqwest::Client::builder()
            .timeout(timeout)
            .redirect(Policy::none())
            .no_proxy()
            .user_agent(concat!("reprise/", env!("CARGO_PKG_VERSION")))
            .tcp_nodelay(true)
            .build()
            .map_err(|error| format!("the webhook client cannot be set up: {}", chain(&error)))?;
        Ok(Client { inner, host_url })
    }

    pub async fn call(&self, call: Call<'_>) -> Result<Answer, CallError> {
        let started = Instant::now();
        let trigger = call.trigger.to_owned();
        let result = self.send(call).await;
        let outcome = match &result {
            Ok(_) => "success",
            Err(error) => error.failure_type.as_str(),
        };
        let labels = [("trigger", trigger), ("outcome", outcome.to_owned())];
        metrics::counter!("reprise_webhook_calls_total", &labels).increment(1);
        metrics::histogram!("reprise_webhook_duration_seconds", &labels).record(started.elapsed().as_secs_f64());
        result
    }

    async fn send(&self, call: Call<'_>) -> Result<Answer, CallError> {
        let params = &call.action.params;
        let mut url = Url::parse(&params.url).map_err(|error| invalid(&error))?;
        if let Some((id, run)) = call.task {
            let handle = format!("{}/task/{id}?run={run}", self.host_url);
            url.query_pairs_mut().append_pair("handle", &handle);
        }
        let mut request = self.inner.request(method(params.verb), url).headers(headers(&call)?);
        if let Some(body) = &call.body {
            request = request.header(CONTENT_TYPE, "application/json").body(body.to_string());
        }
        let mut response = request.send().await.map_err(|error| transport(&error))?;
        let status = response.status().as_u16();
        let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| wait(value.to_str().ok()?));
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| transport(&error))? {
            let room = ANSWER_LIMIT - body.len();
            body.extend_from_slice(&chunk[..chunk.len().min(room)]);
            if chunk.len() >= room {
                break;
            }
        }
        if (200..300).contains(&status) {
            return Ok(Answer { status, body });
        }
        let text: String = String::from_utf8_lossy(&body).chars().filter(|c| *c != '\0').take(500).collect();
        let separator = if text.is_empty() { "" } else { ": " };
        Err(CallError {
            failure_type: FailureType::of_http_status(status),
            status: Some(status),
            message: format!("answered {status}{separator}{text}"),
            retry_after: retry_after.filter(|_| matches!(status, 429 | 503)),
        })
    }
}

fn headers(call: &Call<'_>) -> Result<HeaderMap, CallError> {
    let mut headers = HeaderMap::new();
    for (name, value) in &call.action.params.headers {
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|error| invalid(&error))?;
        headers.insert(name, HeaderValue::from_str(value).map_err(|error| invalid(&error))?);
    }
    let mut set = |name: &'static str, value: &str| -> Result<(), CallError> {
        headers.insert(name, HeaderValue::from_str(value).map_err(|error| invalid(&error))?);
        Ok(())
    };
    set("idempotency-key", &call.idempotency_key)?;
    set("x-task-trigger", call.trigger)?;
    if let Some((id, _)) = call.task {
        set("x-task-id", &id.to_string())?;
    }
    if let Some(attempt) = call.attempt {
        set("x-task-attempt", &attempt.to_string())?;
    }
    set("traceparent", &format!("00-{}-{:016x}-01", call.trace.simple(), rand::random_range(1..=u64::MAX)))?;
    Ok(headers)
}

/// Seconds or an HTTP date; anything else says nothing.
fn wait(text: &str) -> Option<RetryAfter> {
    let text = text.trim();
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        // So many digits that they don't fit mean "for ever", which a limit takes care of.
        return Some(RetryAfter::Secs(text.parse().unwrap_or(u64::MAX)));
    }
    httpdate::parse_http_date(text).ok().map(|at| RetryAfter::At(at.into()))
}

fn method(verb: Verb) -> Method {
    match verb {
        Verb::Get => Method::GET,
        Verb::Post => Method::POST,
        Verb::Put => Method::PUT,
        Verb::Patch => Method::PATCH,
        Verb::Delete => Method::DELETE,
    }
}

fn invalid(error: &dyn std::error::Error) -> CallError {
    CallError {
        failure_type: FailureType::ValidationError,
        status: None,
        message: format!("the call cannot be made: {error}"),
        retry_after: None,
    }
}

fn transport(error: &reqwest::Error) -> CallError {
    let failure_type = if error.is_timeout() { FailureType::Timeout } else { FailureType::NetworkError };
    let message = if error.is_timeout() { "no answer in time".to_owned() } else { chain(error) };
    CallError { failure_type, status: None, message, retry_after: None }
}

/// The causes too: "error sending request" alone helps nobody. Without the URL, which may hold secrets.
fn chain(error: &reqwest::Error) -> String {
    let mut text = String::from(if error.is_connect() { "cannot connect" } else { "call failed" });
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::{DateTime, Utc};

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let date = |text: &str| Some(RetryAfter::At(text.parse::<DateTime<Utc>>().unwrap()));
        let cases = [
            ("120", Some(RetryAfter::Secs(120))),
            (" 7 ", Some(RetryAfter::Secs(7))),
            ("99999999999999999999999", Some(RetryAfter::Secs(u64::MAX))),
            ("Wed, 21 Oct 2026 07:28:00 GMT", date("2026-10-21T07:28:00Z")),
            ("Wednesday, 21-Oct-26 07:28:00 GMT", date("2026-10-21T07:28:00Z")),
            ("soon", None),
            ("", None),
            ("-5", None),
            ("1.5", None),
        ];
        for (text, expected) in cases {
            assert_eq!(wait(text), expected, "{text}");
        }
    }
}
