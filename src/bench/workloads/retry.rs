//! Retries: very many tasks fail at the same moment, and the benchmark measures how late they return to the queue.

use std::sync::Arc;
use std::time::Duration;

use chrono::DateTime;
use serde_json::Value;
use uuid::Uuid;

use super::reports::ReportRequests;
use super::requests::{Post, tasks, wait_for_status};
use super::{Bench, CLIENTS, PATIENCE, cost, millis, rate};
use crate::bench::environment::Target;
use crate::bench::load::{self, Latencies};
use crate::bench::progress::Progress;
use crate::bench::raw::fill;
use crate::bench::raw::reference::Reference;
use crate::bench::report::{Figure, FigureUnit, Measurement};
use crate::bench::wire::Peer;

/// A task that is retried exactly one second after its failure.
const RETRIED: &str = r#"{"name":"bench","kind":"bench","timeout":86400,"retry":{"max_retries":1,"strategy":"fixed_delay","delay_secs":1,"jitter_ms":0}}"#;
const DELAY: Duration = Duration::from_secs(1);
const SAMPLES: usize = 500;
const LATENESS: f64 = 20.0;
/// The pause between failures, where lateness is measured on an idle service.
const REST: Duration = Duration::from_millis(10);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// All tasks time out at the same moment. The timeout loop fails them, the retry loop returns them to the queue, and
/// the start loop claims them again.
pub async fn retry(bench: &Bench<'_>, target: &Target) -> Result<Measurement, String> {
    let Some(database) = &target.database else { return Err("needs a database".into()) };
    let count = bench.size(100_000, 10_000);
    let raw =
        bench.reference_rate(target, Reference::Update, CLIENTS, count.min(20_000), FigureUnit::TasksPerSecond).await?;
    let calm = calm(target, bench.size(100, 50)).await?;
    let like = *calm.ids.first().ok_or("no task was created")?;

    // Long enough for all rows to be inserted before the first task is due.
    let ahead = Duration::from_secs(5 + count as u64 / 10_000);
    let before = RetryCounts::read(&target.peer).await?;
    let (ids, due) = fill::running(database, count, like, ahead).await?;
    let progress = Progress::start(&format!("retry: {count} tasks time out and return"), count);
    tokio::time::sleep_until(due.into()).await;
    let usage = target.usage();
    let (mut seen, mut failing) = (0, None);
    while seen < count as u64 {
        tokio::time::sleep(POLL_INTERVAL).await;
        let now = RetryCounts::read(&target.peer).await?;
        if failing.is_none() && now.failed - before.failed >= count as u64 {
            failing = Some(due.elapsed());
        }
        progress.add(now.back - before.back - seen);
        seen = now.back - before.back;
        if due.elapsed() > PATIENCE {
            return Err(format!("only {seen} of {count} tasks have returned after {} s", PATIENCE.as_secs()));
        }
    }
    // If all tasks have failed before the first retry is due, the service is idle until then.
    let idle = failing.map_or(Duration::ZERO, |failing| DELAY.saturating_sub(failing));
    let elapsed = due.elapsed().saturating_sub(idle);
    let cost = cost(usage, target.usage(), count);
    drop(progress);
    let step = ids.len().div_ceil(SAMPLES);
    let sampled: Vec<Uuid> = ids.into_iter().step_by(step).collect();
    let latencies = lateness(&target.peer, &sampled).await?;
    let median = |latencies: &Latencies| latencies.quantile(0.5).map_or(f64::NAN, millis);
    let figures = vec![
        Figure::new("", rate(count, elapsed), FigureUnit::TasksPerSecond).with_target(10_000.0),
        Figure::new("late meanwhile, median", median(&latencies), FigureUnit::Milliseconds).with_target(LATENESS),
        Figure::new("late at rest, median", median(&calm.lateness), FigureUnit::Milliseconds).with_target(LATENESS),
    ];
    Ok(Measurement { count, figures, latencies, cost, raw, ..Measurement::default() })
}

struct Calm {
    ids: Vec<Uuid>,
    lateness: Latencies,
}

/// Measures a few tasks that fail one after the other.
async fn calm(target: &Target, count: usize) -> Result<Calm, String> {
    let progress = Progress::start(&format!("retry: {count} tasks, one after the other"), count);
    let post = Arc::new(Post::new(target, tasks(count, RETRIED)).keeping_ids());
    load::run(&target.peer, 1, 0..1, &post, &Progress::hidden()).await?;
    wait_for_status(&target.peer, &post.batches(), "running", count).await?;
    let ids = post.ids();
    let report = Arc::new(ReportRequests::failure(ids.clone()));
    for i in 0..count {
        load::run(&target.peer, 1, i..i + 1, &report, &progress).await?;
        tokio::time::sleep(REST).await;
    }
    // After their retry, the tasks are Running again.
    wait_for_status(&target.peer, &post.batches(), "running", count).await?;
    let lateness = lateness(&target.peer, &ids).await?;
    Ok(Calm { ids, lateness })
}

/// The numbers of tasks that have failed and returned so far, from the metrics of the service.
struct RetryCounts {
    failed: u64,
    back: u64,
}

impl RetryCounts {
    async fn read(peer: &Peer) -> Result<RetryCounts, String> {
        let (_, body) = load::once(peer, "GET", "/metrics", b"").await?;
        let text = String::from_utf8_lossy(&body);
        let count = |from: &str, to: &str| {
            let name = format!(r#"reprise_transitions_total{{from="{from}",to="{to}"}} "#);
            text.lines().find_map(|line| line.strip_prefix(&name)?.trim().parse().ok()).unwrap_or(0)
        };
        Ok(RetryCounts { failed: count("running", "retry_pending"), back: count("retry_pending", "pending") })
    }
}

/// Returns for each task the time from `next_retry_at` of its attempt to the event that returned it to the queue.
async fn lateness(peer: &Peer, ids: &[Uuid]) -> Result<Latencies, String> {
    let progress = Progress::start("retry: read how late the tasks were", ids.len());
    let mut latencies = Latencies::default();
    for id in ids {
        let missing = || format!("task {id}: no retry in attempts and events");
        let attempts = get(peer, &format!("/task/{id}/attempts")).await?;
        let due = attempts.iter().find_map(|attempt| time(&attempt["next_retry_at"])).ok_or_else(missing)?;
        let events = get(peer, &format!("/task/{id}/events")).await?;
        let back = events.iter().find(|event| event["from"] == "RetryPending" && event["to"] == "Pending");
        let back = back.and_then(|event| time(&event["at"])).ok_or_else(missing)?;
        latencies.add((back - due).to_std().map_err(|_| format!("task {id} returned before its retry was due"))?);
        progress.step();
    }
    Ok(latencies)
}

async fn get(peer: &Peer, path: &str) -> Result<Vec<Value>, String> {
    let (status, body) = load::once(peer, "GET", path, b"").await?;
    serde_json::from_slice(&body).map_err(|error| format!("GET {path}: {status}: {error}"))
}

fn time(value: &Value) -> Option<DateTime<chrono::FixedOffset>> {
    DateTime::parse_from_rfc3339(value.as_str()?).ok()
}
