//! The only HTTP client for outgoing calls: guarded addresses, no redirects, no proxies, a time limit, and a limit on
//! the size of answers. It must never connect to an address that the guard has not checked.

use std::error::Error as _;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::redirect::Policy;
use reqwest::{Method, Url};
use uuid::Uuid;

use super::guard::{Guard, RefusedAddress};
use super::host_permits::{HostPermit, HostPermits};
use super::sign::Signer;
use crate::domain::retry::failure::{FailureType, RetryAfter};
use crate::domain::webhook::{Action, Verb};
use crate::handle::Handles;

/// Bytes read of an answer: enough for an action or an error message.
const ANSWER_LIMIT: usize = 64 * 1024;

#[derive(Clone, Debug)]
pub struct Client {
    inner: reqwest::Client,
    handles: Handles,
    guard: Guard,
    host_permits: HostPermits,
    signer: Signer,
}

#[derive(Clone, Debug)]
pub struct ClientSettings {
    pub handles: Handles,
    pub timeout: Duration,
    /// Concurrent calls to one host and port.
    pub per_host: usize,
    pub guard: Guard,
    pub signer: Signer,
}

/// One call to make.
#[derive(Debug)]
pub struct Call<'a> {
    pub action: &'a Action,
    /// JSON. A call with `Get` is sent without a body.
    pub body: Option<String>,
    pub trigger: &'a str,
    pub idempotency_key: String,
    /// The task and its run; `None` for the calls of a batch.
    pub task: Option<(Uuid, i32)>,
    pub attempt: Option<i64>,
    /// The trace id, which all calls about the same task or batch share.
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
    /// The `Retry-After` of a 429 or 503.
    pub retry_after: Option<RetryAfter>,
}

impl Client {
    pub fn new(settings: ClientSettings) -> Result<Client, String> {
        let ClientSettings { handles, timeout, per_host, guard, signer } = settings;
        // Fails if the process has installed a provider before, which is the same one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let inner = reqwest::Client::builder()
            .timeout(timeout)
            .redirect(Policy::none())
            .no_proxy()
            .dns_resolver(guard.clone())
            .user_agent(concat!("reprise/", env!("CARGO_PKG_VERSION")))
            .tcp_nodelay(true)
            .build()
            .map_err(|error| format!("cannot set up the webhook client: {}", with_causes(&error)))?;
        Ok(Client { inner, handles, guard, host_permits: HostPermits::new(per_host), signer })
    }

    /// Takes a permit for a call to this action's host, if one is available.
    pub fn try_host_permit(&self, action: &Action) -> Option<HostPermit> {
        self.host_permits.try_acquire(&destination(action))
    }

    /// Waits for a permit for a call to this action's host.
    pub async fn host_permit(&self, action: &Action) -> HostPermit {
        self.host_permits.acquire(&destination(action)).await
    }

    /// Makes a call and holds the host permit until it ends. The time limit starts here, because the receiver is not
    /// responsible for the wait for the permit.
    pub async fn call(&self, call: Call<'_>, host_permit: HostPermit) -> Result<Answer, CallError> {
        let started = Instant::now();
        let trigger = call.trigger.to_owned();
        let result = self.send(call).await;
        drop(host_permit);
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
            url.query_pairs_mut().append_pair("handle", &self.handles.of(id, run));
        }
        self.guard.check(&url).map_err(|refused| refusal(&refused))?;
        let mut headers = headers(&call)?;
        let body = match (params.verb, call.body) {
            (Verb::Get, _) => None,
            // Some libraries cannot verify the signature of an empty body.
            (_, None) => self.signer.signs().then(|| "{}".to_owned()),
            (_, body) => body,
        };
        self.sign(&mut headers, &call.idempotency_key, body.as_deref().unwrap_or_default())?;
        let mut request = self.inner.request(method(params.verb), url);
        if let Some(body) = body {
            // Exactly one content type: receivers would interpret two differently.
            headers.entry(CONTENT_TYPE).or_insert(HeaderValue::from_static("application/json"));
            request = request.body(body);
        }
        let request = request.headers(headers);
        let mut response = request.send().await.map_err(|error| transport(&error))?;
        let status = response.status().as_u16();
        let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| parse_retry_after(value.to_str().ok()?));
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
        let text = excerpt(&body);
        let separator = if text.is_empty() { "" } else { ": " };
        Err(CallError {
            failure_type: FailureType::of_http_status(status),
            status: Some(status),
            message: format!("answered {status}{separator}{text}"),
            retry_after: retry_after.filter(|_| matches!(status, 429 | 503)),
        })
    }

    fn sign(&self, headers: &mut HeaderMap, id: &str, body: &str) -> Result<(), CallError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let Some(signature) = self.signer.sign(id, now, body.as_bytes()) else { return Ok(()) };
        headers.insert("webhook-id", HeaderValue::from_str(id).map_err(|error| invalid(&error))?);
        headers.insert("webhook-timestamp", HeaderValue::from(now));
        headers.insert("webhook-signature", HeaderValue::from_str(&signature).map_err(|error| invalid(&error))?);
        Ok(())
    }
}

