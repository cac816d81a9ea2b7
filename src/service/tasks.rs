//! Operations of `/task`, except reports.

use std::sync::Arc;

use uuid::Uuid;

use super::conflict::Operation;
use super::group_commit::{Job, isolate_failures};
use super::reports::Done;
use super::{Conflict, Error, Result, Service, invalid, no_task};
use crate::domain::request::new_batch::NewBatch;
use crate::domain::request::problems::ProblemCode;
use crate::domain::rules::Rule;
use crate::domain::task::Task;
use crate::domain::task::lifecycle::{Event, decide};
use crate::domain::view::{TaskDetails, TaskSummary, Timestamp};
use crate::store::batches::idempotency::{self, IdempotencyKey, Seen};
use crate::store::graph::dead_ends;
use crate::store::page::Page;
use crate::store::rules::{fairness, matchers};
use crate::store::tasks::create::{self, CreationContext, New};
use crate::store::tasks::list::{self, TaskFilter};
use crate::store::tasks::{details, lock, transitions};
use crate::store::{self, Actor, Session, Tx, policies};

/// Maximum number of new tasks in a group commit of several requests.
const TASKS_PER_COMMIT: usize = 1000;
/// Approximate maximum size of the new tasks in a group commit of several requests.
const BYTES_PER_COMMIT: usize = 4 * 1024 * 1024;

/// A new batch. One without tasks is not stored.
#[derive(Debug)]
pub struct Created {
    pub batch_id: Uuid,
    pub tasks: Vec<TaskSummary>,
}

/// A batch to create, and the actor that creates it.
#[derive(Debug)]
pub struct Creation {
    batch: Arc<NewBatch>,
    context: CreationContext,
    actor: Actor,
}

impl Creation {
    fn with_id(&self, id: Uuid) -> New<'_> {
        New { id, batch: &self.batch, context: &self.context }
    }
}

impl Job for Creation {
    /// Creations of one actor join, as the audit trail names one actor per transaction. Large batches do not: they gain
    /// nothing from a group commit.
    fn joins(&self, earlier: &[Creation]) -> bool {
        let tasks = |creation: &Creation| creation.batch.tasks.len();
        let bytes = |creation: &Creation| creation.batch.bytes;
        earlier.is_empty()
            || earlier.iter().all(|other| other.actor == self.actor)
                && earlier.iter().map(tasks).sum::<usize>() + tasks(self) <= TASKS_PER_COMMIT
                && earlier.iter().map(bytes).sum::<usize>() + bytes(self) <= BYTES_PER_COMMIT
    }
}

impl Service {
    /// Creates a batch of tasks. With a `key`, a repeated request gets the same answer and creates nothing.
    pub async fn create(&self, batch: NewBatch, key: Option<&IdempotencyKey>) -> Result<Created> {
        if batch.tasks.is_empty() && key.is_none() {
            return Ok(Created { batch_id: Uuid::now_v7(), tasks: Vec::new() });
        }
        let defaults = policies::by_kind(&self.store).await?;
        self.register_matchers(batch.tasks.iter().flat_map(|task| &task.rules)).await?;
        let keys: Vec<(i16, &str)> = batch.tasks.iter().map(|task| (task.priority, batch.fair_key_of(task))).collect();
        let turns = fairness::turns(&self.store, &keys).await?;
        let batch = Arc::new(batch);
        let creation = Creation {
            batch: Arc::clone(&batch),
            context: CreationContext { defaults, turns },
            actor: self.actor.clone(),
        };
        let deduplicates = batch.tasks.iter().any(|task| !task.dedupe_strategy.is_empty());
        let created = if key.is_some() || deduplicates {
            let created = Box::pin(self.store.alone(|session| self.create_alone(session, &creation, key))).await?;
            created.ok_or(Error::KeyReused)?
        } else {
            self.lanes.creations.submit(creation, |jobs| self.create_group(jobs)).await?
        };
        let view = |stored: &create::StoredTask| {
            let task = &batch.tasks[stored.position];
            TaskSummary {
                id: stored.id,
                name: task.name.clone(),
                kind: task.kind.clone(),
                status: stored.status,
                batch_id: created.batch_id,
                priority: task.priority,
                attempt: 0,
                run: 0,
                next_retry_at: None,
                success: 0,
                failures: 0,
                expected_count: task.expected_count,
                created_at: Timestamp(created.created_at),
                started_at: None,
                ended_at: stored.status.is_terminal().then_some(Timestamp(created.created_at)),
                dead_end_barrier: task.dead_end_barrier,
            }
        };
        let tasks = created.tasks.iter().map(view).collect();
        Ok(Created { batch_id: created.batch_id, tasks })
    }

    async fn create_group(&self, jobs: Vec<Creation>) -> Vec<store::Result<create::StoredBatch>> {
        isolate_failures(&jobs, |jobs, patience| {
            self.store.retrying(patience, move |session| self.create_once(session, jobs))
        })
        .await
    }

