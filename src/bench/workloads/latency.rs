//! Latency on an idle service.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::requests::{calling, tasks};
use super::{Bench, PATIENCE, cost, millis};
use crate::bench::environment::Target;
use crate::bench::load::Latencies;
use crate::bench::progress::Progress;
use crate::bench::raw::reference::Reference;
use crate::bench::report::{Figure, FigureUnit, Measurement};
use crate::bench::sink::{Sink, Worked};
use crate::bench::wire::{self, Connection};

const WARM_UP: usize = 10;
/// The pause between two rounds, after which the service is idle.
const REST: Duration = Duration::from_millis(20);
/// Tasks in a chain.
const LENGTH: usize = 50;

/// Measures the time from before a request is sent until its call arrives.
pub async fn idle(bench: &Bench<'_>, target: &Target) -> Result<Measurement, String> {
    let rounds = bench.size(200, 50);
    let raw = bench.reference_time(target, Reference::Insert, rounds.max(100)).await?;
    let mut buffer = Vec::new();
    target.peer.request(&mut buffer, "POST", "/task", tasks(1, &calling(bench.sink)).as_bytes());
    let mut connection = target.peer.connect().await.map_err(|error| error.to_string())?;
    let progress = Progress::start("latency: one task at a time", rounds + WARM_UP);
    let (mut latencies, mut before) = (Latencies::default(), target.usage());
    for round in 0..rounds + WARM_UP {
        if round == WARM_UP {
            before = target.usage();
        }
        let sent = Instant::now();
        post(&mut connection, &buffer).await?;
        let worked = next(bench.sink).await?;
        if round >= WARM_UP {
            latencies.add(worked.called - sent);
        }
        progress.step();
        tokio::time::sleep(REST).await;
    }
    let figures =
        vec![figure("p50", &latencies, 0.5).with_target(5.0), figure("p99", &latencies, 0.99).with_target(20.0)];
    let cost = cost(before, target.usage(), rounds);
    Ok(Measurement { count: rounds, figures, latencies, cost, raw, ..Measurement::default() })
}

/// Measures the time from before the Success of a task is sent until the call of the next task arrives.
pub async fn chain(bench: &Bench<'_>, target: &Target) -> Result<Measurement, String> {
    let chains = bench.size(10, 2);
    let raw = bench.reference_time(target, Reference::Update, 200).await?;
    let mut buffer = Vec::new();
    target.peer.request(&mut buffer, "POST", "/task", links(&calling(bench.sink)).as_bytes());
    let mut connection = target.peer.connect().await.map_err(|error| error.to_string())?;
    let progress = Progress::start("chain: one task after the other", (chains + 1) * LENGTH);
    let (mut latencies, mut before) = (Latencies::default(), target.usage());
    for round in 0..=chains {
        // The first round warms up.
        if round == 1 {
            before = target.usage();
        }
        let ids = post(&mut connection, &buffer).await?;
        let mut worked: HashMap<Uuid, Worked> = HashMap::new();
        while worked.len() < LENGTH {
            let one = next(bench.sink).await?;
            worked.insert(one.id, one);
            progress.step();
        }
        let order: Vec<&Worked> = ids.iter().filter_map(|id| worked.get(id)).collect();
        for pair in order.windows(2).filter(|_| round > 0) {
            latencies.add(pair[1].called - pair[0].reported);
        }
        tokio::time::sleep(REST).await;
    }
    let count = chains * LENGTH;
    let figures = vec![figure("p50", &latencies, 0.5).with_target(10.0)];
    Ok(Measurement {
        count,
        figures,
        latencies,
        cost: cost(before, target.usage(), count),
        raw,
        ..Measurement::default()
    })
}

fn links(task: &str) -> String {
    let one = |i: usize| {
        let own = if i == 0 {
            format!(r#"{{"id":"{i}","#)
        } else {
            format!(r#"{{"id":"{i}","dependencies":[{{"id":"{}"}}],"#, i - 1)
        };
        task.replacen('{', &own, 1)
    };
    format!("[{}]", (0..LENGTH).map(one).collect::<Vec<_>>().join(","))
}

async fn post(connection: &mut Connection, request: &[u8]) -> Result<Vec<Uuid>, String> {
    let answer = connection.exchange(request).await.map_err(|error| format!("POST /task: {error}"))?;
    let body = connection.body(&answer);
    match answer.status {
        201 => Ok(wire::uuids(body, "id")),
        status => Err(format!("POST /task: {status} {}", String::from_utf8_lossy(body))),
    }
}

async fn next(sink: &Sink) -> Result<Worked, String> {
    tokio::time::timeout(PATIENCE, sink.next()).await.map_err(|_| "on_start not called in time".to_owned())?
}

fn figure(of: &'static str, latencies: &Latencies, q: f64) -> Figure {
    Figure::new(of, latencies.quantile(q).map_or(f64::NAN, millis), FigureUnit::Milliseconds)
}
