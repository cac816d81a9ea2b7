//! The door: who may do what. Decides on every request before its handler sees it, and says on whose behalf it is. Must
//! never show a key or a token, neither in an answer nor in a log.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::{FromRequestParts, MatchedPath, Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use uuid::Uuid;

use super::{Api, Hosts, Problem};
use crate::access::{ApiKey, Keys, Paths, Scope};
use crate::domain::view::TaskDetails;
use crate::domain::webhook::Actions;
use crate::handle::SigningKey;
use crate::service::Service;
use crate::store::Actor;

/// For those who watch over the process; they tell nothing.
const ALWAYS_OPEN: [&str; 2] = ["/health", "/ready"];

/// What the door knows.
#[derive(Debug)]
pub struct Authenticator {
    /// None at all: everybody may do everything.
    pub keys: Keys,
    pub public: Paths,
    pub secret: SigningKey,
    /// What a request may be meant for as long as there are no keys.
    pub hosts: Hosts,
}

/// The service, on behalf of whoever sent the request.
pub struct Caller(pub Service);

impl FromRequestParts<Arc<Api>> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, api: &Arc<Api>) -> Result<Caller, Infallible> {
        let actor = parts.extensions.get::<Actor>().cloned().unwrap_or(Actor::Api);
        Ok(Caller(api.service.by(actor)))
    }
}

/// How much of a task's actions whoever sent the request may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Viewer {
    Everything,
    NoSecrets,
    /// Somebody with a handle: the actions tell of other receivers.
    NoActions,
}

impl Viewer {
    fn of(key: Option<&ApiKey>) -> Viewer {
        match key {
            Some(key) if key.scope == Scope::Admin => Viewer::Everything,
            _ => Viewer::NoSecrets,
        }
    }

    pub fn shown(self, mut task: TaskDetails) -> TaskDetails {
        match self {
            Viewer::Everything => {}
            Viewer::NoSecrets => task.actions.hide_secrets(),
            Viewer::NoActions => task.actions = Actions::default(),
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

pub async fn guard(State(api): State<Arc<Api>>, mut request: Request, next: Next) -> Result<Response, Problem> {
    let (actor, viewer) = api.door.admit(&request)?;
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
        let has_token = self.token(request)?;
        if self.keys.is_empty() {
            return Ok((Actor::Api, if has_token { Viewer::NoActions } else { Viewer::Everything }));
        }
        let given = credential(request.headers());
        let key = given.and_then(|given| self.keys.find(given));
        let actor = key.map_or(Actor::Api, |key| Actor::Person(key.name.clone()));
        if has_token || (is_reading(request.method()) && self.public.contain(path)) {
            return Ok((actor, if key.is_some() { Viewer::of(key) } else { Viewer::NoActions }));
        }
        let Some(key) = key else {
            return Err(refused(match given {
                None => "an API key is needed: Authorization: Bearer <key>, or X-API-Key: <key>",
                Some(_) => "the API key is not known",
            }));
        };
        let needed = needed(request.method(), matched(request));
        if key.scope < needed {
            let (has, needs) = (key.scope.as_str(), needed.as_str());
            let detail = format!("the scope of this API key is {has}, but this needs {needs}");
            return Err(Problem::new(StatusCode::FORBIDDEN, detail));
        }
        Ok((actor, Viewer::of(Some(key))))
    }

    /// Whether the request has the token of the task and the run that it is about. A wrong one is always refused.
    fn token(&self, request: &Request) -> Result<bool, Problem> {
        if !takes_token(request.method(), matched(request)) {
            return Ok(false);
        }
        let query = url::form_urlencoded::parse(request.uri().query().unwrap_or_default().as_bytes());
        let (mut run, mut token) = (None, None);
        // The first of each, as the handler reads them; it refuses repetitions.
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
            _ => Err(refused("the token is not that of this task and this run")),
        }
    }
}

pub fn always_open(path: &str) -> bool {
    ALWAYS_OPEN.contains(&path)
}

/// Whether the token of a handle can stand for a key.
pub fn takes_token(method: &Method, path: Option<&str>) -> bool {
    path == Some("/task/{id}") && (is_reading(method) || [Method::PATCH, Method::PUT].contains(method))
}

fn refused(why: &str) -> Problem {
    Problem::new(StatusCode::UNAUTHORIZED, why)
}

fn matched(request: &Request) -> Option<&str> {
    request.extensions().get::<MatchedPath>().map(MatchedPath::as_str)
}

fn is_reading(method: &Method) -> bool {
    [Method::GET, Method::HEAD].contains(method)
}

/// The key as sent. An `Authorization` of another scheme is somebody else's business, such as a proxy's.
fn credential(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(AUTHORIZATION).and_then(|value| {
        let (scheme, rest) = value.as_bytes().split_at_checked("Bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then_some(rest.trim_ascii())
    });
    bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes().trim_ascii()))
}

/// The scope that an operation needs. What is not known to be the daily work with tasks is for administrators, so that a
/// new operation is locked until somebody decides otherwise.
pub fn needed(method: &Method, path: Option<&str>) -> Scope {
    let daily = |path: &str| ["/task", "/batch"].iter().any(|start| is_at_or_below(path, start));
    match path {
        _ if is_reading(method) => Scope::Read,
        // There is nothing there, which anybody with a key may be told.
        None => Scope::Read,
        Some(path) if daily(path) => Scope::Write,
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
    fn the_scope_that_is_needed() {
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
            assert_eq!(needed(&method, path), scope, "{method} {path:?}");
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
