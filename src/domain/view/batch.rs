//! Batches as the API shows them.

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::task::TaskSummary;
use super::{Metadata, Timestamp};

/// The number of tasks of a batch in each status.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct StatusCounts {
    pub waiting: i32,
    pub pending: i32,
    pub claimed: i32,
    pub running: i32,
    pub retry_pending: i32,
    pub paused: i32,
    pub success: i32,
    pub failure: i32,
    pub canceled: i32,
}

/// The summary of a batch, as the list shows it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct BatchSummary {
    pub batch_id: Uuid,
    pub total_tasks: i32,
    pub first_created_at: Timestamp,
    /// When a task of the batch last changed its status.
    pub latest_updated_at: Timestamp,
    pub status_counts: StatusCounts,
    pub kinds: Vec<String>,
    #[schema(required)]
    pub scope: Option<String>,
    #[schema(value_type = Metadata)]
    pub metadata: Value,
}

/// A batch with its totals.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Batch {
    pub batch_id: Uuid,
    pub total_tasks: i32,
    /// Sum of the tasks' `success` counters.
    pub total_success: i64,
    pub total_failures: i64,
    pub total_expected: i64,
    pub status_counts: StatusCounts,
    #[schema(required)]
    pub scope: Option<String>,
    #[schema(value_type = Metadata)]
    pub metadata: Value,
    pub created_at: Timestamp,
    #[schema(required)]
    pub completed_at: Option<Timestamp>,
}

/// The result of stopping a batch: the number of canceled tasks by their previous status.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct StoppedBatch {
    pub batch_id: Uuid,
    pub canceled_waiting: i32,
    pub canceled_pending: i32,
    pub canceled_claimed: i32,
    pub canceled_running: i32,
    pub canceled_retry_pending: i32,
    pub canceled_paused: i32,
    pub already_terminal: i32,
}

/// The result of a change of rules.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ChangedRules {
    pub batch_id: Uuid,
    pub kind: String,
    /// Number of alive tasks of the kind, which now have the new rules.
    pub updated_count: i32,
}

/// The tasks of a batch and their dependencies.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Dag {
    pub tasks: Vec<TaskSummary>,
    pub links: Vec<Link>,
}

/// A dependency between two tasks.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Link {
    pub parent_id: Uuid,
    pub child_id: Uuid,
    pub requires_success: bool,
}

/// The changes of a manual retry of a batch, or of its dry run.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct RetriedBatch {
    pub batch_id: Uuid,
    pub retried: Vec<Uuid>,
    pub revived: Vec<Uuid>,
    pub dry_run: bool,
}
