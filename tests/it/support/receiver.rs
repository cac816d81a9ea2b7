//! A receiver of webhooks: records the calls and answers as the test says.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// One call as it came in.
#[derive(Clone, Debug)]
pub struct Received {
    pub method: String,
    pub path: String,
    pub headers: axum::http::HeaderMap,
    pub body: Value,
    /// The body as it came.
    pub raw: Vec<u8>,
    /// The query parameter `handle`.
    pub handle: Option<String>,
}

impl Received {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    pub fn key(&self) -> String {
        self.header("idempotency-key").to_owned()
    }
}

#[derive(Clone, Debug)]
pub struct Reply {
    pub status: u16,
    pub body: Value,
    pub after: Duration,
    pub headers: Vec<(&'static str, String)>,
}

impl Reply {
    pub fn ok() -> Reply {
        Reply::status(200)
    }

    pub fn status(status: u16) -> Reply {
        Reply { status, body: json!({}), after: Duration::ZERO, headers: Vec::new() }
    }

    pub fn header(mut self, name: &'static str, value: &str) -> Reply {
        self.headers.push((name, value.to_owned()));
        self
    }

    pub fn slow(after: Duration) -> Reply {
        Reply { after, ..Reply::ok() }
    }
}

type Behaviour = Arc<dyn Fn(Received) -> futures_util::future::BoxFuture<'static, Reply> + Send + Sync>;

#[derive(Clone)]
pub struct Receiver {
    pub url: String,
    inner: Arc<Inner>,
}

struct Inner {
    received: Mutex<Vec<Received>>,
    behaviour: Mutex<Behaviour>,
}

impl Receiver {
    /// Answers 200 to everything.
    pub async fn start() -> Receiver {
        let inner = Arc::new(Inner { received: Mutex::default(), behaviour: Mutex::new(always(Reply::ok())) });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new().fallback(handle).with_state(Arc::clone(&inner));
        tokio::spawn(axum::serve(listener, router).into_future());
        Receiver { url, inner }
    }

    pub fn answer(&self, reply: Reply) {
        *self.inner.behaviour.lock().unwrap() = always(reply);
    }

    pub fn answer_with<F>(&self, behaviour: impl Fn(Received) -> F + Send + Sync + 'static)
    where
        F: Future<Output = Reply> + Send + 'static,
    {
        *self.inner.behaviour.lock().unwrap() = Arc::new(move |received| Box::pin(behaviour(received)));
    }

    pub fn received(&self) -> Vec<Received> {
        self.inner.received.lock().unwrap().clone()
    }

    /// The calls to this path.
    pub fn at(&self, path: &str) -> Vec<Received> {
        self.received().into_iter().filter(|received| received.path == path).collect()
    }

    pub fn keys(&self) -> Vec<String> {
        self.received().iter().map(Received::key).collect()
    }

    /// A webhook action that calls this receiver.
    pub fn action(&self, path: &str) -> Value {
        json!({"kind": "Webhook", "params": {"url": format!("{}{path}", self.url), "verb": "Post"}})
    }
}

fn always(reply: Reply) -> Behaviour {
    Arc::new(move |_| {
        let reply = reply.clone();
        Box::pin(async move { reply })
    })
}

async fn handle(State(inner): State<Arc<Inner>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let bytes = to_bytes(body, usize::MAX).await.unwrap_or_default();
    let query = parts.uri.query().unwrap_or_default();
    let handle = url::form_urlencoded::parse(query.as_bytes()).find(|(key, _)| key == "handle");
    let received = Received {
        method: parts.method.to_string(),
        path: parts.uri.path().to_owned(),
        headers: parts.headers,
        body: serde_json::from_slice(&bytes).unwrap_or(Value::Null),
        raw: bytes.to_vec(),
        handle: handle.map(|(_, value)| value.into_owned()),
    };
    inner.received.lock().unwrap().push(received.clone());
    let behaviour = Arc::clone(&*inner.behaviour.lock().unwrap());
    let reply = behaviour(received).await;
    tokio::time::sleep(reply.after).await;
    let status = StatusCode::from_u16(reply.status).unwrap();
    let mut response = (status, reply.body.to_string()).into_response();
    for (name, value) in reply.headers {
        response.headers_mut().insert(name, value.parse().unwrap());
    }
    response
}
