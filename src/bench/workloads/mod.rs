//! The workloads: what each one does, how large it is, and what it is compared with. Each has a service and tables of its
//! own, so that none pays for another.

mod compared;
mod create;
mod end_to_end;
mod fan_in;
mod large;
mod latency;
mod lists;
mod reports;
mod retry;
mod soak;
mod workload;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::environment::{Environment, Target, Usage};
use super::load::{self, Measured, Requests};
use super::progress::Progress;
use super::raw::fill;
use super::raw::limits::{self, Limit};
use super::report::{Cost, Figure, Measurement, Raw, Unit, megabytes};
use super::sink::Sink;
use super::wire::{self, Peer};

pub use workload::{WORKLOADS, Workload};

/// Longer than anything takes that ends at all.
const PATIENCE: Duration = Duration::from_secs(600);
/// Tasks in a request, where the request is not what is measured.
const BULK: usize = 1000;
const BULK_CLIENTS: usize = 4;
/// Clients that send single tasks or reports.
const CLIENTS: usize = 64;

pub struct Bench<'a> {
    pub environment: &'a Environment,
    pub sink: &'a Sink,
    pub quick: bool,
    pub scale: f64,
    pub filled: Option<usize>,
}

impl Bench<'_> {
    /// All of them, or those before the shutdown.
    pub async fn run(&self, wanted: &[Workload], shutdown: &CancellationToken) -> Vec<Measurement> {
        let (mut outcomes, mut filled): (Vec<Measurement>, _) = (Vec::new(), None);
        for workload in wanted {
            let measuring = async {
                match workload {
                    Workload::Memory => self.memory(&outcomes).await,
                    workload => self.one(*workload, &mut filled).await,
                }
            };
            let outcome = shutdown.run_until_cancelled(measuring).await.unwrap_or_else(|| Err("interrupted".into()));
            outcomes.push(outcome.unwrap_or_else(|error| Measurement::failed(workload.name(), error)));
            if shutdown.is_cancelled() {
                self.clean_up().await;
                return outcomes;
            }
        }
        if let Some(target) = filled {
            // What is left of it goes with the environment.
            let _ = self.environment.tear_down(target).await;
        }
        outcomes
    }

    /// After a workload that was broken off. Services of our own go with the environment.
    async fn clean_up(&self) {
        if self.environment.is_own() {
            return;
        }
        let cleaned = async { cancel(&self.environment.target().await?).await };
        if let Err(error) = cleaned.await {
            tracing::warn!(%error, "not all tasks of the benchmark were canceled");
        }
    }

    /// Known already if that workload has been run.
    async fn memory(&self, outcomes: &[Measurement]) -> Result<Measurement, String> {
        let (name, after) = (Workload::Memory.name(), Workload::E2e50k);
        if !self.environment.is_own() {
            return Ok(Measurement::skipped(name, "only with a service of its own, without --url"));
        }
        let earlier = outcomes.iter().find(|outcome| outcome.workload == after.name() && outcome.failed.is_none());
        let outcome = match earlier {
            Some(outcome) => outcome.clone(),
            None => self.one(after, &mut None).await?,
        };
        let Some(bytes) = outcome.memory else { return Ok(Measurement::skipped(name, "there is no /proc")) };
        let mut figures = vec![Figure::new("", megabytes(bytes), Unit::Megabytes).reach(80.0)];
        let (count, memory) = (outcome.count, outcome.memory);
        self.sink.clear().await;
        let target = self.environment.target().await?;
        let large = Box::pin(large::large(self, &target)).await;
        self.environment.tear_down(target).await?;
        figures.extend(large?);
        Ok(Measurement { workload: name, count, figures, memory, ..Measurement::default() })
    }

    /// `filled` has the many finished tasks, once a workload has wanted them.
    async fn one(&self, workload: Workload, filled: &mut Option<Target>) -> Result<Measurement, String> {
        self.sink.clear().await;
        let is_own = self.environment.is_own();
        if workload.needs_own() && !is_own {
            return Ok(Measurement::skipped(workload.name(), "only with a service of its own, without --url"));
        }
        if workload.wants_filled() && is_own && filled.is_none() {
            *filled = Some(self.filled_stage().await?);
        }
        let target = self.environment.target().await?;
        let outcome = async {
            if workload.is_called() {
                self.reached(&target).await?;
            }
            self.perform(workload, &target, filled.as_ref().unwrap_or(&target)).await
        };
        let outcome = outcome.await;
        let memory = target.memory();
        if !is_own {
            cancel(&target).await?;
        }
        self.environment.tear_down(target).await?;
        let outcome = outcome?;
        Ok(Measurement { workload: workload.name(), memory: outcome.memory.or(memory), ..outcome })
    }

    /// A service that cannot call this program would be waited for in vain.
    async fn reached(&self, target: &Target) -> Result<(), String> {
        let (status, body) =
            load::once(&target.peer, "POST", "/task", tasks(1, &calling(self.sink)).as_bytes()).await?;
        let (Some(id), 201) = (wire::first_uuid(&body, "id"), status) else {
            return Err(format!("POST /task: {status} {}", String::from_utf8_lossy(&body)));
        };
        locked(&target.made).extend(wire::first_uuid(&body, "batch_id"));
        tokio::select! {
            worked = self.sink.next() => worked.map(drop),
            why = failure(&target.peer, id) => {
                let url = &self.sink.url;
                Err(format!("the service cannot call {url}, see --sink and WEBHOOK_ALLOW: {}", why?))
            }
        }
    }

    async fn filled_stage(&self) -> Result<Target, String> {
        let target = self.environment.target().await?;
        if let Some(database) = &target.database {
            let count = self.filled.unwrap_or_else(|| self.size(5_000_000, 200_000));
            fill::finished(database, count).await?;
        }
        Ok(target)
    }

    async fn perform(&self, workload: Workload, target: &Target, filled: &Target) -> Result<Measurement, String> {
        match workload {
            Workload::Http => reports::health(self, target).await,
            Workload::Create1 => create::single(self, target).await,
            Workload::Create1000 => create::bulk(self, target).await,
            Workload::CreateDag => create::dag(self, target).await,
            Workload::E2e5k => end_to_end::plain(self, target, self.size(5000, 2000)).await,
            Workload::E2e50k => end_to_end::plain(self, target, self.size(50_000, 10_000)).await,
            Workload::Latency => latency::idle(self, target).await,
            Workload::Chain => latency::chain(self, target).await,
            Workload::Patch => reports::patch(self, target).await,
            Workload::Put => reports::put(self, target).await,
            Workload::Retry => retry::retry(self, target).await,
            Workload::E2eFilled => compared::filled(self, target, filled).await,
            Workload::E2eBlocked => {
                let other = self.environment.target().await?;
                let outcome = compared::blocked(self, target, &other).await;
                self.environment.tear_down(other).await?;
                outcome
            }
            Workload::FanIn => fan_in::fan_in(self, target).await,
            Workload::Lists => lists::lists(self, filled).await,
            Workload::Memory => Err("is no workload of its own".into()),
            Workload::Soak => soak::soak(self, target).await,
        }
    }

    /// How much of something: as the table of targets has it, less of it in a quick run, at least one.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a size")]
    fn size(&self, full: usize, quick: usize) -> usize {
        let size = if self.quick { quick } else { full };
        ((size as f64 * self.scale).ceil() as usize).max(1)
    }

    /// What PostgreSQL does by itself, at the same concurrency.
    async fn limit(
        &self,
        target: &Target,
        limit: Limit,
        connections: usize,
        count: usize,
    ) -> Result<Option<Measured>, String> {
        let Some(database) = &target.database else { return Ok(None) };
        let progress = Progress::start(&format!("PostgreSQL alone: {}", limit.describe()), count);
        limits::measure(database, limit, connections, count, &progress).await.map(Some)
    }

    /// The same as a rate.
    async fn limit_rate(
        &self,
        target: &Target,
        limit: Limit,
        connections: usize,
        count: usize,
        unit: Unit,
    ) -> Result<Option<Raw>, String> {
        let measured = self.limit(target, limit, connections, count).await?;
        Ok(measured.map(|measured| Raw {
            what: limit.describe(),
            figure: Figure::new("", rate(count, measured.elapsed), unit),
        }))
    }

    /// The same as the time that one takes when nothing else goes on.
    async fn limit_time(&self, target: &Target, limit: Limit, count: usize) -> Result<Option<Raw>, String> {
        let measured = self.limit(target, limit, 1, count).await?;
        Ok(measured.and_then(|measured| {
            let figure = Figure::new("", millis(measured.latencies.quantile(0.5)?), Unit::Milliseconds);
            Some(Raw { what: limit.describe(), figure })
        }))
    }
}

