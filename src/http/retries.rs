//! Handlers of manual retries, the history of a task, default retry policies and retry statistics.

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
use crate::domain::view::retry::RetryStats;
use crate::domain::view::{AttemptView, KindPolicy, RetriedBatch, RetriedTask, TaskEvent};

/// Retry a task manually
///
/// Retries a task that is Failure, Canceled or RetryPending, or that is Claimed or Running without a heartbeat for
/// `STUCK_AFTER_SECS`. Its `attempt` starts at 0 again, and a scheduled retry is dropped. With `cascade`, tasks that
/// failed only because of this task wait for it again. With `dry_run`, nothing changes.
#[utoipa::path(
    post, path = "/task/{id}/retry", operation_id = "retryTask", tag = "tasks",
    params(("id" = Uuid, Path, description = "The task")),
    request_body = ref("#/components/schemas/ManualRetry"),
    responses(
        (status = 200, description = "What changed or, with dry_run, would change", body = RetriedTask),
        (status = 400, description = "Invalid request; details lists every problem", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such task", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "The task is executing and not stuck, or has not failed", body = Problem, content_type = "application/problem+json"),
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
    Ok(Json(RetriedTask { task: viewer.redact(retried.task), ..retried }))
}

/// Retry the failed tasks of a batch
///
/// Retries every task of the batch that failed by itself, as a manual retry of each task would. Canceled tasks stay
/// canceled. With `dry_run`, nothing changes.
#[utoipa::path(
    post, path = "/batch/{id}/retry", operation_id = "retryBatch", tag = "batches",
    params(("id" = Uuid, Path, description = "The batch")),
    request_body = ref("#/components/schemas/ManualRetry"),
    responses(
        (status = 200, description = "What changed or, with dry_run, would change", body = RetriedBatch),
        (status = 400, description = "Invalid request; details lists every problem", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such batch", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "A failed task cannot be retried: another request changed it, or it needs the success of a task that ended badly", body = Problem, content_type = "application/problem+json"),
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

/// List the attempts of a task
///
/// Returns the runs of the task that have ended, oldest first, each with its result and the reason. A page has at most
/// 100 runs.
#[utoipa::path(
    get, path = "/task/{id}/attempts", operation_id = "listAttempts", tag = "tasks",
    params(
        ("id" = Uuid, Path, description = "The task"),
        ("page" = Option<i64>, Query, description = "Page number, from 0. page × page_size must not exceed 100,000; use cursor beyond that", minimum = 0, maximum = 100_000),
        ("page_size" = Option<i64>, Query, description = "Rows per page, 50 by default; values above 100 count as 100", minimum = 1),
        ("cursor" = Option<i32>, Query, description = "X-Next-Cursor of the previous page; replaces page"),
    ),
    responses(
        (status = 200, description = "The attempts", body = Vec<AttemptView>,
         headers(("X-Next-Cursor" = i32, description = "Cursor of the next page, if there may be one"))),
        (status = 400, description = "Invalid request; details lists every problem", body = Problem, content_type = "application/problem+json"),
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

/// List the audit trail of a task
///
/// Returns every status change of the task, oldest first: when, from which status to which, why, and on whose behalf. A
/// page has at most 100 events.
#[utoipa::path(
    get, path = "/task/{id}/events", operation_id = "listEvents", tag = "tasks",
    params(
        ("id" = Uuid, Path, description = "The task"),
        ("page" = Option<i64>, Query, description = "Page number, from 0. page × page_size must not exceed 100,000; use cursor beyond that", minimum = 0, maximum = 100_000),
        ("page_size" = Option<i64>, Query, description = "Rows per page, 50 by default; values above 100 count as 100", minimum = 1),
        ("cursor" = Option<i64>, Query, description = "X-Next-Cursor of the previous page; replaces page"),
    ),
    responses(
        (status = 200, description = "The events", body = Vec<TaskEvent>,
         headers(("X-Next-Cursor" = i64, description = "Cursor of the next page, if there may be one"))),
        (status = 400, description = "Invalid request; details lists every problem", body = Problem, content_type = "application/problem+json"),
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

/// Get retry statistics
///
/// Covers the tasks that have a retry policy. Reprise counts them by the hour.
#[utoipa::path(
    get, path = "/stats/retries", operation_id = "retryStats", tag = "retries",
    params(
        ("kind" = Option<String>, Query, description = "Tasks of this kind"),
        ("since" = Option<DateTime<Utc>>, Query, description = "RFC 3339 timestamp; statistics start at the beginning of its hour"),
    ),
    responses(
        (status = 200, description = "The statistics", body = RetryStats),
        (status = 400, description = "Invalid request; details lists every problem", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn stats(State(api): State<Arc<Api>>, mut query: Query) -> Result<Json<RetryStats>, Problem> {
    let (kind, since) = (query.text("kind"), query.timestamp("since"));
    query.close()?;
    Ok(Json(api.service.retry_stats(kind.as_deref(), since).await?))
}

/// List the default retry policies
///
/// Returns the default policies of all kinds, in alphabetical order of the kinds.
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

/// Set the default retry policy of a kind
///
/// The policy applies to tasks of the kind that are created without a `retry` of their own. Every instance uses it
/// within a second. Existing tasks keep their policy.
#[utoipa::path(
    put, path = "/retry-policy/{kind}", operation_id = "putRetryPolicy", tag = "retries",
    params(("kind" = String, Path, description = "The kind", min_length = 1, max_length = 100)),
    request_body = ref("#/components/schemas/RetryPolicyInput"),
    responses(
        (status = 200, description = "The policy, with every default filled in", body = KindPolicy),
        (status = 400, description = "Invalid request; details lists every problem", body = Problem, content_type = "application/problem+json"),
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
    let policy = read_default_policy(body, &api.limits).map_err(Problem::invalid)?;
    Ok(Json(service.put_policy(&kind, &policy).await?))
}

/// Delete the default retry policy of a kind
///
/// Tasks that were created with the policy keep it.
#[utoipa::path(
    delete, path = "/retry-policy/{kind}", operation_id = "deleteRetryPolicy", tag = "retries",
    params(("kind" = String, Path, description = "The kind", min_length = 1, max_length = 100)),
    responses(
        (status = 204, description = "The policy is deleted"),
        (status = 400, description = "Invalid request; details lists every problem", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "The kind has no default policy", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn delete_policy(Caller(service): Caller, KindPath(kind): KindPath) -> Result<StatusCode, Problem> {
    service.delete_policy(&kind).await?;
    Ok(StatusCode::NO_CONTENT)
}
