//! End to end under two conditions, to compare the medians. Two services on two databases alternate, because the speed
//! of machines drifts.

use std::sync::Arc;

use super::end_to_end::{EndToEndRun, run_tasks};
use super::requests::{Post, calling, tasks};
use super::{BULK, BULK_CLIENTS, Bench};
use crate::bench::environment::Target;
use crate::bench::load::{self, Latencies};
use crate::bench::progress::Progress;
use crate::bench::report::{Cost, Figure, FigureUnit, Measurement};

const ROUNDS: usize = 7;
const TARGET: f64 = 0.95;

/// Tasks of which a rule lets only one execute, which waits for a report that never comes.
const BLOCKED: &str = r#"{"name":"blocked","kind":"blocked","timeout":86400,"priority":1000,"rules":[{"type":"Concurrency","max_concurrency":1,"matcher":{"kind":"blocked","status":"Running","fields":[]}}]}"#;

/// Compares tables with many finished tasks with empty ones.
pub async fn filled(bench: &Bench<'_>, target: &Target, filled: &Target) -> Result<Measurement, String> {
    compare(bench, target, filled, "with finished tasks").await
}

/// Compares a queue that has many blocked tasks at its head with an empty one.
pub async fn blocked(bench: &Bench<'_>, target: &Target, other: &Target) -> Result<Measurement, String> {
    let count = bench.size(100_000, 10_000);
    let bulk = BULK.min(count);
    let progress = Progress::start(&format!("create {count} blocked tasks"), count.div_ceil(bulk));
    let post = Arc::new(Post::new(other, tasks(bulk, BLOCKED)));
    load::run(&other.peer, BULK_CLIENTS, 0..count.div_ceil(bulk), &post, &progress).await?;
    // A task behind all of them in the queue starts only after the loop has examined all of them.
    let last = calling(bench.sink).replacen('{', r#"{"priority":-1000,"#, 1);
    let post = Arc::new(Post::new(other, tasks(1, &last)));
    load::run(&other.peer, 1, 0..1, &post, &Progress::hidden()).await?;
    bench.sink.next().await?;
    drop(progress);
    compare(bench, target, other, "behind blocked tasks").await
}

async fn compare(bench: &Bench<'_>, free: &Target, hindered: &Target, how: &str) -> Result<Measurement, String> {
    let count = bench.size(10_000, 2000);
    for target in [free, hindered] {
        run_tasks(target, bench.sink, count.div_ceil(10), "warm up").await?;
    }
    let (mut plain, mut slowed) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        plain.push(run_tasks(free, bench.sink, count, "end to end").await?);
        slowed.push(run_tasks(hindered, bench.sink, count, how).await?);
    }
    let mut latencies = Latencies::default();
    for one in &slowed {
        latencies.extend(&one.latencies);
    }
    let (plain, cost, with) = (median(&plain).0, median(&slowed).1, median(&slowed).0);
    let figures = vec![
        Figure::new("", with, FigureUnit::TasksPerSecond),
        Figure::new("without", plain, FigureUnit::TasksPerSecond),
        Figure::new("of that", with / plain, FigureUnit::Times).with_target(TARGET),
    ];
    Ok(Measurement {
        count: count * ROUNDS,
        figures,
        latencies,
        cost,
        memory: hindered.memory(),
        ..Measurement::default()
    })
}

/// Returns the rate and the cost of the median round.
fn median(rounds: &[EndToEndRun]) -> (f64, Cost) {
    let mut sorted: Vec<&EndToEndRun> = rounds.iter().collect();
    sorted.sort_by(|a, b| a.rate.total_cmp(&b.rate));
    sorted.get(sorted.len() / 2).map_or((f64::NAN, Cost::default()), |one| (one.rate, one.cost))
}
