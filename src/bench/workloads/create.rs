//! Creates tasks and measures nothing else: their `run_at` is far in the future, so that the service does not claim
//! them.

use std::fmt::Write;
use std::sync::Arc;

use super::requests::{Post, calling, tasks};
use super::{BULK, BULK_CLIENTS, Bench, CLIENTS, cost, rate};
use crate::bench::environment::Target;
use crate::bench::load;
use crate::bench::progress::Progress;
use crate::bench::raw::reference::Reference;
use crate::bench::report::{Figure, FigureUnit, Measurement, ReferenceFigure};

const LEVELS: usize = 10;
const WIDTH: usize = 100;
const PARENTS: usize = 3;

pub async fn single(bench: &Bench<'_>, target: &Target) -> Result<Measurement, String> {
    let count = bench.size(20_000, 4000);
    let raw = bench.reference_rate(target, Reference::Insert, CLIENTS, count, FigureUnit::TasksPerSecond).await?;
    let mut outcome = create(target, run_later(&calling(bench.sink)), 1, CLIENTS, count, raw).await?;
    outcome.figures[0].target = Some(8000.0);
    if let Some(ratio) = outcome.ratio() {
        outcome.figures.push(Figure::new("raw inserts", ratio, FigureUnit::Times).with_target(1.0));
    }
    Ok(outcome)
}

pub async fn bulk(bench: &Bench<'_>, target: &Target) -> Result<Measurement, String> {
    let requests = bench.size(100, 20);
    let kind = Reference::Copy { rows: BULK, links: 0 };
    let raw = bench.reference_rate(target, kind, BULK_CLIENTS, requests * BULK, FigureUnit::TasksPerSecond).await?;
    let mut outcome = create(target, run_later(&calling(bench.sink)), BULK, BULK_CLIENTS, requests, raw).await?;
    outcome.figures[0].target = Some(30_000.0);
    Ok(outcome)
}

pub async fn dag(bench: &Bench<'_>, target: &Target) -> Result<Measurement, String> {
    let requests = bench.size(50, 10);
    let kind = Reference::Copy { rows: LEVELS * WIDTH, links: PARENTS };
    let raw =
        bench.reference_rate(target, kind, BULK_CLIENTS, requests * LEVELS * WIDTH, FigureUnit::TasksPerSecond).await?;
    let body = graph(&calling(bench.sink));
    let post = Arc::new(Post::new(target, body));
    let mut outcome = send(target, &post, LEVELS * WIDTH, BULK_CLIENTS, requests, raw).await?;
    outcome.figures[0].target = Some(15_000.0);
    Ok(outcome)
}

async fn create(
    target: &Target,
    each: String,
    per_request: usize,
    clients: usize,
    requests: usize,
    raw: Option<ReferenceFigure>,
) -> Result<Measurement, String> {
    let post = Arc::new(Post::new(target, tasks(per_request, &each)));
    send(target, &post, per_request, clients, requests, raw).await
}

/// Sends the requests. Before the clock starts, a tenth more of them warm up connections and caches.
async fn send(
    target: &Target,
    post: &Arc<Post>,
    per_request: usize,
    clients: usize,
    requests: usize,
    raw: Option<ReferenceFigure>,
) -> Result<Measurement, String> {
    let progress =
        Progress::start(&format!("create {} tasks, {per_request} per request", requests * per_request), requests);
    load::run(&target.peer, clients, 0..requests.div_ceil(10), post, &Progress::hidden()).await?;
    let before = target.usage();
    let measured = load::run(&target.peer, clients, 0..requests, post, &progress).await?;
    let count = requests * per_request;
    Ok(Measurement {
        count,
        figures: vec![Figure::new("", rate(count, measured.elapsed), FigureUnit::TasksPerSecond)],
        latencies: measured.latencies,
        cost: cost(before, target.usage(), count),
        raw,
        ..Measurement::default()
    })
}

/// Adds a `run_at` far in the future.
fn run_later(task: &str) -> String {
    task.replacen('{', r#"{"run_at":"2999-01-01T00:00:00Z","#, 1)
}

/// Returns levels of tasks. All except those of the first level have their parents in the level before.
fn graph(task: &str) -> String {
    let mut body = String::from("[");
    for level in 0..LEVELS {
        for i in 0..WIDTH {
            let own = format!(r#"{{"id":"{level}-{i}","#);
            let task = if level == 0 { run_later(task) } else { task.to_owned() };
            let mut one = task.replacen('{', &own, 1);
            if level > 0 {
                one.pop();
                one.push_str(r#","dependencies":["#);
                for parent in 0..PARENTS {
                    let comma = if parent == 0 { "" } else { "," };
                    // Distinct parents, spread over the level before.
                    let _ = write!(one, r#"{comma}{{"id":"{}-{}"}}"#, level - 1, (i + parent * 33) % WIDTH);
                }
                one.push_str("]}");
            }
            if body.len() > 1 {
                body.push(',');
            }
            body.push_str(&one);
        }
    }
    body.push(']');
    body
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn every_task_below_the_first_level_has_three_distinct_parents() {
        let tasks: Vec<Value> = serde_json::from_str(&graph(r#"{"name":"n","kind":"k"}"#)).unwrap();
        assert_eq!(tasks.len(), LEVELS * WIDTH);
        assert_eq!(tasks.iter().filter(|task| task.get("run_at").is_some()).count(), WIDTH);
        for task in &tasks[WIDTH..] {
            let mut parents: Vec<&str> =
                task["dependencies"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap()).collect();
            parents.sort_unstable();
            parents.dedup();
            assert_eq!(parents.len(), PARENTS);
        }
    }
}
