//! What the tests are built on: a real PostgreSQL, the service inside the test process with a clock that the test moves,
//! the real binary, and a receiver for webhooks.

pub mod database;
pub mod fixture;
pub mod instance;
pub mod load;
pub mod lock_holder;
pub mod proxy;
pub mod receiver;
pub mod server;

use std::time::{Duration, Instant};

use reqwest::{Method, Response, StatusCode};
use serde_json::Value;

pub use database::Database;
pub use fixture::Fixture;
pub use instance::Instance;
pub use load::Load;
pub use lock_holder::LockHolder;
pub use proxy::{Fault, Proxy};
pub use receiver::{Receiver, Reply};
pub use server::Server;

/// For `WEBHOOK_ALLOW`: where the receivers are.
pub const LOOPBACK: &str = "127.0.0.0/8,::1";

/// Far more than anything takes, even on a busy machine: it only ends a test that would hang.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until `condition` gives a value.
pub async fn eventually<T>(what: &str, mut condition: impl AsyncFnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = condition().await {
            return value;
        }
        assert!(started.elapsed() < PATIENCE, "still waiting for: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// An HTTP client bound to one service.
#[derive(Clone)]
pub struct Client {
    base: String,
    inner: reqwest::Client,
}

/// An answer, read to its end.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: reqwest::header::HeaderMap,
    pub body: Value,
}

impl Answer {
    /// Whether this is the 503 of an unavailable database, with the time after which to retry.
    pub fn is_not_now(&self) -> bool {
        let header = |name: &str| self.headers.get(name).and_then(|value| value.to_str().ok());
        self.status == 503
            && header("content-type") == Some("application/problem+json")
            && header("retry-after") == Some("1")
            && self.body["status"] == 503
    }
}

impl Client {
    pub fn new(base: impl Into<String>) -> Client {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let inner = reqwest::Client::builder().no_proxy().build().unwrap();
        Client { base: base.into(), inner }
    }

    /// A client that sends these headers with every request.
    pub fn with(&self, headers: &[(&'static str, &str)]) -> Client {
        let pairs = headers.iter().map(|(name, value)| ((*name).parse().unwrap(), value.parse().unwrap()));
        let inner = reqwest::Client::builder().no_proxy().default_headers(pairs.collect()).build().unwrap();
        Client { base: self.base.clone(), inner }
    }

    pub fn key(&self, key: &str) -> Client {
        self.with(&[("authorization", &format!("Bearer {key}"))])
    }

    pub fn base(&self) -> &str {
        &self.base
    }

    pub async fn send(&self, method: Method, path: &str, body: Option<String>) -> reqwest::Result<Answer> {
        self.send_with(method, path, &[], body).await
    }

    pub async fn send_with(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<String>,
    ) -> reqwest::Result<Answer> {
        let mut request = self.inner.request(method, format!("{}{path}", self.base));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(body) = body {
            request = request.body(body);
        }
        read(request.send().await?).await
    }

    pub async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> Answer {
        self.send(method, path, body.map(Value::to_string)).await.unwrap()
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path, None).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.call(Method::POST, path, Some(body)).await
    }

    pub async fn post_with(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
        self.send_with(Method::POST, path, headers, Some(body.to_string())).await.unwrap()
    }

    pub async fn patch(&self, path: &str, body: &Value) -> Answer {
        self.call(Method::PATCH, path, Some(body)).await
    }

    pub async fn put(&self, path: &str, body: &Value) -> Answer {
        self.call(Method::PUT, path, Some(body)).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.call(Method::DELETE, path, None).await
    }

    /// Creates tasks and returns their ids in order.
    pub async fn create(&self, tasks: &Value) -> Vec<String> {
        let answer = self.post("/task", tasks).await;
        assert_eq!(answer.status, 201, "{}", answer.body);
        answer.body.as_array().unwrap().iter().map(|task| text(&task["id"])).collect()
    }

    pub async fn task(&self, id: &str) -> Value {
        let answer = self.get(&format!("/task/{id}")).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.body
    }

    pub async fn status(&self, id: &str) -> String {
        text(&self.task(id).await["status"])
    }

    pub async fn succeed(&self, id: &str) -> Answer {
        self.patch(&format!("/task/{id}"), &serde_json::json!({"status": "Success"})).await
    }

    pub async fn fail(&self, id: &str) -> Answer {
        let body = serde_json::json!({"status": "Failure", "failure_reason": "it broke"});
        self.patch(&format!("/task/{id}"), &body).await
    }

    /// The sum of a counter over all its labels.
    pub async fn counter(&self, name: &str) -> usize {
        let page = text(&self.get("/metrics").await.body);
        let counts = page.lines().filter(|line| line.starts_with(name));
        counts.map(|line| line.rsplit(' ').next().unwrap().parse::<usize>().unwrap()).sum()
    }

    pub async fn wait_for(&self, id: &str, status: &str) -> Value {
        eventually(&format!("{id} to be {status}"), async || {
            let task = self.task(id).await;
            (task["status"] == status).then_some(task)
        })
        .await
    }
}

async fn read(response: Response) -> reqwest::Result<Answer> {
    let (status, headers) = (response.status(), response.headers().clone());
    let bytes = response.bytes().await?;
    let body =
        serde_json::from_slice(&bytes).unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).into_owned()));
    Ok(Answer { status, headers, body })
}

/// The first action of a shown task with this trigger.
pub fn action<'a>(task: &'a Value, trigger: &str) -> &'a Value {
    let actions = task["actions"].as_array().unwrap_or_else(|| panic!("no actions: {task}"));
    actions.iter().find(|action| action["trigger"] == trigger).unwrap_or(&Value::Null)
}

pub fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("not a string: {value}")).to_owned()
}
