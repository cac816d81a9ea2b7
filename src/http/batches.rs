//! Handlers of `/batches`, `/batch/{id}`, `/batch/{id}/rules` and `/dag/{batch_id}`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use uuid::Uuid;

use super::auth::Caller;
use super::body::Body;
use super::extract::{Id, Query};
use super::tasks::next_cursor;
use super::{Api, Code, Problem};
use crate::domain::request::new_rule::read_rules_change;
use crate::domain::view::{Batch, BatchSummary, ChangedRules, Dag, StoppedBatch};
use crate::store::batches::list::BatchFilter;
use crate::store::waiters::Awaited;

/// List batches
///
/// Returns batches, newest first, each with its tasks counted by status. A page has at most 100 batches. It ends early
/// if the metadata and kinds of its batches exceed 8 MiB; its `X-Next-Cursor` continues from there.
#[utoipa::path(
    get, path = "/batches", operation_id = "listBatches", tag = "batches",
    params(
        ("scope" = Option<String>, Query, description = "Exactly this scope"),
        ("metadata" = Option<String>, Query, description = "A JSON object that the metadata contains"),
        ("page" = Option<i64>, Query, description = "Page number, from 0. page × page_size must not exceed 100,000; use cursor beyond that", minimum = 0, maximum = 100_000),
        ("page_size" = Option<i64>, Query, description = "Rows per page, 50 by default; values above 100 count as 100", minimum = 1),
        ("cursor" = Option<Uuid>, Query, description = "X-Next-Cursor of the previous page; replaces page"),
    ),
    responses(
        (status = 200, description = "The batches", body = Vec<BatchSummary>,
         headers(("X-Next-Cursor" = Uuid, description = "Cursor of the next page, if there may be one"))),
        (status = 400, description = "Invalid parameter; details lists every problem", body = Problem,
         content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn list(State(api): State<Arc<Api>>, mut query: Query) -> Result<Response, Problem> {
    let filter = BatchFilter { scope: query.text("scope"), metadata: query.object("metadata") };
    let (page, size) = query.page::<Uuid>();
    query.close()?;
    let (batches, cut) = api.service.batches(&filter, page, size).await?;
    let full = if cut { usize::try_from(size).unwrap_or(0) } else { batches.len() };
    let next = next_cursor(full, size, batches.last().map(|batch| batch.batch_id));
    Ok((next, Json(batches)).into_response())
}

/// Get a batch
///
/// Returns the batch with its tasks counted by status and the sums of their counters.
///
/// With `wait_secs`, Reprise answers as soon as the batch is complete, at the latest after that time. An instance lets
/// at most 20,000 requests wait; further ones get 503.
#[utoipa::path(
    get, path = "/batch/{id}", operation_id = "getBatch", tag = "batches",
    params(
        ("id" = Uuid, Path, description = "The batch"),
        ("wait_secs" = Option<u64>, Query, description = "How long to wait until the batch is complete; 0, the default, answers at once", minimum = 0, maximum = 60),
    ),
    responses(
        (status = 200, description = "The batch", body = Batch),
        (status = 400, description = "Invalid request; details lists every problem", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such batch", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn get(State(api): State<Arc<Api>>, Id(id): Id, mut query: Query) -> Result<Json<Batch>, Problem> {
    let time = query.wait();
    query.close()?;
    let _permit = api.service.wait(Awaited::Batch(id), None, time, &api.ending).await?;
    Ok(Json(api.service.batch(id).await?))
}

/// Stop a batch
///
/// Cancels every task of the batch that has not ended, including tasks that wait for a retry. Reprise stops a large
/// batch in several transactions, 1,000 tasks each. If the request fails halfway, send it again.
#[utoipa::path(
    delete, path = "/batch/{id}", operation_id = "stopBatch", tag = "batches",
    params(("id" = Uuid, Path, description = "The batch")),
    responses(
        (status = 200, description = "Canceled tasks, counted by their previous status", body = StoppedBatch),
        (status = 400, description = "The id is not a UUID", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such batch", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn stop(Caller(service): Caller, Id(id): Id) -> Result<Json<StoppedBatch>, Problem> {
    Ok(Json(service.stop(id).await?))
}

/// Change the rules of a batch's tasks
///
/// Replaces the rules of all tasks of the given kind that have not ended. Reprise then rechecks the blocked tasks among
/// them.
#[utoipa::path(
    patch, path = "/batch/{id}/rules", operation_id = "changeRules", tag = "batches",
    params(("id" = Uuid, Path, description = "The batch")),
    request_body = ref("#/components/schemas/RulesInput"),
    responses(
        (status = 200, description = "Number of tasks that have the new rules", body = ChangedRules),
        (status = 400, description = "Invalid rule, or a rule that does not fit a task of the batch", body = Problem,
         content_type = "application/problem+json"),
        (status = 404, description = "No such batch", body = Problem, content_type = "application/problem+json"),
        (status = 413, description = "The body is too large", body = Problem,
         content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn change_rules(
    Caller(service): Caller,
    Id(id): Id,
    Body(body, _held): Body,
) -> Result<Json<ChangedRules>, Problem> {
    let change = read_rules_change(body).map_err(Problem::invalid)?;
    Ok(Json(service.change_rules(id, &change).await?))
}

/// Get the graph of a batch
///
/// Returns all tasks of the batch in the order of the request, and every link that starts or ends at one of them. The
/// other end of a link may be a task of another batch, which is not in `tasks`. The graph may have at most 48 MiB; list
/// the tasks of a larger batch with `GET /task?batch_id=…`.
#[utoipa::path(
    get, path = "/dag/{batch_id}", operation_id = "getDag", tag = "batches",
    params(("batch_id" = Uuid, Path, description = "The batch")),
    responses(
        (status = 200, description = "Tasks and links", body = Dag),
        (status = 400, description = "The id is not a UUID, or the graph is larger than 48 MiB", body = Problem,
         content_type = "application/problem+json"),
        (status = 404, description = "No such batch", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn dag(State(api): State<Arc<Api>>, Id(id): Id) -> Result<Response, Problem> {
    // One graph at a time: it may be large, and several copies of it are in memory until the answer is sent.
    let Ok(_permit) = tokio::time::timeout(api.request_time, api.graphs.acquire()).await else {
        let detail = "too many graphs are being read; this request waited for REQUEST_TIMEOUT_SECS";
        return Err(Problem::new(Code::Overloaded, detail));
    };
    Ok(Json(api.service.dag(id).await?).into_response())
}