/// Returns host and port in one spelling, or an empty string if the URL is not valid, in which case the call fails.
fn destination(action: &Action) -> String {
    let Ok(url) = Url::parse(&action.params.url) else { return String::new() };
    let host = url.host_str().unwrap_or_default();
    format!("{}:{}", host.strip_suffix('.').unwrap_or(host), url.port_or_known_default().unwrap_or(0))
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

/// Returns the first 500 characters of an error body as one line.
fn excerpt(body: &[u8]) -> String {
    one_line(&String::from_utf8_lossy(body)).trim().chars().take(500).collect()
}

/// Replaces control characters and line breaks, because text from receivers appears in logs, answers and notifications.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if is_unsafe(c) { ' ' } else { c }).collect()
}

/// Whether a character is a control character, ends a line or changes the direction of text.
fn is_unsafe(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Parses seconds or an HTTP date; ignores anything else.
fn parse_retry_after(text: &str) -> Option<RetryAfter> {
    let text = text.trim();
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        // A number too large for the type means "for ever"; `max_retry_after_secs` caps it.
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
        message: format!("the call is not a valid HTTP request: {error}"),
        retry_after: None,
    }
}

/// A final failure, because the guard would refuse the same address again.
fn refusal(refused: &RefusedAddress) -> CallError {
    CallError {
        failure_type: FailureType::ValidationError,
        status: None,
        message: refused.to_string(),
        retry_after: None,
    }
}

fn transport(error: &reqwest::Error) -> CallError {
    let mut cause = error.source();
    while let Some(error) = cause {
        if let Some(refused) = error.downcast_ref::<RefusedAddress>() {
            return refusal(refused);
        }
        cause = error.source();
    }
    let failure_type = if error.is_timeout() { FailureType::Timeout } else { FailureType::NetworkError };
    let message = if error.is_timeout() { "no answer in time".to_owned() } else { with_causes(error) };
    CallError { failure_type, status: None, message, retry_after: None }
}

/// Formats an error with its causes, because "error sending request" alone does not help. Omits the URL, which may
/// contain secrets.
fn with_causes(error: &reqwest::Error) -> String {
    let mut text = String::from(if error.is_connect() { "cannot connect" } else { "call failed" });
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    one_line(&text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::{DateTime, Utc};

    #[test]
    fn error_bodies_become_one_line_without_control_characters() {
        let cases: [(&[u8], &str); 5] = [
            (b"broken", "broken"),
            (b"\r\n a\nb\tc\0d \n", "a b c d"),
            (b"\x1b[31mred\x1b[0m\x07", "[31mred [0m"),
            ("a\u{85}b\u{9b}c\u{2028}d\u{202e}e\u{e9}".as_bytes(), "a b c d e\u{e9}"),
            (b"\xff", "\u{fffd}"),
        ];
        for (body, expected) in cases {
            assert_eq!(excerpt(body), expected);
        }
        assert_eq!(excerpt("\u{e9}".repeat(600).as_bytes()).chars().count(), 500);
    }

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
            assert_eq!(parse_retry_after(text), expected, "{text}");
        }
    }
}
