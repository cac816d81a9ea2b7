//! Error answers: `application/problem+json` (RFC 9457), with `error` and `details` for older clients.

use std::fmt::Display;

use axum::extract::Request;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use crate::domain::request::problems::{FieldProblem, ProblemCode};
use crate::domain::task::status::Status;
use crate::service::{ConflictCode, Resource};
use crate::telemetry::log_limit::LogLimit;
use crate::{service, store};

/// Declares the codes of error answers: `Variant, "code", STATUS;`.
macro_rules! codes {
    ($($variant:ident, $code:literal, $status:ident;)*) => {
        /// The class of an error answer. Stable: programs compare it. docs/errors.md describes each.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Code {
            $($variant,)*
        }

        impl Code {
            pub const ALL: &[Code] = &[$(Code::$variant),*];

            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Code::$variant => $code,)*
                }
            }

            pub const fn status(self) -> StatusCode {
                match self {
                    $(Code::$variant => StatusCode::$status,)*
                }
            }
        }
    };
}

codes! {
    Validation, "validation", BAD_REQUEST;
    Unauthorized, "unauthorized", UNAUTHORIZED;
    ScopeTooLow, "scope_too_low", FORBIDDEN;
    TaskNotFound, "task_not_found", NOT_FOUND;
    BatchNotFound, "batch_not_found", NOT_FOUND;
    DeliveryNotFound, "delivery_not_found", NOT_FOUND;
    RetryPolicyNotFound, "retry_policy_not_found", NOT_FOUND;
    PathNotFound, "path_not_found", NOT_FOUND;
    MethodNotAllowed, "method_not_allowed", METHOD_NOT_ALLOWED;
    BodyTimeout, "body_timeout", REQUEST_TIMEOUT;
    RunIsOver, "run_is_over", CONFLICT;
    RunNotReached, "run_not_reached", CONFLICT;
    TaskHasEnded, "task_has_ended", CONFLICT;
    NotExecuting, "not_executing", CONFLICT;
    Executing, "executing", CONFLICT;
    NotStuck, "not_stuck", CONFLICT;
    Paused, "paused", CONFLICT;
    NotFailed, "not_failed", CONFLICT;
    ParentFailed, "parent_failed", CONFLICT;
    BodyTooLarge, "body_too_large", PAYLOAD_TOO_LARGE;
    WrongHost, "wrong_host", MISDIRECTED_REQUEST;
    IdempotencyKeyReused, "idempotency_key_reused", UNPROCESSABLE_ENTITY;
    InternalError, "internal_error", INTERNAL_SERVER_ERROR;
    DatabaseUnavailable, "database_unavailable", SERVICE_UNAVAILABLE;
    Locked, "locked", SERVICE_UNAVAILABLE;
    Overloaded, "overloaded", SERVICE_UNAVAILABLE;
    ShuttingDown, "shutting_down", SERVICE_UNAVAILABLE;
}

/// The page that describes the codes, as this service serves it. A code is its fragment.
pub(super) const CODES_PAGE: &str = "/docs/errors.md";

/// An error answer.
#[derive(Debug)]
pub struct Problem(Box<ProblemBody>);

/// An error answer (RFC 9457).
#[derive(Debug, Serialize, ToSchema)]
struct ProblemBody {
    /// A URI that identifies the class of the error. It ends in `#<code>`.
    #[serde(rename = "type")]
    #[schema(example = "/docs/errors.md#validation")]
    type_uri: String,
    /// The name of the HTTP status.
    #[schema(example = "Bad Request")]
    title: &'static str,
    /// The class of the error. docs/errors.md lists all classes; more may come.
    #[schema(example = "validation")]
    code: &'static str,
    /// The HTTP status.
    #[schema(example = 400)]
    status: u16,
    /// What was wrong with the request.
    detail: String,
    /// A copy of `detail`.
    error: String,
    /// One line per problem, starting with the path of the field: a copy of `problems` for older clients.
    details: Vec<String>,
    /// With the code `validation`: every problem of the request.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<FieldProblem>,
    /// With 409: the current status of the task.
    #[serde(skip_serializing_if = "Option::is_none")]
    current_status: Option<Status>,
    /// With 409: the current run of the task.
    #[serde(skip_serializing_if = "Option::is_none")]
    current_run: Option<i32>,
}

impl Problem {
    pub fn new(code: Code, detail: impl Into<String>) -> Problem {
        let (status, detail) = (code.status(), detail.into());
        Problem(Box::new(ProblemBody {
            type_uri: format!("{CODES_PAGE}#{}", code.as_str()),
            title: status.canonical_reason().unwrap_or("Error"),
            code: code.as_str(),
            status: status.as_u16(),
            error: detail.clone(),
            detail,
            details: Vec::new(),
            problems: Vec::new(),
            current_status: None,
            current_run: None,
        }))
    }

