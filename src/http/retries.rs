//! Retries by hand, the history of a task, default policies, statistics.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::auth::{Caller, Viewer};
use super::body::Body;
use super::extract::{Id, KindPath, Query};
use super::tasks::next_cursor;
use super::{Api, Problem};
use crate::domain::request::new_policy::read_default_policy;
use crate::domain::request::patch::read_retry_request;
use crate::domain::request::shapes::{NewRetry, RetryRequest};
use crate::domain::view::retry::RetryStats;
use crate::domain::view::{AttemptView, KindPolicy, RetriedBatch, RetriedTask, TaskEvent};

/// Retry a task by hand
///
/// From Failure, Canceled or RetryPending, or when it is being executed and stuck. Its attempts start at 0 again, a
/// scheduled retry is dropped. With `cascade`, tasks that failed only because of it wait for it again.
#[utoipa::path(
    post, path = "/task/{id}/retry", operation_id = "retryTask", tag = "tasks",
    params(("id" = Uuid, Path, description = "The task")),
    request_body = Option<RetryRequest>,
    responses(
        (status = 200, description = "What changed, or would change", body = RetriedTask),
        (status = 400, description = "Every problem", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such task", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "It is being executed, or there is nothing to retry", body = Problem, content_type = "application/problem+json"),
        (status = 413, description = "The body is too large", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn task(
    Caller(service): Caller,
    viewer: Viewer,
    Id(id): Id,
    Body(body, _held): Body,
) -> Result<Json<RetriedTask>, Problem> {
    let request = read_retry_request(body).map_err(Problem::invalid)?;
    let retried = service.retry_task(id, &request).await?;
    Ok(Json(RetriedTask { task: viewer.shown(retried.task), ..retried }))
}

/// Retry what failed in a batch
///
/// Every task that failed by itself, as if each was retried by hand. Canceled tasks stay canceled.
#[utoipa::path(
    post, path = "/batch/{id}/retry", operation_id = "retryBatch", tag = "batches",
    params(("id" = Uuid, Path, description = "The batch")),
    request_body = Option<RetryRequest>,
    responses(
        (status = 200, description = "What changed, or would change", body = RetriedBatch),
        (status = 400, description = "Every problem", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such batch", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "Somebody else is at it", body = Problem, content_type = "application/problem+json"),
        (status = 413, description = "The body is too large", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn batch(
    Caller(service): Caller,
    Id(id): Id,
    Body(body, _held): Body,
) -> Result<Json<RetriedBatch>, Problem> {
    let request = read_retry_request(body).map_err(Problem::invalid)?;
    Ok(Json(service.retry_batch(id, &request).await?))
}

/// The executions of a task
///
/// Those that have ended, first to last, each with what came of it and why.
#[utoipa::path(
    get, path = "/task/{id}/attempts", operation_id = "listAttempts", tag = "tasks",
    params(
        ("id" = Uuid, Path, description = "The task"),
        ("page" = Option<i64>, Query, description = "From 0. Past 100,000 rows (page × page_size) use cursor", minimum = 0, maximum = 100_000),
        ("page_size" = Option<i64>, Query, description = "50 by default; more than 100 is taken for 100", minimum = 1),
        ("cursor" = Option<i32>, Query, description = "X-Next-Cursor of the page before, instead of page"),
    ),
    responses(
        (status = 200, description = "The executions", body = Vec<AttemptView>,
         headers(("X-Next-Cursor" = i32, description = "There is more: the cursor of the next page"))),
        (status = 400, description = "Every problem", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such task", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn attempts(State(api): State<Arc<Api>>, Id(id): Id, mut query: Query) -> Result<Response, Problem> {
    let (page, size) = query.page::<i32>();
    query.close()?;
    let attempts = api.service.attempts(id, page, size).await?;
    let next = next_cursor(attempts.len(), size, attempts.last().map(|attempt| attempt.run));
    Ok((next, Json(attempts)).into_response())
}

/// The audit trail of a task
///
/// Every change of its status, first to last: when, from where to where, why, and on whose behalf.
#[utoipa::path(
    get, path = "/task/{id}/events", operation_id = "listEvents", tag = "tasks",
    params(
        ("id" = Uuid, Path, description = "The task"),
        ("page" = Option<i64>, Query, description = "From 0. Past 100,000 rows (page × page_size) use cursor", minimum = 0, maximum = 100_000),
        ("page_size" = Option<i64>, Query, description = "50 by default; more than 100 is taken for 100", minimum = 1),
        ("cursor" = Option<i64>, Query, description = "X-Next-Cursor of the page before, instead of page"),
    ),
    responses(
        (status = 200, description = "The trail", body = Vec<TaskEvent>,
         headers(("X-Next-Cursor" = i64, description = "There is more: the cursor of the next page"))),
        (status = 400, description = "Every problem", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such task", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn events(State(api): State<Arc<Api>>, Id(id): Id, mut query: Query) -> Result<Response, Problem> {
    let (page, size) = query.page::<i64>();
    query.close()?;
    let events = api.service.events(id, page, size).await?;
    let next = next_cursor(events.len(), size, events.last().map(|event| event.seq));
    Ok((next, Json(events)).into_response())
}

/// Retry statistics
///
/// Of tasks that have a retry policy, counted by the hour.
#[utoipa::path(
    get, path = "/stats/retries", operation_id = "retryStats", tag = "retries",
    params(
        ("kind" = Option<String>, Query, description = "Only tasks of this kind"),
        ("since" = Option<DateTime<Utc>>, Query, description = "RFC 3339; from the beginning of its hour"),
    ),
    responses(
        (status = 200, description = "The statistics", body = RetryStats),
        (status = 400, description = "Every problem", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn stats(State(api): State<Arc<Api>>, mut query: Query) -> Result<Json<RetryStats>, Problem> {
    let (kind, since) = (query.text("kind"), query.timestamp("since"));
    query.close()?;
    Ok(Json(api.service.retry_stats(kind.as_deref(), since).await?))
}

/// List the default policies
///
/// By kind, in alphabetical order.
#[utoipa::path(
    get, path = "/retry-policy", operation_id = "listRetryPolicies", tag = "retries",
    responses(
        (status = 200, description = "The policies", body = Vec<KindPolicy>),
        (status = 503, description = "The database is not available", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn policies(State(api): State<Arc<Api>>) -> Result<Json<Vec<KindPolicy>>, Problem> {
    Ok(Json(api.service.policies().await?))
}

/// Set the default policy of a kind
///
/// For tasks of the kind that are created later without a `retry` of their own, on every instance within a second.
#[utoipa::path(
    put, path = "/retry-policy/{kind}", operation_id = "putRetryPolicy", tag = "retries",
    params(("kind" = String, Path, description = "The kind", min_length = 1, max_length = 100)),
    request_body = NewRetry,
    responses(
        (status = 200, description = "The policy with all defaults filled in", body = KindPolicy),
        (status = 400, description = "Every problem", body = Problem, content_type = "application/problem+json"),
        (status = 413, description = "The body is too large", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn put_policy(
    State(api): State<Arc<Api>>,
    Caller(service): Caller,
    KindPath(kind): KindPath,
    Body(body, _held): Body,
) -> Result<Json<KindPolicy>, Problem> {
    let policy = read_default_policy(body, &api.limits.retry).map_err(Problem::invalid)?;
    Ok(Json(service.put_policy(&kind, &policy).await?))
}

/// Delete the default policy of a kind
///
/// Tasks that were created with it keep it.
#[utoipa::path(
    delete, path = "/retry-policy/{kind}", operation_id = "deleteRetryPolicy", tag = "retries",
    params(("kind" = String, Path, description = "The kind", min_length = 1, max_length = 100)),
    responses(
        (status = 204, description = "Deleted"),
        (status = 400, description = "Every problem", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "The kind has none", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn delete_policy(Caller(service): Caller, KindPath(kind): KindPath) -> Result<StatusCode, Problem> {
    service.delete_policy(&kind).await?;
    Ok(StatusCode::NO_CONTENT)
}
