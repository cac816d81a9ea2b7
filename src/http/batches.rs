//! `/batches`, `/batch/{id}`, `/batch/{id}/rules`, `/dag/{batch_id}`

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use uuid::Uuid;

use super::auth::Caller;
use super::body::Body;
use super::extract::{Id, Query};
use super::tasks::next_cursor;
use super::{Api, Problem};
use crate::domain::admission::read_rules_change;
use crate::domain::request::shapes::NewRules;
use crate::domain::view::{Batch, BatchSummary, ChangedRules, Dag, StoppedBatch};
use crate::store::batches::list::BatchFilter;

/// List batches, newest first
///
/// With their tasks counted by status. A page whose batches have more than 8 MiB of metadata and kinds is cut short; its
/// `X-Next-Cursor` goes on where it ends.
#[utoipa::path(
    get, path = "/batches", operation_id = "listBatches", tag = "batches",
    params(
        ("scope" = Option<String>, Query, description = "Exactly this scope"),
        ("metadata" = Option<String>, Query, description = "A JSON object that the metadata contains"),
        ("page" = Option<i64>, Query, description = "From 0. Past 100,000 rows (page × page_size) use cursor", minimum = 0, maximum = 100_000),
        ("page_size" = Option<i64>, Query, description = "50 by default; more than 100 is taken for 100", minimum = 1),
        ("cursor" = Option<Uuid>, Query, description = "X-Next-Cursor of the page before, instead of page"),
    ),
    responses(
        (status = 200, description = "The batches", body = Vec<BatchSummary>,
         headers(("X-Next-Cursor" = Uuid, description = "There is more: the cursor of the next page"))),
        (status = 400, description = "A malformed parameter", body = Problem,
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
/// With its tasks counted by status and the sums of their counters.
#[utoipa::path(
    get, path = "/batch/{id}", operation_id = "getBatch", tag = "batches",
    params(("id" = Uuid, Path, description = "The batch")),
    responses(
        (status = 200, description = "The batch and its sums", body = Batch),
        (status = 400, description = "Not a UUID", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such batch", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn get(State(api): State<Arc<Api>>, Id(id): Id) -> Result<Json<Batch>, Problem> {
    Ok(Json(api.service.batch(id).await?))
}

/// Stop a batch
///
/// Cancels every task of it that is alive, those that wait for a retry too.
#[utoipa::path(
    delete, path = "/batch/{id}", operation_id = "stopBatch", tag = "batches",
    params(("id" = Uuid, Path, description = "The batch")),
    responses(
        (status = 200, description = "What was canceled", body = StoppedBatch),
        (status = 400, description = "Not a UUID", body = Problem, content_type = "application/problem+json"),
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
/// All tasks of the kind that are alive get these rules instead of theirs, and those that were blocked are judged anew.
#[utoipa::path(
    patch, path = "/batch/{id}/rules", operation_id = "changeRules", tag = "batches",
    params(("id" = Uuid, Path, description = "The batch")),
    request_body = NewRules,
    responses(
        (status = 200, description = "How many tasks have them now", body = ChangedRules),
        (status = 400, description = "A malformed rule, or one that a task of the batch cannot carry", body = Problem,
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
/// All tasks of the batch, in the order in which they were given, and every link that begins or ends at one of them. The
/// other end may be a task of another batch, which is not among `tasks`.
#[utoipa::path(
    get, path = "/dag/{batch_id}", operation_id = "getDag", tag = "batches",
    params(("batch_id" = Uuid, Path, description = "The batch")),
    responses(
        (status = 200, description = "Tasks and links", body = Dag),
        (status = 400, description = "Not a UUID, or the graph is too large to be shown at once", body = Problem,
         content_type = "application/problem+json"),
        (status = 404, description = "No such batch", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn dag(State(api): State<Arc<Api>>, Id(id): Id) -> Result<Response, Problem> {
    // One at a time: each may be large, and is held several times over until it is written out.
    let Ok(_one) = tokio::time::timeout(api.request_time, api.graphs.acquire()).await else {
        return Err(Problem::unavailable());
    };
    Ok(Json(api.service.dag(id).await?).into_response())
}
