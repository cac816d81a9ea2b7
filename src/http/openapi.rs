//! The routes of the API and, derived from them, the API description. A handler that is not registered here has no
//! route.

use std::sync::Arc;

use serde_json::Value;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Api, batches, deliveries, description, health, metrics, retries, tasks};
use crate::domain::request::RequestLimits;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Reprise",
        description = "A task service on PostgreSQL: starts, monitors and retries batches and graphs of tasks over HTTP.\n\n\
            Enumerations in answers may get further values, and answers further fields, in any release. Clients must \
            accept both.",
        license(name = "MIT", identifier = "MIT"),
        contact(name = "Reprise")
    ),
    servers((url = "/", description = "This service")),
    tags(
        (name = "tasks", description = "Create, inspect, report and control tasks"),
        (name = "batches", description = "Tasks created by one request"),
        (name = "retries", description = "Default retry policies and retry statistics"),
        (name = "webhook deliveries", description = "Notifications and the state of their delivery"),
        (name = "system", description = "Health, readiness and metrics for operators")
    )
)]
struct Description;

pub fn routes() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(tasks::create, tasks::list))
        .routes(routes!(tasks::get, tasks::patch, tasks::put, tasks::cancel))
        .routes(routes!(tasks::pause))
        .routes(routes!(tasks::resume))
        .routes(routes!(retries::task))
        .routes(routes!(retries::attempts))
        .routes(routes!(retries::events))
        .routes(routes!(retries::batch))
        .routes(routes!(retries::stats))
        .routes(routes!(retries::policies))
        .routes(routes!(retries::put_policy, retries::delete_policy))
        .routes(routes!(batches::dag))
        .routes(routes!(batches::list))
        .routes(routes!(batches::get, batches::stop))
        .routes(routes!(batches::change_rules))
        .routes(routes!(deliveries::list))
        .routes(routes!(deliveries::redeliver))
        .routes(routes!(health::health))
        .routes(routes!(health::ready))
        .routes(routes!(metrics::metrics))
}

/// The API description of a service with these limits.
pub fn document(limits: &RequestLimits) -> Value {
    description::complete(routes().into_openapi(), limits)
}

/// The API description as text, as committed in `openapi/openapi.json`.
pub fn document_text(limits: &RequestLimits) -> String {
    let mut text = serde_json::to_string_pretty(&document(limits)).unwrap_or_default();
    text.push('\n');
    text
}

#[cfg(test)]
#[path = "tests/openapi.rs"]
mod tests;