    /// Registers the matchers of these rules. Claims wait for it, so a request may bring a limited number of new ones.
    pub(super) async fn register_matchers<'a>(&self, rules: impl IntoIterator<Item = &'a Rule>) -> Result<()> {
        let new = matchers::unknown(&self.store, rules);
        if new.len() > matchers::MOST_NEW {
            let (limit, count) = (matchers::MOST_NEW, new.len());
            let message = format!("must have at most {limit} matchers that are new to the service, not {count}");
            return Err(invalid("rules", ProblemCode::WrongCount, message));
        }
        Ok(matchers::register(&self.store, &new).await?)
    }

    async fn create_once(&self, session: Session, jobs: &[Creation]) -> store::Result<Vec<create::StoredBatch>> {
        let Some(first) = jobs.first() else { return Ok(Vec::new()) };
        let mut tx = session.begin(first.actor.clone()).await?;
        let new: Vec<New> = jobs.iter().map(|job| job.with_id(Uuid::now_v7())).collect();
        let created = create::batches(&mut tx, &new).await?;
        tx.commit().await?;
        Ok(created)
    }

    /// Creates a batch outside the lanes, because it may wait for another request: one with the same key, or one that
    /// deduplicates the same tasks. Returns `None` if the key was used with another body.
    async fn create_alone(
        &self,
        session: Session,
        creation: &Creation,
        key: Option<&IdempotencyKey>,
    ) -> store::Result<Option<create::StoredBatch>> {
        let mut tx = self.begin(&session).await?;
        let batch_id = Uuid::now_v7();
        let tasks = &creation.batch.tasks;
        if let Some(key) = key {
            match idempotency::take(&mut tx, key, batch_id, tasks).await? {
                Seen::New => {}
                Seen::Repeated(created) => {
                    tx.rollback().await?;
                    return Ok(Some(created));
                }
                Seen::KeyReused => {
                    tx.rollback().await?;
                    return Ok(None);
                }
            }
        }
        let created = create::batches(&mut tx, &[creation.with_id(batch_id)]).await?.pop();
        if let (Some(key), Some(created)) = (key, &created) {
            idempotency::record(&mut tx, key, tasks, created).await?;
        }
        tx.commit().await?;
        Ok(created)
    }

    /// Returns a task. With a `run`, a task at another run is a conflict.
    pub async fn task(&self, id: Uuid, run: Option<i32>) -> Result<TaskDetails> {
        let task = details::task(&self.store, id).await?.ok_or_else(|| no_task(id))?;
        let (status, current) = (task.basic.status, task.basic.run);
        if run.is_some_and(|run| run != current) {
            return Err(Error::Conflict(Conflict::new(Operation::Read, status, current, run)));
        }
        Ok(task)
    }

    pub async fn tasks(&self, filter: &TaskFilter, page: Page<Uuid>, limit: i64) -> Result<Vec<TaskSummary>> {
        Ok(list::tasks(&self.store, filter, page, limit).await?)
    }

    pub async fn cancel(&self, id: Uuid) -> Result<TaskDetails> {
        let event = Event::Canceled { reason: format!("canceled by {}", self.actor) };
        self.apply_event(id, &event, Operation::Cancel).await
    }

    pub async fn pause(&self, id: Uuid) -> Result<TaskDetails> {
        self.apply_event(id, &Event::Paused, Operation::Pause).await
    }

    pub async fn resume(&self, id: Uuid) -> Result<TaskDetails> {
        self.apply_event(id, &Event::Resumed, Operation::Resume).await
    }

    async fn apply_event(&self, id: Uuid, event: &Event, operation: Operation) -> Result<TaskDetails> {
        let done = self
            .store
            .alone(|session| async move {
                let mut tx = self.begin(&session).await?;
                let decide = |task: &Task, moment| decide(task, event, moment);
                let locked = lock::by_ids(&mut tx, &[id]).await?;
                let locked = dead_ends::lock_ancestors(&mut tx, locked, decide).await?;
                let Some(task) = locked.tasks.first() else { return refuse(tx, Done::Missing).await };
                match decide(task, locked.moment) {
                    Err(_) => return refuse(tx, Done::Refused(Box::new(task.clone()))).await,
                    Ok(None) => {}
                    Ok(Some(transition)) => transitions::apply(&mut tx, &[transition], locked.moment).await?,
                }
                finish(tx, id).await
            })
            .await?;
        self.answer(id, done, None, operation)
    }
}

async fn finish(mut tx: Tx, id: Uuid) -> store::Result<Done> {
    let task = details::task_in(&mut tx, id).await?;
    tx.commit().await?;
    Ok(task.map_or(Done::Missing, |task| Done::Task(Box::new(task))))
}

async fn refuse(tx: Tx, why: Done) -> store::Result<Done> {
    tx.rollback().await?;
    Ok(why)
}
