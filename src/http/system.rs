//! Handlers for operators: health, readiness, metrics.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use serde::Serialize;
use utoipa::ToSchema;

use super::{Api, Problem};
use crate::domain::task::status::Status;
use crate::store::admission::slots;
use crate::store::ledger::status_counts;
use crate::store::outbox;
use crate::store::tasks::transitions;

#[derive(Debug, Serialize, ToSchema)]
pub struct Health {
    #[schema(example = "ok")]
    status: &'static str,
}

/// Check that the process is alive
///
/// Does not use the database.
#[utoipa::path(
    get, path = "/health", operation_id = "health", tag = "system",
    responses((status = 200, description = "The process is alive", body = Health))
)]
pub async fn health() -> Json<Health> {
    Json(Health { status: "ok" })
}

/// Check that the service is ready
///
/// Queries the database over the connections of requests and over those of the loops.
#[utoipa::path(
    get, path = "/ready", operation_id = "ready", tag = "system",
    responses(
        (status = 200, description = "The database answers", body = Health),
        (status = 503, description = "The database is not available, or the service is shutting down", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn ready(State(api): State<Arc<Api>>) -> Result<Json<Health>, Problem> {
    if api.ending.is_cancelled() {
        return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "the service is shutting down"));
    }
    // Requests and loops have a pool each: one pool can be exhausted while the other is not.
    let (requests, loops) = tokio::join!(api.service.store().ping(), api.loops.ping());
    requests.and(loops)?;
    Ok(Json(Health { status: "ok" }))
}

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
    metrics::gauge!("reprise_pool_connections", "state" => "idle").set(count(idle));
    metrics::gauge!("reprise_pool_connections", "state" => "used").set(count(size - idle));
    // A failed query leaves the last value of its gauge.
    if let Ok(counts) = status_counts::by_status(store).await {
        for (status, count) in Status::ALL.iter().zip(counts) {
            metrics::gauge!("reprise_tasks", "status" => status.as_str()).set(approximate(count));
        }
    }
    if let Ok(age) = transitions::queue_age(store).await {
        metrics::gauge!("reprise_queue_age_seconds").set(age);
    }
    if let Ok(groups) = slots::blocked_groups(store).await {
        metrics::gauge!("reprise_blocked_groups").set(approximate(groups));
    }
    if let Ok((depth, age)) = outbox::delivery::depth(store).await {
        metrics::gauge!("reprise_outbox_depth").set(approximate(depth));
        metrics::gauge!("reprise_outbox_oldest_age_seconds").set(age);
    }
    ([(CONTENT_TYPE, "text/plain; version=0.0.4")], api.metrics.render())
}

#[allow(clippy::cast_precision_loss, reason = "a gauge is a float")]
fn approximate(count: i64) -> f64 {
    count as f64
}
