//! Deliveries as the API shows them.

use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Timestamp;

/// A notification in the outbox.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Delivery {
    pub id: i64,
    /// Null for notifications of the batch itself.
    #[schema(required)]
    pub task_id: Option<Uuid>,
    pub batch_id: Uuid,
    #[schema(example = "end")]
    pub trigger: String,
    #[schema(example = "success")]
    pub condition: String,
    /// The run of the task; for a batch, the number of its completion.
    pub run: i32,
    pub url: String,
    pub status: DeliveryStatus,
    pub attempts: i32,
    /// HTTP status of the last answer, if there was one.
    #[schema(required)]
    pub last_status: Option<i32>,
    #[schema(required)]
    pub last_error: Option<String>,
    #[schema(required)]
    pub next_attempt_at: Option<Timestamp>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

/// The state of a delivery.
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
