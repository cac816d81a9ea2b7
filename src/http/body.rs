//! Reads request bodies. All bodies in memory share a budget in bytes: when it is used up, large bodies wait, so that
//! many of them at once cannot fill the memory.

use std::sync::Arc;

use axum::body::HttpBody;
use axum::extract::{FromRequest, Request};
use futures_util::StreamExt;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::{Api, Code, Problem};
use crate::domain::request::problems::ProblemCode;

/// Bytes that are read and discarded past the limit: many clients read the answer only after they have sent everything.
const DISCARDED: usize = 64 * 1024 * 1024;
/// Bodies up to this size need no part of the budget.
const UNBUDGETED: usize = 64 * 1024;
/// A JSON tree takes up to this many times the memory of its text.
const TREE_FACTOR: usize = 16;
/// Largest body that is parsed into a tree. Only the creation of tasks needs more, and does not use a tree: a report
/// holds at most 64 KiB of metadata and a failure reason.
const LARGEST_TREE: usize = 2 * 1024 * 1024;
/// Bytes per permit of the budget.
const UNIT: usize = 1024;

/// The size limit of a body, and the budget for all bodies.
#[derive(Debug)]
pub struct Bodies {
    max: usize,
    units: u32,
    budget: Arc<Semaphore>,
}

impl Bodies {
    /// Makes a budget for two bodies of the largest size.
    pub fn new(max: usize) -> Bodies {
        let units = u32::try_from((2 * max).div_ceil(UNIT)).unwrap_or(u32::MAX);
        Bodies { max, units, budget: Arc::new(Semaphore::new(units as usize)) }
    }

    async fn reserve(&self, bytes: usize, deadline: Instant) -> Result<BodyPermit, Problem> {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX).min(self.units);
        match tokio::time::timeout_at(deadline, Arc::clone(&self.budget).acquire_many_owned(units)).await {
            Ok(Ok(permit)) => Ok(BodyPermit(Some(permit))),
            _ => Err(Problem::new(
                Code::Overloaded,
                "too many large requests are in progress; this one waited for REQUEST_TIMEOUT_SECS",
            )),
        }
    }
}

/// The part of the budget that a request holds until it drops this.
#[derive(Debug, Default)]
pub struct BodyPermit(#[allow(dead_code, reason = "held until it is dropped")] Option<OwnedSemaphorePermit>);

/// The body as unparsed bytes.
pub struct BodyText(pub Vec<u8>, pub BodyPermit);

impl FromRequest<Arc<Api>> for BodyText {
    type Rejection = Problem;

    async fn from_request(request: Request, api: &Arc<Api>) -> Result<BodyText, Problem> {
        read(request, api, api.bodies.max, 1).await
    }
}

/// The body as a JSON tree, whatever its content type; an empty body is `{}`. The handler holds the permit until it has
/// answered.
pub struct Body(pub Value, pub BodyPermit);

impl FromRequest<Arc<Api>> for Body {
    type Rejection = Problem;

    async fn from_request(request: Request, api: &Arc<Api>) -> Result<Body, Problem> {
        let BodyText(bytes, held) = read(request, api, api.bodies.max.min(LARGEST_TREE), TREE_FACTOR).await?;
        if bytes.is_empty() {
            return Ok(Body(Value::Object(serde_json::Map::new()), held));
        }
        let parsed = serde_json::from_slice(&bytes);
        let tree = parsed
            .map_err(|error| Problem::field("body", ProblemCode::Malformed, format!("is not valid JSON: {error}")))?;
        Ok(Body(tree, held))
    }
}

/// Reads up to `max` bytes. Each byte reserves `weight` bytes of the budget. A body of unknown length reserves the
/// budget of the largest body.
async fn read(request: Request, api: &Arc<Api>, max: usize, weight: usize) -> Result<BodyText, Problem> {
    let body = request.into_body();
    let length = body.size_hint().exact().map(|length| usize::try_from(length).unwrap_or(usize::MAX));
    let mut held = BodyPermit::default();
    if let Some(length) = length.filter(|length| *length > UNBUDGETED && *length <= max) {
        held = api.bodies.reserve(length * weight, Instant::now() + api.request_time).await?;
    }
    let fits = length.is_none_or(|length| length <= max);
    let mut bytes = Vec::with_capacity(length.filter(|_| fits).unwrap_or(0));
    let mut chunks = body.into_data_stream();
    let mut read = 0;
    let mut deadline = Instant::now() + api.request_time;
    while let Some(chunk) = tokio::time::timeout_at(deadline, chunks.next()).await.map_err(|_| too_slow(api))? {
        let chunk = chunk.map_err(|_| Problem::field("body", ProblemCode::Malformed, "could not be read"))?;
        read += chunk.len();
        if read > max + DISCARDED {
            break;
        }
        if read > max || !fits {
            (bytes, held) = (Vec::new(), BodyPermit::default());
            continue;
        }
        if length.is_none() && read > UNBUDGETED && held.0.is_none() {
            let waiting = Instant::now();
            held = api.bodies.reserve(max * weight, waiting + api.request_time).await?;
            // The wait for the budget does not count as the client's time.
            deadline += waiting.elapsed();
        }
        bytes.extend_from_slice(&chunk);
    }
    if read > max {
        let detail = match api.bodies.max {
            limit if limit == max => format!("body: must have at most {max} bytes (MAX_BODY_BYTES)"),
            _ => format!("body: must have at most {max} bytes"),
        };
        return Err(Problem::new(Code::BodyTooLarge, detail));
    }
    Ok(BodyText(bytes, held))
}

fn too_slow(api: &Arc<Api>) -> Problem {
    let secs = api.request_time.as_secs();
    let detail = format!("body: not received within {secs} s (REQUEST_TIMEOUT_SECS)");
    Problem::new(Code::BodyTimeout, detail)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::http::StatusCode;
    use axum::response::IntoResponse;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_large_body_does_not_wait_forever() {
        let bodies = Bodies::new(128 * 1024);
        let soon = || Instant::now() + Duration::from_secs(60);
        let held = bodies.reserve(usize::MAX, soon()).await;
        assert!(held.is_ok(), "the whole budget covers any size");
        let refused = bodies.reserve(1, soon()).await.unwrap_err().into_response();
        assert_eq!(
            (refused.status(), &refused.headers()["retry-after"]),
            (StatusCode::SERVICE_UNAVAILABLE, &"1".parse().unwrap())
        );
        drop(held);
        let mut all = Vec::new();
        for _ in 0..2 {
            all.push(bodies.reserve(128 * 1024, soon()).await);
        }
        assert!(all.iter().all(Result::is_ok));
        assert!(bodies.reserve(1, soon()).await.is_err());
    }
}
