//! Handlers of `/webhook-deliveries`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};

use super::auth::Caller;
use super::extract::{Id, Query};
use super::tasks::next_cursor;
use super::{Api, Problem};
use crate::domain::view::{Delivery, DeliveryStatus};
use crate::store::outbox::list::DeliveryFilter;

/// List notifications
///
/// Returns notifications, newest first: delivered (`success`), still to be delivered (`pending`) and given up
/// (`exhausted`). A page has at most 100 notifications.
#[utoipa::path(
    get, path = "/webhook-deliveries", operation_id = "listWebhookDeliveries", tag = "webhook deliveries",
    params(
        ("status" = Option<DeliveryStatus>, Query, description = "Notifications with this status"),
        ("task_id" = Option<uuid::Uuid>, Query, description = "Notifications of this task"),
        ("batch_id" = Option<uuid::Uuid>, Query, description = "Notifications of this batch and its tasks"),
        ("page" = Option<i64>, Query, description = "Page number, from 0. page × page_size must not exceed 100,000; use cursor beyond that", minimum = 0, maximum = 100_000),
        ("page_size" = Option<i64>, Query, description = "Rows per page, 50 by default; values above 100 count as 100", minimum = 1),
        ("cursor" = Option<i64>, Query, description = "X-Next-Cursor of the previous page; replaces page"),
    ),
    responses(
        (status = 200, description = "The notifications", body = Vec<Delivery>,
         headers(("X-Next-Cursor" = i64, description = "Cursor of the next page, if there may be one"))),
        (status = 400, description = "Invalid filter; details lists every problem", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn list(State(api): State<Arc<Api>>, mut query: Query) -> Result<Response, Problem> {
    let filter = DeliveryFilter {
        id: None,
        status: query.parsed("status", "pending, success or exhausted", DeliveryStatus::parse),
        task_id: query.uuid("task_id"),
        batch_id: query.uuid("batch_id"),
    };
    let (page, size) = query.page::<i64>();
    query.close()?;
    let deliveries = api.service.deliveries(&filter, page, size).await?;
    let next = next_cursor(deliveries.len(), size, deliveries.last().map(|delivery| delivery.id));
    Ok((next, Json(deliveries)).into_response())
}

/// Send a notification again
///
/// Makes a delivered or exhausted notification pending again. A notification that is still pending stays as it is.
#[utoipa::path(
    post, path = "/webhook-deliveries/{id}/redeliver", operation_id = "redeliver", tag = "webhook deliveries",
    params(("id" = i64, Path, description = "The notification")),
    responses(
        (status = 200, description = "The notification after the change", body = Delivery),
        (status = 400, description = "The id is not a whole number", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such notification", body = Problem,
         content_type = "application/problem+json"),
        (status = 503, description = "The database is not available", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn redeliver(Caller(service): Caller, Id(id): Id<i64>) -> Result<Json<Delivery>, Problem> {
    Ok(Json(service.redeliver(id).await?))
}
