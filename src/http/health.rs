//! Handlers for operators: health and readiness.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::{Api, Code, Problem};

/// The state of an instance.
#[derive(Debug, Serialize, ToSchema)]
pub struct Health {
    /// Always `ok` while the process lives.
    #[schema(example = "ok")]
    status: &'static str,
    /// The version of Reprise.
    #[schema(example = "0.1.0")]
    version: &'static str,
    /// The id of this instance.
    instance: Uuid,
    /// `ok` or `unreachable`: whether the last transaction reached the database.
    #[schema(example = "ok")]
    database: &'static str,
    /// Open connections for requests.
    pool_size: usize,
    /// Open connections for requests that are idle.
    pool_idle: usize,
}

/// The readiness of an instance.
#[derive(Debug, Serialize, ToSchema)]
pub struct Readiness {
    #[schema(example = "ready")]
    status: &'static str,
}

/// Check that the process is alive
///
/// Does not use the database.
#[utoipa::path(
    get, path = "/health", operation_id = "health", tag = "system",
    responses((status = 200, description = "The process is alive", body = Health))
)]
pub async fn health(State(api): State<Arc<Api>>) -> Json<Health> {
    let store = api.service.store();
    let (pool_size, pool_idle) = store.pool_use();
    Json(Health {
        status: "ok",
        version: env!("CARGO_PKG_VERSION"),
        instance: store.instance(),
        database: if store.is_reachable() { "ok" } else { "unreachable" },
        pool_size,
        pool_idle,
    })
}

/// Check that the service is ready
///
/// Queries the database over the connections of requests and over those of the loops.
#[utoipa::path(
    get, path = "/ready", operation_id = "ready", tag = "system",
    responses(
        (status = 200, description = "The database answers", body = Readiness),
        (status = 503, description = "The database is not available, or the service is shutting down", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn ready(State(api): State<Arc<Api>>) -> Result<Json<Readiness>, Problem> {
    if api.ending.is_cancelled() {
        return Err(Problem::new(Code::ShuttingDown, "the service is shutting down"));
    }
    // Requests and loops have a pool each: one pool can be exhausted while the other is not.
    let (requests, loops) = tokio::join!(api.service.store().ping(), api.loops.ping());
    requests.and(loops)?;
    Ok(Json(Readiness { status: "ready" }))
}