/// Creates tasks with the same body again and again, and remembers what came of it.
struct Post {
    body: Vec<u8>,
    /// Whether the ids of the tasks are wanted, which costs more to find than that of the batch.
    with_ids: bool,
    batches: Mutex<Vec<Uuid>>,
    ids: Mutex<Vec<Uuid>>,
    made: Arc<Mutex<Vec<Uuid>>>,
}

impl Post {
    fn new(target: &Target, body: String) -> Post {
        let made = Arc::clone(&target.made);
        Post { body: body.into(), with_ids: false, batches: Mutex::default(), ids: Mutex::default(), made }
    }

    fn keeping_ids(mut self) -> Post {
        self.with_ids = true;
        self
    }

    fn batches(&self) -> Vec<Uuid> {
        locked(&self.batches).clone()
    }

    fn ids(&self) -> Vec<Uuid> {
        locked(&self.ids).clone()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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
fn tasks(count: usize, each: &str) -> String {
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
const SILENT: &str = r#"{"name":"bench","kind":"bench","timeout":86400}"#;

fn calling(sink: &Sink) -> String {
    format!(
        r#"{{"name":"bench","kind":"bench","timeout":86400,"on_start":{{"kind":"Webhook","params":{{"url":"{}","verb":"Post","body":{{"n":1}}}}}}}}"#,
        sink.url
    )
}

/// Creates `count` tasks that nobody is called for, and waits until all of them are Running.
async fn running_tasks(target: &Target, count: usize) -> Result<Arc<Post>, String> {
    let bulk = BULK.min(count);
    let post = Arc::new(Post::new(target, tasks(bulk, SILENT)).keeping_ids());
    let progress = Progress::start(&format!("{count} tasks to be Running"), count.div_ceil(bulk));
    load::run(&target.peer, BULK_CLIENTS, 0..count.div_ceil(bulk), &post, &progress).await?;
    settled(&target.peer, &post.batches(), "running", post.ids().len()).await?;
    Ok(post)
}

/// A service that goes on keeps nothing alive of what was measured.
async fn cancel(target: &Target) -> Result<(), String> {
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
async fn settled(peer: &Peer, batches: &[Uuid], status: &str, count: usize) -> Result<(), String> {
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
async fn failure(peer: &Peer, id: Uuid) -> Result<String, String> {
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
async fn batch_number(peer: &Peer, batch: Uuid, pointer: &str) -> Result<u64, String> {
    let path = format!("/batch/{batch}");
    let (status, body) = load::once(peer, "GET", &path, b"").await?;
    let value: Value = serde_json::from_slice(&body).unwrap_or_default();
    value.pointer(pointer).and_then(Value::as_u64).ok_or_else(|| format!("GET {path}: {status}, no {pointer}"))
}

/// Processor time between two moments, for 1,000 of `count`.
#[allow(clippy::cast_precision_loss, reason = "it is rounded anyway")]
fn cost(before: Usage, after: Usage, count: usize) -> Cost {
    let each = |before: Option<f64>, after: Option<f64>| Some((after? - before?) * 1000.0 / count as f64);
    Cost {
        service: each(before.service, after.service),
        postgres: each(before.postgres, after.postgres),
        generator: each(before.generator, after.generator),
    }
}

#[allow(clippy::cast_precision_loss, reason = "it is rounded anyway")]
fn rate(count: usize, elapsed: Duration) -> f64 {
    count as f64 / elapsed.as_secs_f64()
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
