//! The whole life of tasks: created in bulk, called, reported. The clock runs from the first request until the last Success
//! has been answered.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::requests::{Post, calling, settled, tasks};
use super::{BULK, BULK_CLIENTS, Bench, CLIENTS, PATIENCE, cost, rate};
use crate::bench::environment::Target;
use crate::bench::load::{self, Latencies};
use crate::bench::progress::Progress;
use crate::bench::raw::limits::Limit;
use crate::bench::report::{Cost, Figure, Measurement, Unit};
use crate::bench::sink::Sink;

const TARGET: f64 = 3000.0;

pub async fn plain(bench: &Bench<'_>, target: &Target, count: usize) -> Result<Measurement, String> {
    let raw = bench.limit_rate(target, Limit::Update, CLIENTS, count.min(20_000), Unit::TasksPerSecond).await?;
    through(target, bench.sink, count.div_ceil(20), "warm up").await?;
    let done = through(target, bench.sink, count, "end to end").await?;
    Ok(Measurement {
        count: done.count,
        figures: vec![Figure::new("", done.rate, Unit::TasksPerSecond).reach(TARGET)],
        latencies: done.latencies,
        cost: done.cost,
        raw,
        ..Measurement::default()
    })
}

pub struct Through {
    pub count: usize,
    pub elapsed: Duration,
    pub rate: f64,
    /// From the call of a task until its Success was answered.
    pub latencies: Latencies,
    pub cost: Cost,
}

/// Sends tasks through the service, and checks with it that every one of them has succeeded.
pub async fn through(target: &Target, sink: &Sink, count: usize, what: &str) -> Result<Through, String> {
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
        tokio::try_join!(posting, async { working.await.map_err(|_| "tasks are not called".to_owned())? })?;
    let (last, latencies) = worked;
    let cost = cost(before, target.usage(), count);
    settled(&target.peer, &post.batches(), "success", count).await?;
    let elapsed = last - started;
    Ok(Through { count, elapsed, rate: rate(count, elapsed), latencies, cost })
}

/// Waits until this many tasks were reported; when the last of them was.
async fn work(sink: &Sink, count: usize, progress: &Progress) -> Result<(Instant, Latencies), String> {
    let (mut seen, mut latencies, mut last) = (HashSet::with_capacity(count), Latencies::default(), Instant::now());
    while seen.len() < count {
        let worked = sink.next().await?;
        // A call may come twice; the task has ended once.
        if seen.insert(worked.id) {
            latencies.add(worked.done - worked.called);
            last = last.max(worked.done);
            progress.step();
        }
    }
    Ok((last, latencies))
}
