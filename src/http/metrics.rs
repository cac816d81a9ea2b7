//! The handler of `/metrics`. It reads the gauges that come from the database.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;

use super::Api;
use crate::domain::task::status::Status;
use crate::store::ledger::status_counts;
use crate::store::outbox;
use crate::store::rules::slots;
use crate::store::tasks::transitions;

/// Get metrics for Prometheus
///
/// Without a database, the gauges that are read from it keep their last values.
#[utoipa::path(
    get, path = "/metrics", operation_id = "metrics", tag = "system",
    responses((status = 200, description = "Prometheus text format", body = String, content_type = "text/plain"))
)]
pub async fn metrics(State(api): State<Arc<Api>>) -> impl IntoResponse {
    let store = api.service.store();
    let (size, idle) = store.pool_use();
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    ::metrics::gauge!("reprise_pool_connections", "state" => "idle").set(count(idle));
    ::metrics::gauge!("reprise_pool_connections", "state" => "used").set(count(size - idle));
    ::metrics::gauge!("reprise_waiting_requests").set(count(store.waiters().count()));
    // A failed query leaves the last value of its gauge.
    if let Ok(counts) = status_counts::by_status(store).await {
        for (status, count) in Status::ALL.iter().zip(counts) {
            ::metrics::gauge!("reprise_tasks", "status" => status.as_str()).set(approximate(count));
        }
    }
    if let Ok(age) = transitions::queue_age(store).await {
        ::metrics::gauge!("reprise_queue_age_seconds").set(age);
    }
    if let Ok(groups) = slots::blocked_groups(store).await {
        ::metrics::gauge!("reprise_blocked_groups").set(approximate(groups));
    }
    if let Ok((depth, age)) = outbox::delivery::depth(store).await {
        ::metrics::gauge!("reprise_outbox_depth").set(approximate(depth));
        ::metrics::gauge!("reprise_outbox_oldest_age_seconds").set(age);
    }
    ([(CONTENT_TYPE, "text/plain; version=0.0.4")], api.metrics.render())
}

#[allow(clippy::cast_precision_loss, reason = "a gauge is a float")]
fn approximate(count: i64) -> f64 {
    count as f64
}
