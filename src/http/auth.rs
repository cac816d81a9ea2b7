//! Authentication: decides before the handler whether a request is allowed, and on whose behalf it acts. Must never
//! show a key or a token in an answer or a log.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::{FromRequestParts, MatchedPath, Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method};
use axum::middleware::Next;
use axum::response::Response;
use uuid::Uuid;

use super::{Api, Code, Hosts, Problem};
use crate::access::{ApiKey, Keys, Paths, Scope};
use crate::domain::view::TaskDetails;
use crate::handle::SigningKey;
use crate::service::Service;
use crate::store::Actor;

/// Paths for probes, which need no key and reveal nothing.
const ALWAYS_OPEN: [&str; 2] = ["/health", "/ready"];

/// Checks API keys, tokens of handles and, without keys, the `Host` header.
#[derive(Debug)]
pub struct Authenticator {
    /// If empty, every request is allowed.
    pub keys: Keys,
    /// Paths that may be read without a key.
    pub public: Paths,
    /// Verifies the tokens of handles.
    pub secret: SigningKey,
    /// Hosts that a request may name; checked only without keys.
    pub hosts: Hosts,
}

/// The service, acting on behalf of the caller of the request.
pub struct Caller(pub Service);

impl FromRequestParts<Arc<Api>> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, api: &Arc<Api>) -> Result<Caller, Infallible> {
        let actor = parts.extensions.get::<Actor>().cloned().unwrap_or(Actor::Api);
        Ok(Caller(api.service.on_behalf_of(actor)))
    }
}

/// How much of a task's actions the caller may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Viewer {
    Everything,
    /// Values of secret headers are masked.
    NoSecrets,
    /// For callers without a key, such as workers with a handle: actions name other receivers.
    NoActions,
}

impl Viewer {
    fn of(key: Option<&ApiKey>) -> Viewer {
        match key {
            Some(key) if key.scope == Scope::Admin => Viewer::Everything,
            _ => Viewer::NoSecrets,
        }
    }

    /// Removes from `task` what the caller may not see.
    pub fn redact(self, mut task: TaskDetails) -> TaskDetails {
        match self {
            Viewer::Everything => {}
            Viewer::NoSecrets => task.actions.iter_mut().for_each(|action| action.params.hide_secrets()),
            Viewer::NoActions => task.actions.clear(),
        }
        task
    }
}

impl FromRequestParts<Arc<Api>> for Viewer {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Api>) -> Result<Viewer, Infallible> {
        Ok(parts.extensions.get::<Viewer>().copied().unwrap_or(Viewer::NoActions))
    }
}

/// Middleware that refuses requests that are not allowed, and passes the actor and the viewer on to the handler.
pub async fn authenticate(State(api): State<Arc<Api>>, mut request: Request, next: Next) -> Result<Response, Problem> {
    let (actor, viewer) = api.authenticator.admit(&request)?;
    if let Actor::Person(name) = &actor {
        tracing::Span::current().record("caller", name.as_str());
    }
    request.extensions_mut().insert(actor);
    request.extensions_mut().insert(viewer);
    Ok(next.run(request).await)
}

impl Authenticator {
    fn admit(&self, request: &Request) -> Result<(Actor, Viewer), Problem> {
        let path = request.uri().path();
        if always_open(path) {
            return Ok((Actor::Api, Viewer::NoActions));
        }
        if self.keys.is_empty() {
            self.hosts.check(request)?;
        }
        let has_token = self.check_token(request)?;
        if self.keys.is_empty() {
            return Ok((Actor::Api, if has_token { Viewer::NoActions } else { Viewer::Everything }));
        }
        let given = credential(request.headers());
        let key = given.and_then(|given| self.keys.find(given));
        let actor = key.map_or(Actor::Api, |key| Actor::Person(key.name.clone()));
        if has_token || (is_read(request.method()) && self.public.contain(path)) {
            return Ok((actor, if key.is_some() { Viewer::of(key) } else { Viewer::NoActions }));
        }
        let Some(key) = key else {
            return Err(unauthorized(match given {
                None => "API key missing: send Authorization: Bearer <key> or X-API-Key: <key>",
                Some(_) => "unknown API key",
            }));
        };
        let needed = needed_scope(request.method(), matched_path(request));
        if key.scope < needed {
            let (has, needs) = (key.scope.as_str(), needed.as_str());
            let detail = format!("the API key has the scope {has}, but this operation needs {needs}");
            return Err(Problem::new(Code::ScopeTooLow, detail));
        }
        Ok((actor, Viewer::of(Some(key))))
    }

