//! Handlers of `/task`: create, list, read, report, cancel, pause, resume.

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
use super::body::{Body, BodyText};
use super::extract::{Id, Query};
use super::{Api, Problem};
use crate::domain::json::write_canonical;
use crate::domain::request::new_batch::read_batch;
use crate::domain::request::patch::{read_heartbeat, read_patch};
use crate::domain::request::problems::ProblemCode;
use crate::domain::task::status::{Status, Until};
use crate::domain::view::{TaskDetails, TaskSummary};
use crate::store::Actor;
use crate::store::batches::idempotency::IdempotencyKey;
use crate::store::tasks::list::TaskFilter;
use crate::store::waiters::Awaited;

/// Create a batch of tasks
///
/// Takes an array of tasks, or an object with `tasks` and the settings of the batch. A task may depend on tasks that
/// appear earlier in the array. If the `dedupe_strategy` of a task finds an existing task, the new task is skipped, and
/// tasks that depend on it depend on the existing task instead. Reprise creates all tasks of a request or none.
///
/// A batch may have `MAX_TASKS_PER_BATCH` tasks (10,000 by default), and the body `MAX_BODY_BYTES` (32 MiB by default).
#[utoipa::path(
    post, path = "/task", operation_id = "createTasks", tag = "tasks",
    params(("Idempotency-Key" = Option<String>, Header, min_length = 1, max_length = 255,
            description = "Makes the request safe to repeat within IDEMPOTENCY_TTL_SECS: the same key and body return the same answer")),
    request_body = ref("#/components/schemas/CreateTasks"),
    responses(
        (status = 201, description = "The created tasks in the given order, without the skipped ones", body = Vec<TaskSummary>,
         headers(("X-Batch-ID" = Uuid, description = "The batch"))),
        (status = 204, description = "Nothing created: the request has no tasks, or all of them were skipped",
         headers(("X-Batch-ID" = Uuid, description = "The batch"))),
        (status = 400, description = "Every problem of every task", body = Problem,
         content_type = "application/problem+json"),
        (status = 413, description = "The body is too large", body = Problem,
         content_type = "application/problem+json"),
        (status = 422, description = "The Idempotency-Key was already used with a different body", body = Problem,
         content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn create(
    State(api): State<Arc<Api>>,
    Caller(service): Caller,
    headers: HeaderMap,
    BodyText(body, held): BodyText,
) -> Result<Response, Problem> {
    let batch = read_batch(&body, &api.limits).map_err(Problem::invalid)?;
    let key = idempotency_key(&headers, service.actor(), &body, api.idempotency_ttl)?;
    drop(body);
    let created = service.create(batch, key.as_ref()).await?;
    drop(held);
    let id = [("X-Batch-ID", created.batch_id.to_string())];
    if created.tasks.is_empty() {
        return Ok((StatusCode::NO_CONTENT, id).into_response());
    }
    Ok((StatusCode::CREATED, id, Json(created.tasks)).into_response())
}

/// List tasks
///
/// Returns the tasks that match every given filter, newest first. A page has at most 100 tasks.
#[utoipa::path(
    get, path = "/task", operation_id = "listTasks", tag = "tasks",
    params(
        ("status" = Option<String>, Query, description = "One or more statuses, separated by commas"),
        ("kind" = Option<String>, Query, description = "Exactly this kind"),
        ("name" = Option<String>, Query, description = "Exactly this name"),
        ("batch_id" = Option<Uuid>, Query, description = "Tasks of this batch"),
        ("metadata" = Option<String>, Query, description = "A JSON object that the metadata contains"),
        ("timeout" = Option<i32>, Query, description = "Exactly this timeout in seconds", minimum = 1, maximum = 86_400),
        ("created_after" = Option<DateTime<Utc>>, Query, description = "RFC 3339 timestamp"),
        ("created_before" = Option<DateTime<Utc>>, Query, description = "RFC 3339 timestamp"),
        ("page" = Option<i64>, Query, description = "Page number, from 0. page × page_size must not exceed 100,000; use cursor beyond that", minimum = 0, maximum = 100_000),
        ("page_size" = Option<i64>, Query, description = "Rows per page, 50 by default; values above 100 count as 100", minimum = 1),
        ("cursor" = Option<Uuid>, Query, description = "X-Next-Cursor of the previous page; replaces page"),
    ),
    responses(
        (status = 200, description = "The tasks", body = Vec<TaskSummary>,
         headers(("X-Next-Cursor" = Uuid, description = "Cursor of the next page, if there may be one"))),
        (status = 400, description = "Invalid filter; details lists every problem", body = Problem, content_type = "application/problem+json"),
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
/// Returns the task with its actions, its retry policy and its last failure. With `run`, the answer is 409 unless the
/// task is at that run.
///
/// With `wait_secs`, Reprise answers as soon as the task has ended or has the status `until`, at the latest after that
/// time, with the task as it is then. If the task has ended in another status, the answer comes at once. An instance
/// lets at most 20,000 requests wait; further ones get 503.
#[utoipa::path(
    get, path = "/task/{id}", operation_id = "getTask", tag = "tasks",
    params(
        ("id" = Uuid, Path, description = "The task"),
        ("run" = Option<i32>, Query, description = "The run that the request is about, from the handle", minimum = 0),
        ("token" = Option<String>, Query, description = "Token from the handle; replaces an API key for this task and run"),
        ("wait_secs" = Option<u64>, Query, description = "How long to wait for `until`; 0, the default, answers at once", minimum = 0, maximum = 60),
        ("until" = Option<String>, Query, description = "What to wait for: `terminal`, the default, or a status", example = "terminal"),
    ),
    responses(
        (status = 200, description = "The task", body = TaskDetails),
        (status = 400, description = "Invalid request; details lists every problem", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such task", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "The task is not at the given run", body = Problem,
         content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn get(
    State(api): State<Arc<Api>>,
    viewer: Viewer,
    Id(id): Id,
    mut query: Query,
) -> Result<Json<TaskDetails>, Problem> {
    let time = query.wait();
    let until = query.parsed("until", UNTIL, Until::parse).unwrap_or(Until::Terminal);
    let (run, _) = run_of(query)?;
    let _permit = api.service.wait(Awaited::Task(id, until), run, time, &api.ending).await?;
    Ok(Json(viewer.redact(api.service.task(id, run).await?)))
}

/// Report the result of a run, or change a task
///
/// A `status` ends the current run; the other fields change the task. Repeating a report that is already recorded for
/// its run changes nothing and returns 200. The body may have at most 2 MiB.
#[utoipa::path(
    patch, path = "/task/{id}", operation_id = "patchTask", tag = "tasks",
    params(
        ("id" = Uuid, Path, description = "The task"),
        ("run" = Option<i32>, Query, description = "The run that the request is about, from the handle", minimum = 0),
        ("token" = Option<String>, Query, description = "Token from the handle; replaces an API key for this task and run"),
    ),
    request_body = ref("#/components/schemas/TaskPatch"),
    responses(
        (status = 200, description = "The task after the change", body = TaskDetails),
        (status = 400, description = "Invalid request; details lists every problem", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such task", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "The status of the task does not allow the change, or the run is over", body = Problem,
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
        let message = format!("is {in_query} in the query but {in_body} in the body");
        return Err(Problem::field("run", ProblemCode::NotAllowed, message));
    }
    patch.run = patch.run.or(run);
    patch.proven = proven;
    Ok(Json(viewer.redact(service.patch(id, patch).await?)))
}

/// Send a heartbeat
///
/// Restarts the timeout of the task and adds to its counters. Reprise answers once the heartbeat is durable.
#[utoipa::path(
    put, path = "/task/{id}", operation_id = "putTask", tag = "tasks",
    params(
        ("id" = Uuid, Path, description = "The task"),
        ("run" = Option<i32>, Query, description = "The run that the request is about, from the handle", minimum = 0),
        ("token" = Option<String>, Query, description = "Token from the handle; replaces an API key for this task and run"),
    ),
    request_body = ref("#/components/schemas/Heartbeat"),
    responses(
        (status = 202, description = "The heartbeat is recorded"),
        (status = 400, description = "Invalid request; details lists every problem", body = Problem, content_type = "application/problem+json"),
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
    let progress = read_heartbeat(body).map_err(Problem::invalid)?;
    service.progress(id, run, progress).await?;
    Ok(StatusCode::ACCEPTED)
}

/// Cancel a task
///
/// Cancels a task that has not ended. Its children are treated as after a failure. Canceling a canceled task changes
/// nothing.
#[utoipa::path(
    delete, path = "/task/{id}", operation_id = "cancelTask", tag = "tasks",
    params(("id" = Uuid, Path, description = "The task")),
    responses(
        (status = 200, description = "The task after the change", body = TaskDetails),
        (status = 400, description = "The id is not a UUID", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such task", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "The task has already ended", body = Problem,
         content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn cancel(Caller(service): Caller, viewer: Viewer, Id(id): Id) -> Result<Json<TaskDetails>, Problem> {
    Ok(Json(viewer.redact(service.cancel(id).await?)))
}

/// Pause a task
///
/// Keeps a task from starting until it is resumed. A task that is executing cannot be paused. Pausing a paused task
/// changes nothing.
#[utoipa::path(
    patch, path = "/task/pause/{id}", operation_id = "pauseTask", tag = "tasks",
    params(("id" = Uuid, Path, description = "The task")),
    responses(
        (status = 200, description = "The task after the change", body = TaskDetails),
        (status = 400, description = "The id is not a UUID", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such task", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "The task is executing or has ended", body = Problem,
         content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn pause(Caller(service): Caller, viewer: Viewer, Id(id): Id) -> Result<Json<TaskDetails>, Problem> {
    Ok(Json(viewer.redact(service.pause(id).await?)))
}

/// Resume a paused task
///
/// The task gets the status that it would have by now. Resuming a task that is alive but not paused changes nothing.
#[utoipa::path(
    patch, path = "/task/resume/{id}", operation_id = "resumeTask", tag = "tasks",
    params(("id" = Uuid, Path, description = "The task")),
    responses(
        (status = 200, description = "The task after the change", body = TaskDetails),
        (status = 400, description = "The id is not a UUID", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such task", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "The task has ended", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn resume(Caller(service): Caller, viewer: Viewer, Id(id): Id) -> Result<Json<TaskDetails>, Problem> {
    Ok(Json(viewer.redact(service.resume(id).await?)))
}

/// Reads the `Idempotency-Key`. The name of the caller is a part of the stored key, so keys of different callers never
/// collide.
fn idempotency_key(
    headers: &HeaderMap,
    caller: &Actor,
    body: &[u8],
    ttl: Duration,
) -> Result<Option<IdempotencyKey>, Problem> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    let message = "must have 1 to 255 visible ASCII characters";
    let invalid = || Problem::field("Idempotency-Key", ProblemCode::Malformed, message);
    let key = value.to_str().ok().filter(|key| (1..=255).contains(&key.len())).ok_or_else(invalid)?;
    let key = match caller {
        Actor::Person(name) => format!("{name}:{key}"),
        Actor::Api | Actor::Loop(_) => key.to_owned(),
    };
    let mut hash = Hash(Sha256::new());
    let text = std::str::from_utf8(if body.is_empty() { b"{}" } else { body }).map_err(|_| Problem::internal())?;
    write_canonical(text, &mut hash)
        .map_err(|error| Problem::field("body", ProblemCode::Malformed, format!("is not valid JSON: {error}")))?;
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

const UNTIL: &str = "terminal, Waiting, Pending, Claimed, Running, RetryPending, Paused, Success, Failure or Canceled";

const STATUSES: &str = "one or more, separated by commas, of Waiting, Pending, Claimed, Running, RetryPending, Paused, \
                         Success, Failure, Canceled";

/// Returns the run that a request is about, and whether the request carries the token of that run. The authenticator
/// has already refused wrong tokens.
fn run_of(mut query: Query) -> Result<(Option<i32>, bool), Problem> {
    let run = query.integer("run", &(0..=i32::MAX));
    let proven = query.text("token").is_some();
    query.close()?;
    Ok((run, proven))
}

fn statuses(text: &str) -> Option<Vec<Status>> {
    text.split(',').map(|one| Status::parse(one.trim())).collect()
}

/// The `X-Next-Cursor` header. Only a full page has one: after a shorter page there are no more rows.
pub(super) fn next_cursor(count: usize, size: i64, last: Option<impl ToString>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if i64::try_from(count).is_ok_and(|count| count == size)
        && let Some(value) = last.and_then(|last| last.to_string().parse().ok())
    {
        headers.insert("x-next-cursor", value);
    }
    headers
}