    /// Makes the error for an invalid request, with all its problems.
    pub fn invalid(problems: Vec<FieldProblem>) -> Problem {
        let details: Vec<String> = problems.iter().map(ToString::to_string).collect();
        let detail = match details.as_slice() {
            [only] => only.clone(),
            many => format!("{} problems, the first: {}", many.len(), many.first().map_or("", String::as_str)),
        };
        let mut problem = Problem::new(Code::Validation, detail);
        (problem.0.details, problem.0.problems) = (details, problems);
        problem
    }

    /// Makes the error for a request with one problem.
    pub fn field(path: &str, code: ProblemCode, message: impl Display) -> Problem {
        Problem::invalid(vec![FieldProblem::new(path, code, message)])
    }

    pub fn internal() -> Problem {
        Problem::new(Code::InternalError, "internal error; see the server log")
    }

    pub fn unavailable() -> Problem {
        Problem::new(Code::DatabaseUnavailable, "the database is not available")
    }
}

impl PartialSchema for Problem {
    fn schema() -> RefOr<Schema> {
        ProblemBody::schema()
    }
}

impl ToSchema for Problem {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        ProblemBody::schemas(schemas);
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(&self.0).unwrap_or_default();
        let mut response = (status, body).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<service::Error> for Problem {
    fn from(error: service::Error) -> Problem {
        let detail = error.to_string();
        match error {
            service::Error::NotFound { what, .. } => Problem::new(what.into(), detail),
            service::Error::Conflict(conflict) => {
                let mut problem = Problem::new(conflict.code.into(), detail);
                (problem.0.current_status, problem.0.current_run) = (Some(conflict.status), Some(conflict.run));
                problem
            }
            service::Error::KeyReused => Problem::new(Code::IdempotencyKeyReused, detail),
            service::Error::TooManyWaiters(_) => Problem::new(Code::Overloaded, detail),
            service::Error::Invalid(problems) => Problem::invalid(problems),
            service::Error::Store(error) => error.into(),
        }
    }
}

impl From<Resource> for Code {
    fn from(missing: Resource) -> Code {
        match missing {
            Resource::Task => Code::TaskNotFound,
            Resource::Batch => Code::BatchNotFound,
            Resource::Delivery => Code::DeliveryNotFound,
            Resource::RetryPolicy => Code::RetryPolicyNotFound,
        }
    }
}

impl From<ConflictCode> for Code {
    fn from(conflict: ConflictCode) -> Code {
        match conflict {
            ConflictCode::RunIsOver => Code::RunIsOver,
            ConflictCode::RunNotReached => Code::RunNotReached,
            ConflictCode::TaskHasEnded => Code::TaskHasEnded,
            ConflictCode::NotExecuting => Code::NotExecuting,
            ConflictCode::Executing => Code::Executing,
            ConflictCode::NotStuck => Code::NotStuck,
            ConflictCode::Paused => Code::Paused,
            ConflictCode::NotFailed => Code::NotFailed,
            ConflictCode::ParentFailed => Code::ParentFailed,
        }
    }
}

impl From<store::Error> for Problem {
    fn from(error: store::Error) -> Problem {
        match error {
            store::Error::Unavailable(_) | store::Error::Transient(_) => {
                static LIMIT: LogLimit = LogLimit::new();
                if let Some(suppressed) = LIMIT.allows() {
                    tracing::warn!(%error, suppressed, "request failed");
                }
                Problem::unavailable()
            }
            store::Error::Busy(_) => {
                let detail = "another transaction holds a lock that this request needs; try again later";
                Problem::new(Code::Locked, detail)
            }
            store::Error::Guard { .. } | store::Error::Corrupt(_) | store::Error::Statement(_) => {
                tracing::error!(%error, "request failed");
                Problem::internal()
            }
        }
    }
}

pub async fn no_such_path(request: Request) -> Problem {
    Problem::new(Code::PathNotFound, format!("no such path: {}", request.uri().path()))
}

pub async fn no_such_method(request: Request) -> Problem {
    let detail = format!("{} does not support {}", request.uri().path(), request.method());
    Problem::new(Code::MethodNotAllowed, detail)
}

/// The page that `type` of an error answer refers to.
pub async fn codes_page() -> impl IntoResponse {
    ([(CONTENT_TYPE, "text/markdown; charset=utf-8")], include_str!("../../docs/errors.md"))
}
