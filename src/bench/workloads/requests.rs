//! Requests that several workloads share: creating tasks, waiting until they are in a status, canceling them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;
use uuid::Uuid;

use super::{BULK, BULK_CLIENTS, CLIENTS, PATIENCE};
use crate::bench::environment::Target;
use crate::bench::load::{self, Requests};
use crate::bench::progress::Progress;
use crate::bench::sink::Sink;
use crate::bench::wire::{self, Peer};

/// Requests that all create tasks with the same body.
pub struct Post {
    body: Vec<u8>,
    /// Whether to keep the ids of the tasks. Finding them in the answer costs more than finding the id of the batch.
    with_ids: bool,
    batches: Mutex<Vec<Uuid>>,
    ids: Mutex<Vec<Uuid>>,
    /// The batches of all workloads, to be canceled at the end.
    created_batches: Arc<Mutex<Vec<Uuid>>>,
}

impl Post {
    pub fn new(target: &Target, body: String) -> Post {
        let created_batches = Arc::clone(&target.created_batches);
        Post { body: body.into(), with_ids: false, batches: Mutex::default(), ids: Mutex::default(), created_batches }
    }

    pub fn keeping_ids(mut self) -> Post {
        self.with_ids = true;
        self
    }

    pub fn batches(&self) -> Vec<Uuid> {
        locked(&self.batches).clone()
    }

    pub fn ids(&self) -> Vec<Uuid> {
        locked(&self.ids).clone()
    }
}

pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Requests for Post {
    fn write(&self, _: usize, peer: &Peer, buffer: &mut Vec<u8>) {
        peer.request(buffer, "POST", "/task", &self.body);
    }

    fn expected(&self) -> u16 {
        201
    }

    fn answered(&self, _: usize, body: &[u8]) {
        let batch = wire::first_uuid(body, "batch_id");
        locked(&self.batches).extend(batch);
        locked(&self.created_batches).extend(batch);
        if self.with_ids {
            let ids = wire::uuids(body, "id");
            locked(&self.ids).extend(ids);
        }
    }
}

/// Returns the body of a request that creates `count` tasks like `each`.
pub fn tasks(count: usize, each: &str) -> String {
    let mut body = String::with_capacity(count * (each.len() + 1) + 2);
    body.push('[');
    for i in 0..count {
        if i > 0 {
            body.push(',');
        }
        body.push_str(each);
    }
    body.push(']');
    body
}

/// A task without `on_start`: once claimed, it waits for a report.
pub const SILENT: &str = r#"{"name":"bench","kind":"bench","timeout":86400}"#;

/// Returns a task whose `on_start` calls the sink.
pub fn calling(sink: &Sink) -> String {
    format!(
        r#"{{"name":"bench","kind":"bench","timeout":86400,"on_start":{{"kind":"Webhook","params":{{"url":"{}","verb":"Post","body":{{"n":1}}}}}}}}"#,
        sink.url
    )
}

/// Creates `count` tasks without `on_start`, and waits until all of them are Running.
pub async fn running_tasks(target: &Target, count: usize) -> Result<Arc<Post>, String> {
    let bulk = BULK.min(count);
    let post = Arc::new(Post::new(target, tasks(bulk, SILENT)).keeping_ids());
    let progress = Progress::start(&format!("create {count} Running tasks"), count.div_ceil(bulk));
    load::run(&target.peer, BULK_CLIENTS, 0..count.div_ceil(bulk), &post, &progress).await?;
    wait_for_status(&target.peer, &post.batches(), "running", post.ids().len()).await?;
    Ok(post)
}

/// Cancels all batches of the benchmark, so that a service that keeps running has none of its tasks alive.
pub async fn cancel(target: &Target) -> Result<(), String> {
    let batches = std::mem::take(&mut *locked(&target.created_batches));
    let progress = Progress::start("cancel the remaining tasks", batches.len());
    let count = batches.len();
    load::run(&target.peer, CLIENTS, 0..count, &Arc::new(Cancel(batches)), &progress).await?;
    Ok(())
}

/// Requests that cancel one batch each.
struct Cancel(Vec<Uuid>);

impl Requests for Cancel {
    fn write(&self, i: usize, peer: &Peer, buffer: &mut Vec<u8>) {
        peer.request(buffer, "DELETE", &format!("/batch/{}", self.0[i]), b"");
    }

    fn expected(&self) -> u16 {
        200
    }
}

/// Waits until the service counts `count` tasks of these batches in a status.
pub async fn wait_for_status(peer: &Peer, batches: &[Uuid], status: &str, count: usize) -> Result<(), String> {
    let started = Instant::now();
    loop {
        let mut found = 0;
        for batch in batches {
            found += batch_number(peer, *batch, &format!("/status_counts/{status}")).await?;
        }
        if found == count as u64 {
            return Ok(());
        }
        if started.elapsed() > PATIENCE {
            return Err(format!("only {found} of {count} tasks are {status} after {} s", PATIENCE.as_secs()));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until a task has failed, and returns the reason.
pub async fn wait_for_failure(peer: &Peer, id: Uuid) -> Result<String, String> {
    let path = format!("/task/{id}");
    loop {
        let (status, body) = load::once(peer, "GET", &path, b"").await?;
        let task: Value = serde_json::from_slice(&body).unwrap_or_default();
        match task["status"].as_str() {
            Some("Failure") => return Ok(task["failure_reason"].as_str().unwrap_or("no failure_reason").to_owned()),
            Some(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            None => return Err(format!("GET {path}: {status} {}", String::from_utf8_lossy(&body))),
        }
    }
}

/// Returns a number from `GET /batch/{id}`.
pub async fn batch_number(peer: &Peer, batch: Uuid, pointer: &str) -> Result<u64, String> {
    let path = format!("/batch/{batch}");
    let (status, body) = load::once(peer, "GET", &path, b"").await?;
    let value: Value = serde_json::from_slice(&body).unwrap_or_default();
    value.pointer(pointer).and_then(Value::as_u64).ok_or_else(|| format!("GET {path}: {status}, no {pointer}"))
}
