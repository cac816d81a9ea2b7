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

/// Creates tasks with the same body again and again, and remembers what came of it.
pub struct Post {
    body: Vec<u8>,
    /// Whether the ids of the tasks are wanted, which costs more to find than that of the batch.
    with_ids: bool,
    batches: Mutex<Vec<Uuid>>,
    ids: Mutex<Vec<Uuid>>,
    made: Arc<Mutex<Vec<Uuid>>>,
}

impl Post {
    pub fn new(target: &Target, body: String) -> Post {
        let made = Arc::clone(&target.made);
        Post { body: body.into(), with_ids: false, batches: Mutex::default(), ids: Mutex::default(), made }
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
        locked(&self.made).extend(batch);
        if self.with_ids {
            let ids = wire::uuids(body, "id");
            locked(&self.ids).extend(ids);
        }
    }
}

/// Tasks in the JSON of a request.
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

/// A task that waits for a report once it is claimed.
pub const SILENT: &str = r#"{"name":"bench","kind":"bench","timeout":86400}"#;

pub fn calling(sink: &Sink) -> String {
    format!(
        r#"{{"name":"bench","kind":"bench","timeout":86400,"on_start":{{"kind":"Webhook","params":{{"url":"{}","verb":"Post","body":{{"n":1}}}}}}}}"#,
        sink.url
    )
}

/// Creates `count` tasks that nobody is called for, and waits until all of them are Running.
pub async fn running_tasks(target: &Target, count: usize) -> Result<Arc<Post>, String> {
    let bulk = BULK.min(count);
    let post = Arc::new(Post::new(target, tasks(bulk, SILENT)).keeping_ids());
    let progress = Progress::start(&format!("{count} tasks to be Running"), count.div_ceil(bulk));
    load::run(&target.peer, BULK_CLIENTS, 0..count.div_ceil(bulk), &post, &progress).await?;
    settled(&target.peer, &post.batches(), "running", post.ids().len()).await?;
    Ok(post)
}

/// A service that goes on keeps nothing alive of what was measured.
pub async fn cancel(target: &Target) -> Result<(), String> {
    let batches = std::mem::take(&mut *locked(&target.made));
    let progress = Progress::start("cancel what is left", batches.len());
    let count = batches.len();
    load::run(&target.peer, CLIENTS, 0..count, &Arc::new(Stop(batches)), &progress).await?;
    Ok(())
}

struct Stop(Vec<Uuid>);

impl Requests for Stop {
    fn write(&self, i: usize, peer: &Peer, buffer: &mut Vec<u8>) {
        peer.request(buffer, "DELETE", &format!("/batch/{}", self.0[i]), b"");
    }

    fn expected(&self) -> u16 {
        200
    }
}

/// Waits until the tasks of these batches are all in a status, as the service itself counts them.
pub async fn settled(peer: &Peer, batches: &[Uuid], status: &str, count: usize) -> Result<(), String> {
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
            return Err(format!("{found} of {count} tasks are {status} after {} s", PATIENCE.as_secs()));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until a task has failed; why.
pub async fn failure(peer: &Peer, id: Uuid) -> Result<String, String> {
    let path = format!("/task/{id}");
    loop {
        let (status, body) = load::once(peer, "GET", &path, b"").await?;
        let task: Value = serde_json::from_slice(&body).unwrap_or_default();
        match task["status"].as_str() {
            Some("Failure") => return Ok(task["failure_reason"].as_str().unwrap_or("it does not say why").to_owned()),
            Some(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            None => return Err(format!("GET {path}: {status} {}", String::from_utf8_lossy(&body))),
        }
    }
}

/// A number in `GET /batch/{id}`.
pub async fn batch_number(peer: &Peer, batch: Uuid, pointer: &str) -> Result<u64, String> {
    let path = format!("/batch/{batch}");
    let (status, body) = load::once(peer, "GET", &path, b"").await?;
    let value: Value = serde_json::from_slice(&body).unwrap_or_default();
    value.pointer(pointer).and_then(Value::as_u64).ok_or_else(|| format!("GET {path}: {status}, no {pointer}"))
}
