//! Operations of `/batch`, `/batches` and `/dag`.

use uuid::Uuid;

use super::{Error, Result, Service, invalid, no_batch};
use crate::domain::request::new_rule::RulesChange;
use crate::domain::request::problems::{FieldProblem, ProblemCode};
use crate::domain::task::lifecycle::{Event, Transition, decide};
use crate::domain::task::status::Status;
use crate::domain::view::{Batch, BatchSummary, ChangedRules, Dag, StoppedBatch};
use crate::store::batches::list::{self, BatchFilter};
use crate::store::graph::dag;
use crate::store::page::Page;
use crate::store::rules::slots;
use crate::store::tasks::{lock, transitions};
use crate::store::{self, Session, batches, without_cancellation};

/// Tasks of a batch that one transaction changes. It bounds how long other transactions wait for its locks.
const CHUNK: i64 = 1000;
/// Approximate size limit of a graph: a batch of the default size with as many links as it may have.
const DAG_BYTES: i64 = 48 * 1024 * 1024;

impl Service {
    /// Lists batches. The second value says whether the page was cut short because of its size.
    pub async fn batches(
        &self,
        filter: &BatchFilter,
        page: Page<Uuid>,
        limit: i64,
    ) -> Result<(Vec<BatchSummary>, bool)> {
        Ok(list::batches(&self.store, filter, page, limit).await?)
    }

    pub async fn batch(&self, id: Uuid) -> Result<Batch> {
        batches::batch(&self.store, id).await?.ok_or_else(|| no_batch(id))
    }

    pub async fn dag(&self, batch_id: Uuid) -> Result<Dag> {
        let bytes = dag::dag_bytes(&self.store, batch_id).await?;
        if bytes > DAG_BYTES {
            let limit = format!("the graph must have at most {DAG_BYTES} bytes, not {bytes}");
            let alternative = format!("list its tasks with GET /task?batch_id={batch_id}");
            return Err(invalid("batch_id", ProblemCode::TooLarge, format!("{limit}; {alternative}")));
        }
        dag::dag(&self.store, batch_id).await?.ok_or_else(|| no_batch(batch_id))
    }

    /// Cancels every task of the batch that is alive, from the last task to the first. Children are canceled before
    /// their parents, so no task is canceled by the cascade, and an interrupted stop leaves no child that waits
    /// forever.
    pub async fn stop(&self, id: Uuid) -> Result<StoppedBatch> {
        let batch = self.batch(id).await?;
        let mut canceled = [0i32; 9];
        let mut upper = None;
        loop {
            let stopping = self.store.alone(|session| self.stop_chunk(session, id, upper));
            let chunk = without_cancellation(stopping).await?;
            let Some(first) = chunk.first else { break };
            upper = Some(first);
            for status in chunk.canceled {
                canceled[status.index()] += 1;
            }
        }
        let count = |status: Status| canceled[status.index()];
        Ok(StoppedBatch {
            batch_id: id,
            canceled_waiting: count(Status::Waiting),
            canceled_pending: count(Status::Pending),
            canceled_claimed: count(Status::Claimed),
            canceled_running: count(Status::Running),
            canceled_retry_pending: count(Status::RetryPending),
            canceled_paused: count(Status::Paused),
            already_terminal: batch.total_tasks - canceled.iter().sum::<i32>(),
        })
    }

    /// Replaces the rules of the alive tasks of a kind, and rechecks the blocked tasks.
    pub async fn change_rules(&self, id: Uuid, change: &RulesChange) -> Result<ChangedRules> {
        if !batches::batch_exists(&self.store, id).await? {
            return Err(no_batch(id));
        }
        let problems = slots::cannot_carry(&self.store, id, change).await?;
        if !problems.is_empty() {
            let line = |(task, problem)| {
                let message = format!("task {task}: {problem}");
                FieldProblem::new("rules", ProblemCode::MissingMetadataField, message)
            };
            return Err(Error::Invalid(problems.into_iter().map(line).collect()));
        }
        self.register_matchers(&change.rules).await?;
        let (mut updated, mut after) = (0, None);
        loop {
            let changing = self.store.alone(|session| async move {
                let mut tx = self.begin(&session).await?;
                let changed = slots::change_rules(&mut tx, id, change, after, CHUNK).await?;
                tx.commit().await?;
                Ok(changed)
            });
            let chunk = without_cancellation(changing).await?;
            let Some(last) = chunk.last() else { break };
            updated += i32::try_from(chunk.len()).unwrap_or(0);
            after = Some(*last);
        }
        Ok(ChangedRules { batch_id: id, kind: change.kind.clone(), updated_count: updated })
    }

    async fn stop_chunk(&self, session: Session, id: Uuid, upper: Option<Uuid>) -> store::Result<StopChunk> {
        let mut tx = self.begin(&session).await?;
        let (locked, first) = lock::last_of_batch(&mut tx, id, upper, CHUNK).await?;
        let event = Event::Canceled { reason: format!("its batch was stopped by {}", self.actor) };
        let decided: Vec<Transition> =
            locked.tasks.iter().filter_map(|task| decide(task, &event, locked.moment).ok().flatten()).collect();
        transitions::apply_stop(&mut tx, id, &decided, locked.moment).await?;
        tx.commit().await?;
        Ok(StopChunk { first, canceled: decided.iter().map(Transition::from).collect() })
    }
}

struct StopChunk {
    /// The lowest id of the chunk; `None` if no tasks were left.
    first: Option<Uuid>,
    canceled: Vec<Status>,
}
