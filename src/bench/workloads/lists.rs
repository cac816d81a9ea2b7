//! Queries of people and dashboards in a table with many finished tasks: each several times, one at a time.

use serde_json::Value;
use uuid::Uuid;

use super::requests::locked;
use super::{Bench, cost, millis};
use crate::bench::environment::Target;
use crate::bench::load::{self, Latencies};
use crate::bench::progress::Progress;
use crate::bench::report::{Figure, FigureUnit, Measurement};
use crate::bench::wire::{self, Peer};

const TARGET: f64 = 20.0;

pub async fn lists(bench: &Bench<'_>, target: &Target) -> Result<Measurement, String> {
    let rounds = bench.size(20, 10);
    let paths = paths(target).await?;
    let progress = Progress::start("lists", paths.len() * rounds);
    let before = target.usage();
    let (mut all, mut figures) = (Latencies::default(), Vec::new());
    for path in &paths {
        let latencies = ask(&target.peer, path, rounds, &progress).await?;
        let ms = |q| latencies.quantile(q).map_or(f64::NAN, millis);
        let mut figure = Figure::new("", ms(0.5), FigureUnit::Milliseconds).with_target(TARGET);
        figure.of = label(path);
        figures.push(figure.with_max(ms(1.0)));
        all.extend(&latencies);
    }
    // The slowest first, because it decides whether the target is met.
    figures.sort_by(|a, b| b.value.total_cmp(&a.value));
    let count = paths.len() * rounds;
    Ok(Measurement {
        count,
        figures,
        latencies: all,
        cost: cost(before, target.usage(), count),
        ..Measurement::default()
    })
}

/// Sends a query over one connection. The first round warms up and does not count.
async fn ask(peer: &Peer, path: &str, rounds: usize, progress: &Progress) -> Result<Latencies, String> {
    let mut request = Vec::new();
    peer.request(&mut request, "GET", path, b"");
    let failed = |error: std::io::Error| format!("GET {path}: {error}");
    let mut connection = peer.connect().await.map_err(failed)?;
    let mut latencies = Latencies::default();
    for round in 0..=rounds {
        let sent = std::time::Instant::now();
        let answer = connection.exchange(&request).await.map_err(failed)?;
        if answer.status != 200 {
            let body = String::from_utf8_lossy(connection.body(&answer)).into_owned();
            return Err(format!("GET {path}: {} {body}", answer.status));
        }
        if round > 0 {
            latencies.add(sent.elapsed());
            progress.step();
        }
    }
    Ok(latencies)
}

/// Returns the queries: every filter with values that many, few and no tasks have, and cursors far from the start.
async fn paths(target: &Target) -> Result<Vec<String>, String> {
    let peer = &target.peer;
    let small = br#"[{"id":"a","name":"bench","kind":"small","timeout":86400},{"name":"bench","kind":"small","dependencies":[{"id":"a"}]}]"#;
    let (status, created) = load::once(peer, "POST", "/task", small).await?;
    if status != 201 {
        return Err(format!("POST /task: {status} {}", String::from_utf8_lossy(&created)));
    }
    let created: Value = serde_json::from_slice(&created).map_err(|error| format!("POST /task: {error}"))?;
    let (task, batch) = (text(&created[0]["id"])?, text(&created[0]["batch_id"])?);
    locked(&target.created_batches).extend(Uuid::try_parse(&batch));
    let (deep_task, deep_batch) = (fifteen_days_before(&task), fifteen_days_before(&batch));
    // A running service may have no batch that is so old.
    let (_, old) = load::once(peer, "GET", &format!("/batches?page_size=1&cursor={deep_batch}"), b"").await?;
    let old_batch = wire::first_uuid(&old, "batch_id").map_or_else(|| batch.clone(), |id| id.to_string());
    let mut paths: Vec<String> = [
        "/task",
        "/task?status=Success",
        "/task?status=Failure",
        "/task?status=RetryPending",
        "/task?status=Pending,Running",
        "/task?kind=kind-3",
        "/task?kind=rare",
        "/task?kind=none",
        "/task?kind=kind-3&status=Failure",
        "/task?name=name-7",
        "/task?name=none",
        "/task?metadata=%7B%22tenant%22%3A%22t7%22%7D",
        "/task?metadata=%7B%22tenant%22%3A%22none%22%7D",
        "/task?timeout=120",
        "/task?timeout=61",
        "/task?created_after=2999-01-01T00:00:00Z",
        "/task?created_before=2000-01-01T00:00:00Z",
        "/task?page=1000",
        "/batches",
        "/batches?scope=scope-7",
        "/batches?scope=none",
        "/batches?metadata=%7B%22team%22%3A%22m7%22%7D",
        "/stats/retries",
        "/webhook-deliveries",
        "/metrics",
    ]
    .map(str::to_owned)
    .to_vec();
    paths.extend([
        format!("/task?cursor={deep_task}"),
        format!("/task?status=Failure&cursor={deep_task}"),
        format!("/task?batch_id={old_batch}"),
        format!("/batches?cursor={deep_batch}"),
        format!("/batch/{old_batch}"),
        format!("/dag/{batch}"),
        format!("/task/{task}"),
        format!("/task/{task}/attempts"),
        format!("/task/{task}/events"),
    ]);
    Ok(paths)
}

/// Returns a cursor 15 days before an id, in the middle of tables that go back 30 days. Ids begin with the time in
/// milliseconds.
fn fifteen_days_before(id: &str) -> String {
    let digits: String = id.chars().filter(|c| *c != '-').take(12).collect();
    let fifteen_days = 15 * 24 * 3600 * 1000;
    let earlier = u64::from_str_radix(&digits, 16).unwrap_or_default().saturating_sub(fifteen_days);
    let time = format!("{earlier:012x}");
    format!("{}-{}-7000-8000-000000000000", &time[..8], &time[8..])
}

/// Returns a readable path without ids.
fn label(path: &str) -> String {
    let decoded = path.replace("%7B", "{").replace("%7D", "}").replace("%22", "").replace("%3A", ": ");
    let mut label = decoded.clone();
    for part in decoded.split(['/', '=', '&']).filter(|part| Uuid::try_parse(part).is_ok()) {
        label = label.replace(part, "…");
    }
    label
}

fn text(value: &Value) -> Result<String, String> {
    value.as_str().map(str::to_owned).ok_or_else(|| format!("not a string: {value}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_contain_no_ids() {
        let id = Uuid::from_u128(7);
        assert_eq!(label(&format!("/task?status=Failure&cursor={id}")), "/task?status=Failure&cursor=…");
        assert_eq!(label(&format!("/task/{id}/events")), "/task/…/events");
        assert_eq!(label("/task?metadata=%7B%22tenant%22%3A%22t7%22%7D"), "/task?metadata={tenant: t7}");
    }

    #[test]
    fn deep_cursors_are_fifteen_days_earlier() {
        let cursor = fifteen_days_before("019a8b3c-4d5e-7fff-8000-000000000001");
        assert_eq!(cursor, "019a3dfc-e95e-7000-8000-000000000000");
    }
}
