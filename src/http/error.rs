//! Error answers: `application/problem+json` (RFC 9457), with `error` and `details` for older clients.

use axum::extract::Request;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::domain::task::status::Status;
use crate::telemetry::log_limit::LogLimit;
use crate::{service, store};

/// An error answer (RFC 9457).
#[derive(Debug, Serialize, ToSchema)]
pub struct Problem {
    /// The name of the HTTP status.
    #[schema(example = "Bad Request")]
    title: String,
    /// The HTTP status.
    #[schema(example = 400)]
    status: u16,
    /// What was wrong with the request.
    detail: String,
    /// A copy of `detail`.
    error: String,
    /// One line per problem, starting with the path of the field.
    details: Vec<String>,
    /// With 409: the current status of the task.
    #[serde(skip_serializing_if = "Option::is_none")]
    current_status: Option<Status>,
    /// With 409: the current run of the task.
    #[serde(skip_serializing_if = "Option::is_none")]
    current_run: Option<i32>,
}

impl Problem {
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Problem {
        let detail = detail.into();
        Problem {
            title: status.canonical_reason().unwrap_or("Error").to_owned(),
            status: status.as_u16(),
            error: detail.clone(),
            detail,
            details: Vec::new(),
            current_status: None,
            current_run: None,
        }
    }

    /// Makes the error for an invalid request, with all its problems.
    pub fn invalid(details: Vec<String>) -> Problem {
        let detail = match details.as_slice() {
            [only] => only.clone(),
            many => format!("{} problems, the first: {}", many.len(), many.first().map_or("", String::as_str)),
        };
        Problem { details, ..Problem::new(StatusCode::BAD_REQUEST, detail) }
    }

    pub fn internal() -> Problem {
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "internal error; see the server log")
    }

    pub fn unavailable() -> Problem {
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "the database is not available")
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(&self).unwrap_or_default();
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
        match error {
            service::Error::NotFound { .. } => Problem::new(StatusCode::NOT_FOUND, error.to_string()),
            service::Error::Conflict { detail, status, run } => {
                Problem { current_status: status, current_run: run, ..Problem::new(StatusCode::CONFLICT, detail) }
            }
            service::Error::KeyReused => Problem::new(StatusCode::UNPROCESSABLE_ENTITY, error.to_string()),
            service::Error::TooManyWaiters(_) => Problem::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
            service::Error::Invalid(details) => Problem::invalid(details),
            service::Error::Store(error) => error.into(),
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
                Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
            }
            store::Error::Guard { .. } | store::Error::Corrupt(_) | store::Error::Statement(_) => {
                tracing::error!(%error, "request failed");
                Problem::internal()
            }
        }
    }
}

pub async fn no_such_path(request: Request) -> Problem {
    Problem::new(StatusCode::NOT_FOUND, format!("no such path: {}", request.uri().path()))
}

pub async fn no_such_method(request: Request) -> Problem {
    let detail = format!("{} does not support {}", request.uri().path(), request.method());
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, detail)
}
