//! Single requests: reports on Running tasks, and `GET /health`, which costs nothing but the request.

use std::sync::Arc;

use uuid::Uuid;

use super::requests::{batch_number, running_tasks, wait_for_status};
use super::{Bench, CLIENTS, cost, rate};
use crate::bench::environment::Target;
use crate::bench::load::{self, Requests};
use crate::bench::progress::Progress;
use crate::bench::raw::reference::Reference;
use crate::bench::report::{Figure, FigureUnit, Measurement};
use crate::bench::wire::Peer;

/// Requests that report on a list of tasks, one after the other.
pub struct ReportRequests {
    ids: Vec<Uuid>,
    method: &'static str,
    body: &'static [u8],
    expected: u16,
}

impl ReportRequests {
    pub fn success(ids: Vec<Uuid>) -> ReportRequests {
        ReportRequests { ids, method: "PATCH", body: br#"{"status":"Success"}"#, expected: 200 }
    }

    pub fn failure(ids: Vec<Uuid>) -> ReportRequests {
        ReportRequests {
            ids,
            method: "PATCH",
            body: br#"{"status":"Failure","failure_reason":"bench"}"#,
            expected: 200,
        }
    }
}

impl Requests for ReportRequests {
    fn write(&self, i: usize, peer: &Peer, buffer: &mut Vec<u8>) {
        let id = self.ids[i % self.ids.len()];
        peer.request(buffer, self.method, &format!("/task/{id}"), self.body);
    }

    fn expected(&self) -> u16 {
        self.expected
    }
}

struct HealthRequests;

impl Requests for HealthRequests {
    fn write(&self, _: usize, peer: &Peer, buffer: &mut Vec<u8>) {
        peer.request(buffer, "GET", "/health", b"");
    }

    fn expected(&self) -> u16 {
        200
    }
}

/// Measures the upper bound for any request, which shows the cost of clients and connections.
pub async fn health(bench: &Bench<'_>, target: &Target) -> Result<Measurement, String> {
    let (count, requests) = (bench.size(200_000, 50_000), Arc::new(HealthRequests));
    load::run(&target.peer, CLIENTS, 0..count.div_ceil(10), &requests, &Progress::hidden()).await?;
    let progress = Progress::start(&format!("GET /health {count} times"), count);
    let before = target.usage();
    let measured = load::run(&target.peer, CLIENTS, 0..count, &requests, &progress).await?;
    let cost = cost(before, target.usage(), count);
    let figures = vec![Figure::new("", rate(count, measured.elapsed), FigureUnit::RequestsPerSecond)];
    Ok(Measurement { count, figures, latencies: measured.latencies, cost, ..Measurement::default() })
}

/// Reports Success once on each task.
pub async fn patch(bench: &Bench<'_>, target: &Target) -> Result<Measurement, String> {
    let count = bench.size(20_000, 4000);
    let raw = bench.reference_rate(target, Reference::Update, CLIENTS, count, FigureUnit::RequestsPerSecond).await?;
    let warm_up = count.div_ceil(10);
    let post = running_tasks(target, count + warm_up).await?;
    let ids = post.ids();
    let count = ids.len() - warm_up;
    let report = Arc::new(ReportRequests::success(ids));
    load::run(&target.peer, CLIENTS, 0..warm_up, &report, &Progress::hidden()).await?;
    let progress = Progress::start(&format!("PATCH {count} tasks"), count);
    let before = target.usage();
    let measured = load::run(&target.peer, CLIENTS, warm_up..warm_up + count, &report, &progress).await?;
    let cost = cost(before, target.usage(), count);
    wait_for_status(&target.peer, &post.batches(), "success", warm_up + count).await?;
    let figures =
        vec![Figure::new("", rate(count, measured.elapsed), FigureUnit::RequestsPerSecond).with_target(7500.0)];
    let mut outcome =
        Measurement { count, figures, latencies: measured.latencies, cost, raw, ..Measurement::default() };
    if let Some(ratio) = outcome.ratio() {
        outcome.figures.push(Figure::new("raw updates", ratio, FigureUnit::Times).with_target(1.5));
    }
    Ok(outcome)
}

/// Raises a counter by one with each request, and compares the sum with what the service has counted.
pub async fn put(bench: &Bench<'_>, target: &Target) -> Result<Measurement, String> {
    let count = bench.size(100_000, 10_000);
    let raw = bench
        .reference_rate(target, Reference::Count, CLIENTS, count.min(20_000), FigureUnit::RequestsPerSecond)
        .await?;
    let post = running_tasks(target, bench.size(3000, 1000)).await?;
    let report = ReportRequests { ids: post.ids(), method: "PUT", body: br#"{"new_success":1}"#, expected: 202 };
    let (report, warm_up) = (Arc::new(report), count.div_ceil(10));
    load::run(&target.peer, CLIENTS, 0..warm_up, &report, &Progress::hidden()).await?;
    let progress = Progress::start(&format!("PUT {count} times"), count);
    let before = target.usage();
    let measured = load::run(&target.peer, CLIENTS, warm_up..warm_up + count, &report, &progress).await?;
    let cost = cost(before, target.usage(), count);
    let mut counted = 0;
    for batch in post.batches() {
        counted += batch_number(&target.peer, batch, "/total_success").await?;
    }
    if counted != (warm_up + count) as u64 {
        return Err(format!("the service answered {} PUTs and counted {counted}", warm_up + count));
    }
    let figures =
        vec![Figure::new("", rate(count, measured.elapsed), FigureUnit::RequestsPerSecond).with_target(30_000.0)];
    Ok(Measurement { count, figures, latencies: measured.latencies, cost, raw, ..Measurement::default() })
}
