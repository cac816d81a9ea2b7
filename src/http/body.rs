//! Reads the bodies of requests. All that are being read and worked on at the same time share a budget in bytes: past it
//! large ones wait, so that many of them at once cannot fill the memory.

use std::sync::Arc;

use axum::body::HttpBody;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use futures_util::StreamExt;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::{Api, Problem};

/// What is read of a body that is too large anyway: many clients read the answer only after they have sent all of it.
const STILL_READ: usize = 64 * 1024 * 1024;
/// Bodies up to this size reserve nothing.
const FREE: usize = 64 * 1024;
/// A tree of values takes up to so many times the memory of its text.
const TREE: usize = 16;
/// Nothing but new tasks has a use for more: a report holds at most 64 KiB of metadata and a failure reason.
const LARGEST_TREE: usize = 2 * 1024 * 1024;
/// What one permit of the budget stands for.
const UNIT: usize = 1024;

/// How large a body may be, and the budget for all of them.
#[derive(Debug)]
pub struct Bodies {
    most: usize,
    units: u32,
    budget: Arc<Semaphore>,
}

impl Bodies {
    /// The budget is two bodies of the largest size.
    pub fn new(most: usize) -> Bodies {
        let units = u32::try_from((2 * most).div_ceil(UNIT)).unwrap_or(u32::MAX);
        Bodies { most, units, budget: Arc::new(Semaphore::new(units as usize)) }
    }

    async fn reserve(&self, bytes: usize, until: Instant) -> Result<BodyPermit, Problem> {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX).min(self.units);
        match tokio::time::timeout_at(until, Arc::clone(&self.budget).acquire_many_owned(units)).await {
            Ok(Ok(permit)) => Ok(BodyPermit(Some(permit))),
            _ => Err(Problem::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "too many large requests at the same time; this one waited for REQUEST_TIMEOUT_SECS",
            )),
        }
    }
}

/// The part of the budget that a request occupies until this is dropped.
#[derive(Debug, Default)]
pub struct BodyPermit(#[allow(dead_code, reason = "it is kept to be dropped")] Option<OwnedSemaphorePermit>);

/// The body as text that is not looked into yet.
pub struct Text(pub Vec<u8>, pub BodyPermit);

impl FromRequest<Arc<Api>> for Text {
    type Rejection = Problem;

    async fn from_request(request: Request, api: &Arc<Api>) -> Result<Text, Problem> {
        read(request, api, api.bodies.most, 1).await
    }
}

/// The body as a tree of JSON, whatever its content type says; an empty one is `{}`. The handler keeps the second part
/// until it has answered.
pub struct Body(pub Value, pub BodyPermit);

impl FromRequest<Arc<Api>> for Body {
    type Rejection = Problem;

    async fn from_request(request: Request, api: &Arc<Api>) -> Result<Body, Problem> {
        let Text(bytes, held) = read(request, api, api.bodies.most.min(LARGEST_TREE), TREE).await?;
        if bytes.is_empty() {
            return Ok(Body(Value::Object(serde_json::Map::new()), held));
        }
        let parsed = serde_json::from_slice(&bytes);
        let tree = parsed.map_err(|error| Problem::invalid(vec![format!("body: is not valid JSON: {error}")]))?;
        Ok(Body(tree, held))
    }
}

/// Reads up to `most` bytes, of which each reserves `weight`. One whose length is not known reserves the most that it can
/// become.
async fn read(request: Request, api: &Arc<Api>, most: usize, weight: usize) -> Result<Text, Problem> {
    let body = request.into_body();
    let length = body.size_hint().exact().map(|length| usize::try_from(length).unwrap_or(usize::MAX));
    let mut held = BodyPermit::default();
    if let Some(length) = length.filter(|length| *length > FREE && *length <= most) {
        held = api.bodies.reserve(length * weight, Instant::now() + api.request_time).await?;
    }
    let fits = length.is_none_or(|length| length <= most);
    let mut bytes = Vec::with_capacity(length.filter(|_| fits).unwrap_or(0));
    let mut chunks = body.into_data_stream();
    let mut read = 0;
    let mut late = Instant::now() + api.request_time;
    while let Some(chunk) = tokio::time::timeout_at(late, chunks.next()).await.map_err(|_| too_slow(api))? {
        let chunk = chunk.map_err(|_| Problem::new(StatusCode::BAD_REQUEST, "body: could not be read"))?;
        read += chunk.len();
        if read > most + STILL_READ {
            break;
        }
        if read > most || !fits {
            (bytes, held) = (Vec::new(), BodyPermit::default());
            continue;
        }
        if length.is_none() && read > FREE && held.0.is_none() {
            let waiting = Instant::now();
            held = api.bodies.reserve(most * weight, waiting + api.request_time).await?;
            late += waiting.elapsed();
        }
        bytes.extend_from_slice(&chunk);
    }
    if read > most {
        let detail = match api.bodies.most {
            limit if limit == most => format!("body: must have at most {most} bytes (MAX_BODY_BYTES)"),
            _ => format!("body: must have at most {most} bytes"),
        };
        return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail));
    }
    Ok(Text(bytes, held))
}

fn too_slow(api: &Arc<Api>) -> Problem {
    let secs = api.request_time.as_secs();
    Problem::new(
        StatusCode::REQUEST_TIMEOUT,
        format!("body: must have arrived after {secs} seconds (REQUEST_TIMEOUT_SECS)"),
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::response::IntoResponse;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_large_body_does_not_wait_for_ever() {
        let bodies = Bodies::new(128 * 1024);
        let soon = || Instant::now() + Duration::from_secs(60);
        let held = bodies.reserve(usize::MAX, soon()).await;
        assert!(held.is_ok(), "the whole budget is enough for everybody");
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
