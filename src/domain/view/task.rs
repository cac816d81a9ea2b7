//! Tasks as the API shows them.

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::retry::{RetryPolicy, RetrySource};
use super::{ActionTrigger, Metadata, TaskAction, Timestamp};
use crate::domain::retry::failure::FailureType;
use crate::domain::retry::policy::Policy;
use crate::domain::rules::Rule;
use crate::domain::task::Task;
use crate::domain::task::status::Status;

/// The summary of a task, as lists show it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TaskSummary {
    pub id: Uuid,
    pub name: String,
    pub kind: String,
    pub status: Status,
    pub batch_id: Uuid,
    pub priority: i16,
    /// Number of retries so far.
    pub attempt: i16,
    /// Number of the current execution.
    pub run: i32,
    #[schema(required)]
    pub next_retry_at: Option<Timestamp>,
    pub success: i64,
    pub failures: i64,
    #[schema(required)]
    pub expected_count: Option<i32>,
    pub created_at: Timestamp,
    #[schema(required)]
    pub started_at: Option<Timestamp>,
    #[schema(required)]
    pub ended_at: Option<Timestamp>,
    pub dead_end_barrier: bool,
}

/// The details of a task.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = Task)]
pub struct TaskDetails {
    #[serde(flatten)]
    pub basic: TaskSummary,
    /// Seconds without a heartbeat after which the run times out.
    pub timeout: i32,
    #[schema(value_type = Metadata)]
    pub metadata: Value,
    /// The webhooks that the task calls. Callers without an API key see none if keys are set.
    pub actions: Vec<TaskAction>,
    pub last_updated: Timestamp,
    #[schema(required)]
    pub failure_reason: Option<String>,
    #[schema(required)]
    pub failure_type: Option<FailureType>,
    #[schema(required, value_type = Option<RetryPolicy>)]
    pub retry: Option<Policy>,
    /// Where the retry policy came from.
    #[schema(required)]
    pub retry_source: Option<RetrySource>,
    /// How often the receiver of `on_start` or the worker requested a delay. Such a deferral uses up no retry.
    pub deferrals: i32,
    /// The task does not start before this time.
    #[schema(required)]
    pub run_at: Option<Timestamp>,
    /// Conditions that must hold for the task to start.
    pub rules: Vec<Rule>,
    /// Tasks of equal priority take turns by their fair keys.
    #[schema(required)]
    pub fair_key: Option<String>,
}

impl TaskDetails {
    /// Shows the task as it is after a transition.
    pub fn follow(&mut self, task: &Task, now: DateTime<Utc>) {
        if self.basic.run != task.run {
            // The action came from the answer to the previous run.
            self.actions.retain(|action| action.trigger != ActionTrigger::Cancel);
        }
        self.basic.status = task.status;
        self.basic.attempt = task.attempt;
        self.basic.run = task.run;
        self.basic.next_retry_at = task.next_retry_at.map(Timestamp);
        self.basic.started_at = task.started_at.map(Timestamp);
        self.basic.ended_at = task.ended_at.map(Timestamp);
        self.last_updated = Timestamp(now);
        self.failure_reason.clone_from(&task.failure_reason);
        self.failure_type = task.failure_type;
        self.deferrals = task.deferrals;
    }
}

/// The changes of a manual retry of a task, or of its dry run.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct RetriedTask {
    pub task: TaskDetails,
    /// Tasks that had failed only because of this one and now wait for it again.
    pub revived: Vec<Uuid>,
    pub dry_run: bool,
}
