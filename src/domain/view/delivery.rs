//! Deliveries as the API shows them.

use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Timestamp;

/// One notification of the outbox.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Delivery {
    pub id: i64,
    /// Null for a batch's own notifications.
    #[schema(required)]
    pub task_id: Option<Uuid>,
    pub batch_id: Uuid,
    #[schema(example = "end")]
    pub trigger: String,
    #[schema(example = "success")]
    pub condition: String,
    /// Of the task; for a batch, which completion this tells of.
    pub run: i32,
    pub url: String,
    pub status: DeliveryStatus,
    pub attempts: i32,
    /// The last HTTP status, if there was an answer.
    #[schema(required)]
    pub last_status: Option<i32>,
    #[schema(required)]
    pub last_error: Option<String>,
    #[schema(required)]
    pub next_attempt_at: Option<Timestamp>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeliveryStatus {
    Pending,
    Success,
    Exhausted,
}

impl DeliveryStatus {
    pub const fn as_str(self) -> &'static str {
        match self {
            DeliveryStatus::Pending => "pending",
            DeliveryStatus::Success => "success",
            DeliveryStatus::Exhausted => "exhausted",
        }
    }

    pub fn parse(text: &str) -> Option<DeliveryStatus> {
        [DeliveryStatus::Pending, DeliveryStatus::Success, DeliveryStatus::Exhausted]
            .into_iter()
            .find(|status| status.as_str().eq_ignore_ascii_case(text))
    }
}
