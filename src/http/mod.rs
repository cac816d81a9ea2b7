//! The HTTP API: handlers, middleware and error answers. Handlers are short; nothing here decides about tasks.

mod auth;
mod batches;
mod body;
mod deliveries;
mod description;
mod error;
mod extract;
mod health;
mod host;
mod metrics;
mod openapi;
mod retries;
mod server;
mod tasks;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::Method;
use axum::http::header::{HeaderName, HeaderValue};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceBuilder;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::request_id::{MakeRequestUuid, PropagateRequestIdLayer, SetRequestIdLayer};
use tower_http::trace::TraceLayer;
use tracing::Instrument;
use utoipa_swagger_ui::SwaggerUi;

use crate::domain::request::RequestLimits;
use crate::service::Service;
use crate::store::{Store, with_cancellation};

pub use auth::Authenticator;
pub use body::Bodies;
pub use error::{Code, Problem};
pub use host::Hosts;
pub use openapi::document_text;
pub use server::serve;

/// State shared by all handlers.
pub struct Api {
    pub service: Service,
    /// The store of the loops, for the readiness check.
    pub loops: Store,
    pub limits: RequestLimits,
    pub bodies: Bodies,
    pub idempotency_ttl: Duration,
    /// Time limit to receive the headers of a request, and again to receive its body.
    pub request_time: Duration,
    pub authenticator: Arc<Authenticator>,
    pub metrics: PrometheusHandle,
    /// Requests in progress, which run to their end even if their clients disconnect.
    pub requests: TaskTracker,
    /// Limits how many graphs are read at once.
    pub graphs: Semaphore,
    /// Canceled when the service starts to shut down.
    pub ending: CancellationToken,
}

fn router(api: Arc<Api>) -> Router {
    let (routes, _) = openapi::routes().split_for_parts();
    let document = openapi::document(&api.limits);
    let request_id = HeaderName::from_static("x-request-id");
    routes
        .route(error::CODES_PAGE, get(error::codes_page))
        .merge(SwaggerUi::new("/docs").external_url_unchecked("/openapi.json", document))
        .fallback(error::no_such_path)
        .method_not_allowed_fallback(error::no_such_method)
        .with_state(Arc::clone(&api))
        .layer(
            ServiceBuilder::new()
                .layer(SetRequestIdLayer::new(request_id.clone(), MakeRequestUuid))
                .layer(TraceLayer::new_for_http().make_span_with(span).on_failure(()))
                .layer(PropagateRequestIdLayer::new(request_id))
                .layer(middleware::from_fn(measure))
                .layer(CatchPanicLayer::custom(panicked))
                .layer(middleware::from_fn_with_state(Arc::clone(&api), auth::authenticate))
                .layer(middleware::from_fn_with_state(api, run_detached)),
        )
}

fn span(request: &Request) -> tracing::Span {
    let id = request.headers().get("x-request-id").and_then(|value| value.to_str().ok()).unwrap_or_default();
    tracing::info_span!(
        "http",
        method = %request.method(),
        path = request.uri().path(),
        request.id = id,
        caller = tracing::field::Empty
    )
}

async fn measure(request: Request, next: Next) -> Response {
    let started = std::time::Instant::now();
    // Methods that clients make up must not become labels.
    let known = [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE, Method::HEAD, Method::OPTIONS];
    let method = if known.contains(request.method()) { request.method().as_str() } else { "other" }.to_owned();
    let path = request
        .extensions()
        .get::<axum::extract::MatchedPath>()
        .map_or_else(|| "unmatched".to_owned(), |path| path.as_str().to_owned());
    // Requests that wait on purpose would hide the others.
    let waits = request.uri().query().is_some_and(|query| query.contains("wait_secs="));
    let mut response = next.run(request).await;
    let status = response.status().as_u16().to_string();
    let labels = [("method", method), ("path", path), ("status", status)];
    let duration = if waits {
        ::metrics::histogram!("reprise_http_wait_duration_seconds", &labels)
    } else {
        ::metrics::histogram!("reprise_http_request_duration_seconds", &labels)
    };
    duration.record(started.elapsed().as_secs_f64());
    response.headers_mut().entry("x-content-type-options").or_insert(HeaderValue::from_static("nosniff"));
    response
}

/// Middleware that runs a request to its end even if the client disconnects. A dropped statement leaves its server process running, uncounted by the pool; many such processes used up all connections. A request that has no connection
/// yet is canceled.
async fn run_detached(State(api): State<Arc<Api>>, request: Request, next: Next) -> Response {
    let unwanted = CancellationToken::new();
    let work = with_cancellation(unwanted.clone(), next.run(request));
    let _wanted = unwanted.drop_guard();
    match api.requests.spawn(work.in_current_span()).await {
        Ok(response) => response,
        Err(error) => {
            tracing::error!(%error, "request failed");
            Problem::internal().into_response()
        }
    }
}

#[allow(clippy::needless_pass_by_value, reason = "the layer requires this signature")]
fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let message = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("unknown");
    tracing::error!(panic = message, "handler panicked");
    Problem::internal().into_response()
}
