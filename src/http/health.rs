//! Handlers for operators: health and readiness.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;

use super::{Api, Problem};

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
