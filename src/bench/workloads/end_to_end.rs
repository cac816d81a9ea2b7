//! The whole life of tasks: they are created in bulk, called and reported. The clock runs from the first request to the
//! answer to the last Success.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::requests::{Post, calling, tasks, wait_for_status};
use super::{BULK, BULK_CLIENTS, Bench, CLIENTS, PATIENCE, cost, rate};
use crate::bench::environment::Target;
use crate::bench::load::{self, Latencies};
use crate::bench::progress::Progress;
use crate::bench::raw::reference::Reference;
use crate::bench::report::{Cost, Figure, FigureUnit, Measurement};
use crate::bench::sink::Sink;

const TARGET: f64 = 3000.0;

pub async fn plain(bench: &Bench<'_>, target: &Target, count: usize) -> Result<Measurement, String> {
    let raw =
        bench.reference_rate(target, Reference::Update, CLIENTS, count.min(20_000), FigureUnit::TasksPerSecond).await?;
    run_tasks(target, bench.sink, count.div_ceil(20), "warm up").await?;
    let done = run_tasks(target, bench.sink, count, "end to end").await?;
    Ok(Measurement {
        count: done.count,
        figures: vec![Figure::new("", done.rate, FigureUnit::TasksPerSecond).with_target(TARGET)],
        latencies: done.latencies,
        cost: done.cost,
        raw,
        ..Measurement::default()
    })
}

/// The result of one run of tasks through the service.
pub struct EndToEndRun {
    pub count: usize,
    pub elapsed: Duration,
    pub rate: f64,
    /// From the call of a task to the answer to its Success.
    pub latencies: Latencies,
    pub cost: Cost,
}

/// Creates tasks, waits until all are reported, and checks that the service counts all of them as Success.
pub async fn run_tasks(target: &Target, sink: &Sink, count: usize, what: &str) -> Result<EndToEndRun, String> {
    let per_request = BULK.min(count);
    let requests = count.div_ceil(per_request);
    let count = requests * per_request;
    let post = Arc::new(Post::new(target, tasks(per_request, &calling(sink))));
    let progress = Progress::start(&format!("{what}: {count} tasks"), count);
    let before = target.usage();
    let started = Instant::now();
    let hidden = Progress::hidden();
    let posting = load::run(&target.peer, BULK_CLIENTS, 0..requests, &post, &hidden);
    let working = tokio::time::timeout(PATIENCE, work(sink, count, &progress));
    let (_, worked) =
        tokio::try_join!(posting, async { working.await.map_err(|_| "on_start not called in time".to_owned())? })?;
    let (last, latencies) = worked;
    let cost = cost(before, target.usage(), count);
    wait_for_status(&target.peer, &post.batches(), "success", count).await?;
    let elapsed = last - started;
    Ok(EndToEndRun { count, elapsed, rate: rate(count, elapsed), latencies, cost })
}

/// Waits until `count` tasks are reported. Returns the time of the last report and all latencies.
async fn work(sink: &Sink, count: usize, progress: &Progress) -> Result<(Instant, Latencies), String> {
    let (mut seen, mut latencies, mut last) = (HashSet::with_capacity(count), Latencies::default(), Instant::now());
    while seen.len() < count {
        let worked = sink.next().await?;
        // A call may arrive twice, but the task ends once.
        if seen.insert(worked.id) {
            latencies.add(worked.done - worked.called);
            last = last.max(worked.done);
            progress.step();
        }
    }
    Ok((last, latencies))
}
