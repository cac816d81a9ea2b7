//! The router is the description: what is not registered here does not exist.

use std::sync::Arc;

use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Api, batches, deliveries, retries, security, system, tasks};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Reprise",
        description = "A task service on PostgreSQL: batches and graphs of HTTP tasks, started, watched and retried.",
        license(name = "MIT", identifier = "MIT"),
        contact(name = "Reprise")
    ),
    servers((url = "/", description = "this service")),
    tags(
        (name = "tasks", description = "Create, watch, report and steer tasks"),
        (name = "batches", description = "Tasks that were created together"),
        (name = "retries", description = "Default policies and statistics"),
        (name = "webhook deliveries", description = "Notifications and what became of them"),
        (name = "system", description = "For operators")
    )
)]
struct Description;

pub fn routes() -> OpenApiRouter<Arc<Api>> {
    let mut routes = OpenApiRouter::with_openapi(Description::openapi())
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
        .routes(routes!(system::health))
        .routes(routes!(system::ready))
        .routes(routes!(system::metrics));
    security::describe(routes.get_openapi_mut());
    routes
}

/// The description as committed in `openapi/openapi.json`.
pub fn document() -> String {
    let document = routes().into_openapi();
    let mut text = document.to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

#[cfg(test)]
#[path = "tests/openapi.rs"]
mod tests;
