//! One task with very many parents: measures the duration of the last parent's report, which releases it.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use super::reports::ReportRequests;
use super::requests::{SILENT, batch_number, locked, wait_for_status};
use super::{Bench, CLIENTS, cost, millis, rate};
use crate::bench::environment::Target;
use crate::bench::load::{self, Latencies};
use crate::bench::progress::Progress;
use crate::bench::raw::reference::Reference;
use crate::bench::report::{Figure, FigureUnit, Measurement};
use crate::bench::wire;

pub async fn fan_in(bench: &Bench<'_>, target: &Target) -> Result<Measurement, String> {
    // By default, a running service accepts no more tasks in a batch.
    let full = if bench.environment.is_own() { 50_000 } else { 10_000 };
    let tasks = bench.size(full, 5000).max(3);
    let rounds = if bench.quick { 1 } else { 3 };
    let raw = bench.reference_time(target, Reference::Update, 200).await?;
    let (mut latencies, mut elapsed) = (Latencies::default(), Duration::ZERO);
    let before = target.usage();
    for _ in 0..rounds {
        let (parents, last) = round(target, tasks).await?;
        elapsed += parents;
        latencies.add(last);
    }
    let slowest = latencies.quantile(1.0).map_or(f64::NAN, millis);
    let figures = vec![
        Figure::new("last parent", slowest, FigureUnit::Milliseconds).with_target(50.0),
        Figure::new("other parents", rate(rounds * (tasks - 2), elapsed), FigureUnit::RequestsPerSecond),
    ];
    let count = rounds * tasks;
    let cost = cost(before, target.usage(), count);
    Ok(Measurement { count, figures, latencies, cost, raw, ..Measurement::default() })
}

/// Reports all parents. Returns the duration of all reports except the last one, and of the last one.
async fn round(target: &Target, tasks: usize) -> Result<(Duration, Duration), String> {
    let (status, answer) = load::once(&target.peer, "POST", "/task", body(tasks).as_bytes()).await?;
    let (batch, ids) = (wire::first_uuid(&answer, "batch_id"), wire::uuids(&answer, "id"));
    let (Some(batch), 201) = (batch, status) else {
        return Err(format!("POST /task: {status} {}", String::from_utf8_lossy(&answer[..answer.len().min(300)])));
    };
    locked(&target.created_batches).push(batch);
    wait_for_status(&target.peer, &[batch], "running", tasks - 1).await?;
    let report = Arc::new(ReportRequests::success(ids));
    let progress = Progress::start(&format!("fan-in: report {} parents", tasks - 2), tasks - 2);
    let parents = load::run(&target.peer, CLIENTS, 0..tasks - 2, &report, &progress).await?;
    if batch_number(&target.peer, batch, "/status_counts/waiting").await? != 1 {
        return Err("the child did not wait for its last parent".into());
    }
    let last = load::run(&target.peer, 1, tasks - 2..tasks - 1, &report, &Progress::hidden()).await?;
    if batch_number(&target.peer, batch, "/status_counts/waiting").await? != 0 {
        return Err("the child was not released by its last parent".into());
    }
    Ok((parents.elapsed, last.latencies.quantile(1.0).unwrap_or_default()))
}

fn body(tasks: usize) -> String {
    let mut body = String::from("[");
    for i in 0..tasks - 1 {
        body.push_str(&SILENT.replacen('{', &format!(r#"{{"id":"{i}","#), 1));
        body.push(',');
    }
    body.push_str(r#"{"name":"bench","kind":"bench","timeout":86400,"dependencies":["#);
    for i in 0..tasks - 1 {
        let comma = if i == 0 { "" } else { "," };
        let _ = write!(body, r#"{comma}{{"id":"{i}"}}"#);
    }
    body.push_str("]}]");
    body
}
