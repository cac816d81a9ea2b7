//! The largest possible tasks: measures the memory of the service while it processes them and afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::json;

use super::requests::{Post, wait_for_status};
use super::{Bench, PATIENCE};
use crate::bench::environment::Target;
use crate::bench::load;
use crate::bench::progress::Progress;
use crate::bench::report::{Figure, FigureUnit, megabytes};

/// Bytes of the body of a call, a little below the limit of an action.
const BODY: usize = 250 * 1024;
/// Tasks per request, which keep its body below the limit of the service.
const PER_REQUEST: usize = 100;
/// The target of the peak in megabytes.
const PEAK_TARGET: f64 = 250.0;
/// How long the service has to release memory.
const REST: Duration = Duration::from_secs(15);

/// Returns the peak memory of the service while it stored, claimed and called the tasks, and its memory after a rest.
pub async fn large(bench: &Bench<'_>, target: &Target) -> Result<Vec<Figure>, String> {
    let requests = bench.size(8, 2);
    let count = requests * PER_REQUEST;
    let on_start = json!({"kind": "Webhook", "params": {
        "url": bench.sink.url, "verb": "Post", "body": {"large": "x".repeat(BODY)},
    }});
    let task = json!({"name": "large", "kind": "bench", "on_start": on_start});
    let body = json!(vec![task; PER_REQUEST]).to_string();
    let post = Arc::new(Post::new(target, body));
    let progress = Progress::start(&format!("memory: {count} of the largest tasks"), count);
    let (peak, hidden) = (AtomicU64::new(0), Progress::hidden());
    let watching = async {
        loop {
            peak.fetch_max(target.memory().unwrap_or(0), Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let working = async {
        let posting = load::run(&target.peer, 2, 0..requests, &post, &hidden);
        let worked = async {
            for _ in 0..count {
                bench.sink.next().await?;
                progress.step();
            }
            Ok(())
        };
        let worked = tokio::time::timeout(PATIENCE, worked);
        tokio::try_join!(posting, async { worked.await.map_err(|_| "on_start not called in time".to_owned())? })?;
        wait_for_status(&target.peer, &post.batches(), "success", count).await
    };
    tokio::select! {
        never = watching => never,
        worked = working => worked?,
    }
    tokio::time::sleep(REST).await;
    let later = target.memory().unwrap_or(0);
    let peak = Figure::new("with the largest tasks", megabytes(peak.into_inner()), FigureUnit::Megabytes)
        .with_target(PEAK_TARGET);
    Ok(vec![peak, Figure::new("15 s later", megabytes(later), FigureUnit::Megabytes).with_target(PEAK_TARGET / 2.0)])
}