    /// Whether the request carries the token of its task and run. A wrong token is always an error.
    fn check_token(&self, request: &Request) -> Result<bool, Problem> {
        if !takes_token(request.method(), matched_path(request)) {
            return Ok(false);
        }
        let query = url::form_urlencoded::parse(request.uri().query().unwrap_or_default().as_bytes());
        let (mut run, mut token) = (None, None);
        // The first of each, like the handler, which refuses repeated parameters.
        for (name, value) in query {
            match name.as_ref() {
                "run" if run.is_none() => run = Some(value),
                "token" if token.is_none() => token = Some(value),
                _ => {}
            }
        }
        let Some(token) = token else { return Ok(false) };
        let task = request.uri().path().strip_prefix("/task/").and_then(|id| id.parse::<Uuid>().ok());
        let run = run.and_then(|run| run.parse::<i32>().ok());
        match (task, run) {
            (Some(task), Some(run)) if self.secret.accepts(task, run, &token) => Ok(true),
            _ => Err(unauthorized("the token does not belong to this task and run")),
        }
    }
}

/// Whether a path needs no key, whatever the settings.
pub fn always_open(path: &str) -> bool {
    ALWAYS_OPEN.contains(&path)
}

/// Whether an operation accepts the token of a handle instead of a key.
pub fn takes_token(method: &Method, path: Option<&str>) -> bool {
    path == Some("/task/{id}") && (is_read(method) || [Method::PATCH, Method::PUT].contains(method))
}

fn unauthorized(detail: &str) -> Problem {
    Problem::new(Code::Unauthorized, detail)
}

fn matched_path(request: &Request) -> Option<&str> {
    request.extensions().get::<MatchedPath>().map(MatchedPath::as_str)
}

fn is_read(method: &Method) -> bool {
    [Method::GET, Method::HEAD].contains(method)
}

/// The key that the request carries. An `Authorization` header with another scheme is ignored: it may be for a proxy.
fn credential(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(AUTHORIZATION).and_then(|value| {
        let (scheme, rest) = value.as_bytes().split_at_checked("Bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then_some(rest.trim_ascii())
    });
    bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes().trim_ascii()))
}

/// The scope that an operation needs. Operations that are not listed here need `admin`, so a new operation is locked by
/// default.
pub fn needed_scope(method: &Method, path: Option<&str>) -> Scope {
    let is_task_work = |path: &str| ["/task", "/batch"].iter().any(|start| is_at_or_below(path, start));
    match path {
        _ if is_read(method) => Scope::Read,
        // Any key may learn that the path does not exist.
        None => Scope::Read,
        Some(path) if is_task_work(path) => Scope::Write,
        Some(_) => Scope::Admin,
    }
}

fn is_at_or_below(path: &str, start: &str) -> bool {
    path.strip_prefix(start).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_needs_a_scope() {
        let cases = [
            (Method::GET, Some("/task"), Scope::Read),
            (Method::HEAD, Some("/retry-policy"), Scope::Read),
            (Method::GET, Some("/metrics"), Scope::Read),
            (Method::POST, Some("/task"), Scope::Write),
            (Method::PATCH, Some("/task/pause/{id}"), Scope::Write),
            (Method::POST, Some("/batch/{id}/retry"), Scope::Write),
            (Method::DELETE, Some("/batch/{id}"), Scope::Write),
            (Method::PUT, Some("/retry-policy/{kind}"), Scope::Admin),
            (Method::DELETE, Some("/retry-policy/{kind}"), Scope::Admin),
            (Method::POST, Some("/webhook-deliveries/{id}/redeliver"), Scope::Admin),
            (Method::POST, Some("/tasks-of-tomorrow"), Scope::Admin),
            (Method::POST, None, Scope::Read),
        ];
        for (method, path, scope) in cases {
            assert_eq!(needed_scope(&method, path), scope, "{method} {path:?}");
        }
    }

    #[test]
    fn a_key_is_sent_in_one_of_two_headers() {
        let sent = |pairs: &[(&'static str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in pairs {
                headers.insert(*name, value.parse().unwrap());
            }
            credential(&headers).map(|key| String::from_utf8_lossy(key).into_owned())
        };
        assert_eq!(sent(&[]), None);
        assert_eq!(sent(&[("authorization", "Bearer abc")]).as_deref(), Some("abc"));
        assert_eq!(sent(&[("authorization", "bearer  abc ")]).as_deref(), Some("abc"));
        assert_eq!(sent(&[("x-api-key", "abc")]).as_deref(), Some("abc"));
        assert_eq!(sent(&[("authorization", "Basic abc")]), None);
        assert_eq!(sent(&[("authorization", "Bearer")]), None);
        assert_eq!(sent(&[("authorization", "Basic abc"), ("x-api-key", "def")]).as_deref(), Some("def"));
        assert_eq!(sent(&[("authorization", "Bearer abc"), ("x-api-key", "def")]).as_deref(), Some("abc"));
    }
}
