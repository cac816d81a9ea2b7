//! `/task`

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::HeaderMap;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::auth::{Caller, Viewer};
use super::body::{Body, Text};
use super::extract::{Id, Query};
use super::{Api, Problem};
use crate::domain::json::write_canonical;
use crate::domain::request::new_task::read_batch;
use crate::domain::request::patch::{read_patch, read_progress};
use crate::domain::request::shapes::{CreateTasks, HeartbeatBody, TaskPatch};
use crate::domain::task::status::Status;
use crate::domain::view::{TaskDetails, TaskSummary};
use crate::store::Actor;
use crate::store::batches::idempotency::IdempotencyKey;
use crate::store::tasks::list::TaskFilter;

/// Create a batch of tasks
///
/// Either an array of tasks or an object with `tasks`. Dependencies name tasks that appear earlier in the array. A task
/// with a `dedupe_strategy` is skipped if there is one like it already; what depends on it depends on that one then.
#[utoipa::path(
    post, path = "/task", operation_id = "createTasks", tag = "tasks",
    params(("Idempotency-Key" = Option<String>, Header, min_length = 1, max_length = 255,
            description = "Makes the request repeatable for IDEMPOTENCY_TTL_SECS: the same key and body give the same answer")),
    request_body = CreateTasks,
    responses(
        (status = 201, description = "What was created, in the order given; skipped tasks are left out", body = Vec<TaskSummary>,
         headers(("X-Batch-ID" = Uuid, description = "The batch"))),
        (status = 204, description = "Nothing to create: no tasks, or all of them skipped",
         headers(("X-Batch-ID" = Uuid, description = "The batch"))),
        (status = 400, description = "Every problem of every task", body = Problem,
         content_type = "application/problem+json"),
        (status = 413, description = "The body is too large", body = Problem,
         content_type = "application/problem+json"),
        (status = 422, description = "The key was used before with another body", body = Problem,
         content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn create(
    State(api): State<Arc<Api>>,
    Caller(service): Caller,
    headers: HeaderMap,
    Text(body, held): Text,
) -> Result<Response, Problem> {
    let batch = read_batch(&body, &api.limits).map_err(Problem::invalid)?;
    let key = key(&headers, service.actor(), &body, api.idempotency_ttl)?;
    drop(body);
    let created = service.create(batch, key.as_ref()).await?;
    drop(held);
    let id = [("X-Batch-ID", created.batch_id.to_string())];
    if created.tasks.is_empty() {
        return Ok((StatusCode::NO_CONTENT, id).into_response());
    }
    Ok((StatusCode::CREATED, id, Json(created.tasks)).into_response())
}

/// List tasks, newest first
///
/// Filters are combined: a task has to fit all of them.
#[utoipa::path(
    get, path = "/task", operation_id = "listTasks", tag = "tasks",
    params(
        ("status" = Option<String>, Query, description = "One status or several, separated by commas"),
        ("kind" = Option<String>, Query, description = "Exactly this kind"),
        ("name" = Option<String>, Query, description = "Exactly this name"),
        ("batch_id" = Option<Uuid>, Query, description = "Only tasks of this batch"),
        ("metadata" = Option<String>, Query, description = "A JSON object that the metadata contains"),
        ("timeout" = Option<i32>, Query, description = "Exactly this timeout in seconds"),
        ("created_after" = Option<DateTime<Utc>>, Query, description = "RFC 3339"),
        ("created_before" = Option<DateTime<Utc>>, Query, description = "RFC 3339"),
        ("page" = Option<i64>, Query, description = "From 0. Past 100,000 rows (page × page_size) use cursor", minimum = 0, maximum = 100_000),
        ("page_size" = Option<i64>, Query, description = "50 by default; more than 100 is taken for 100", minimum = 1),
        ("cursor" = Option<Uuid>, Query, description = "X-Next-Cursor of the page before, instead of page"),
    ),
    responses(
        (status = 200, description = "The tasks", body = Vec<TaskSummary>,
         headers(("X-Next-Cursor" = Uuid, description = "There is more: the cursor of the next page"))),
        (status = 400, description = "A malformed filter", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn list(State(api): State<Arc<Api>>, mut query: Query) -> Result<Response, Problem> {
    let filter = TaskFilter {
        statuses: query.parsed("status", STATUSES, statuses).unwrap_or_default(),
        kind: query.text("kind"),
        name: query.text("name"),
        batch_id: query.uuid("batch_id"),
        metadata: query.object("metadata"),
        timeout: query.integer("timeout", &(1..=86_400)),
        created_after: query.timestamp("created_after"),
        created_before: query.timestamp("created_before"),
    };
    let (page, size) = query.page::<Uuid>();
    query.close()?;
    let tasks = api.service.tasks(&filter, page, size).await?;
    let next = next_cursor(tasks.len(), size, tasks.last().map(|task| task.id));
    Ok((next, Json(tasks)).into_response())
}

/// Get a task
///
/// With its actions, its retry policy and its last failure.
#[utoipa::path(
    get, path = "/task/{id}", operation_id = "getTask", tag = "tasks",
    params(
        ("id" = Uuid, Path, description = "The task"),
        ("run" = Option<i32>, Query, description = "The run this is about, as in the handle", minimum = 0),
        ("token" = Option<String>, Query, description = "As in the handle: stands for a key, for this task and this run"),
    ),
    responses(
        (status = 200, description = "The whole task", body = TaskDetails),
        (status = 400, description = "Every problem", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such task", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "The task is at another run than the one that was given", body = Problem,
         content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn get(
    State(api): State<Arc<Api>>,
    viewer: Viewer,
    Id(id): Id,
    query: Query,
) -> Result<Json<TaskDetails>, Problem> {
    Ok(Json(viewer.shown(api.service.task(id, run_of(query)?.0).await?)))
}

/// Report how a run ended, or change a task
///
/// Saying again what is recorded for a run changes nothing and is answered with 200.
#[utoipa::path(
    patch, path = "/task/{id}", operation_id = "patchTask", tag = "tasks",
    params(
        ("id" = Uuid, Path, description = "The task"),
        ("run" = Option<i32>, Query, description = "The run this is about, as in the handle", minimum = 0),
        ("token" = Option<String>, Query, description = "As in the handle: stands for a key, for this task and this run"),
    ),
    request_body = TaskPatch,
    responses(
        (status = 200, description = "The task as it now is", body = TaskDetails),
        (status = 400, description = "Every problem", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such task", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "It does not fit the state of the task, or the run is over", body = Problem,
         content_type = "application/problem+json"),
        (status = 413, description = "The body is too large", body = Problem,
         content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn patch(
    State(api): State<Arc<Api>>,
    Caller(service): Caller,
    viewer: Viewer,
    Id(id): Id,
    query: Query,
    Body(body, _held): Body,
) -> Result<Json<TaskDetails>, Problem> {
    let (run, proven) = run_of(query)?;
    let mut patch = read_patch(body, &api.limits).map_err(Problem::invalid)?;
    if let (Some(in_query), Some(in_body)) = (run, patch.run)
        && in_query != in_body
    {
        return Err(Problem::invalid(vec![format!("run: is {in_query} in the query but {in_body} in the body")]));
    }
    patch.run = patch.run.or(run);
    patch.proven = proven;
    Ok(Json(viewer.shown(service.patch(id, patch).await?)))
}

/// Give a sign of life
///
/// Adds to the counters and moves the timeout. Answered when it is durable.
#[utoipa::path(
    put, path = "/task/{id}", operation_id = "putTask", tag = "tasks",
    params(
        ("id" = Uuid, Path, description = "The task"),
        ("run" = Option<i32>, Query, description = "The run this is about, as in the handle", minimum = 0),
        ("token" = Option<String>, Query, description = "As in the handle: stands for a key, for this task and this run"),
    ),
    request_body = Option<HeartbeatBody>,
    responses(
        (status = 202, description = "Recorded"),
        (status = 400, description = "Every problem", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such task", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "The task or its run is over", body = Problem,
         content_type = "application/problem+json"),
        (status = 413, description = "The body is too large", body = Problem,
         content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn put(
    Caller(service): Caller,
    Id(id): Id,
    query: Query,
    Body(body, _held): Body,
) -> Result<StatusCode, Problem> {
    let (run, _) = run_of(query)?;
    let progress = read_progress(body).map_err(Problem::invalid)?;
    service.progress(id, run, progress).await?;
    Ok(StatusCode::ACCEPTED)
}

/// Cancel a task
///
/// Its children end as after a failure. Canceling a canceled task changes nothing.
#[utoipa::path(
    delete, path = "/task/{id}", operation_id = "cancelTask", tag = "tasks",
    params(("id" = Uuid, Path, description = "The task")),
    responses(
        (status = 200, description = "The task as it now is", body = TaskDetails),
        (status = 400, description = "Not a UUID", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such task", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "It has already ended", body = Problem,
         content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn cancel(Caller(service): Caller, viewer: Viewer, Id(id): Id) -> Result<Json<TaskDetails>, Problem> {
    Ok(Json(viewer.shown(service.cancel(id).await?)))
}

/// Pause a task that is not being executed
///
/// Pausing a paused task changes nothing.
#[utoipa::path(
    patch, path = "/task/pause/{id}", operation_id = "pauseTask", tag = "tasks",
    params(("id" = Uuid, Path, description = "The task")),
    responses(
        (status = 200, description = "The task as it now is", body = TaskDetails),
        (status = 400, description = "Not a UUID", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such task", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "It is being executed or has ended", body = Problem,
         content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn pause(Caller(service): Caller, viewer: Viewer, Id(id): Id) -> Result<Json<TaskDetails>, Problem> {
    Ok(Json(viewer.shown(service.pause(id).await?)))
}

/// Resume a paused task
///
/// It goes where it would be by now. Resuming an alive task that is not paused changes nothing.
#[utoipa::path(
    patch, path = "/task/resume/{id}", operation_id = "resumeTask", tag = "tasks",
    params(("id" = Uuid, Path, description = "The task")),
    responses(
        (status = 200, description = "The task as it now is", body = TaskDetails),
        (status = 400, description = "Not a UUID", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such task", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "It has ended", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn resume(Caller(service): Caller, viewer: Viewer, Id(id): Id) -> Result<Json<TaskDetails>, Problem> {
    Ok(Json(viewer.shown(service.resume(id).await?)))
}

/// Keys of different callers never meet.
fn key(headers: &HeaderMap, caller: &Actor, body: &[u8], ttl: Duration) -> Result<Option<IdempotencyKey>, Problem> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    let wrong = || Problem::invalid(vec!["Idempotency-Key: must have 1 to 255 visible ASCII characters".into()]);
    let key = value.to_str().ok().filter(|key| (1..=255).contains(&key.len())).ok_or_else(wrong)?;
    let key = match caller {
        Actor::Person(name) => format!("{name}:{key}"),
        Actor::Api | Actor::Loop(_) => key.to_owned(),
    };
    let mut hash = Hash(Sha256::new());
    let text = std::str::from_utf8(if body.is_empty() { b"{}" } else { body }).map_err(|_| Problem::internal())?;
    write_canonical(text, &mut hash)
        .map_err(|error| Problem::invalid(vec![format!("body: is not valid JSON: {error}")]))?;
    Ok(Some(IdempotencyKey { key, body_hash: hash.0.finalize().to_vec(), ttl }))
}

struct Hash(Sha256);

impl std::io::Write for Hash {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

const STATUSES: &str = "one or several, separated by commas, of Waiting, Pending, Claimed, Running, RetryPending, Paused, \
                         Success, Failure, Canceled";

/// The run that a request is about, and whether it came with its token: the door lets no wrong one in.
fn run_of(mut query: Query) -> Result<(Option<i32>, bool), Problem> {
    let run = query.integer("run", &(0..=i32::MAX));
    let proven = query.text("token").is_some();
    query.close()?;
    Ok((run, proven))
}

fn statuses(text: &str) -> Option<Vec<Status>> {
    text.split(',').map(|one| Status::parse(one.trim())).collect()
}

/// A full page has a next one, as far as one can tell.
pub(super) fn next_cursor(count: usize, size: i64, last: Option<impl ToString>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if i64::try_from(count).is_ok_and(|count| count == size)
        && let Some(value) = last.and_then(|last| last.to_string().parse().ok())
    {
        headers.insert("x-next-cursor", value);
    }
    headers
}
