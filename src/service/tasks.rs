//! The verbs of `/task`.

use uuid::Uuid;

use super::{Error, Result, Service, no_task};
use crate::domain::lifecycle::{self, Event, Report, decide};
use crate::domain::new_task::NewBatch;
use crate::domain::patch::{Patch, Progress};
use crate::domain::task::Task;
use crate::domain::view::{BasicTask, Timestamp, WholeTask};
use crate::store::idempotency::{self, Key, Seen};
use crate::store::progress::{self, Sign};
use crate::store::query::{Page, TaskFilter};
use crate::store::{
    self, Tx, attempts, create, dead_ends, fairness, lock, policies, query, retrying, slots, transitions,
};

/// A new batch; without tasks nothing was stored.
#[derive(Debug)]
pub struct Created {
    pub batch_id: Uuid,
    pub tasks: Vec<BasicTask>,
}

/// How a change of one task went inside its transaction.
enum Done {
    /// As it now is.
    Task(Box<WholeTask>),
    Refused(Box<Task>),
    TooLarge(usize),
    Missing,
}

impl Service {
    /// With a `key`, the same request again gets the same answer and creates nothing.
    pub async fn create(&self, batch: &NewBatch, key: Option<&Key>) -> Result<Created> {
        if batch.tasks.is_empty() && key.is_none() {
            return Ok(Created { batch_id: Uuid::now_v7(), tasks: Vec::new() });
        }
        let defaults = policies::by_kind(&self.store).await?;
        slots::register(&self.store, batch.tasks.iter().flat_map(|task| &task.rules)).await?;
        let keys: Vec<(i16, &str)> = batch.tasks.iter().map(|task| (task.priority, batch.fair_key_of(task))).collect();
        let turns = fairness::turns(&self.store, &keys).await?;
        let around = create::Circumstances { defaults, turns };
        let created = retrying(|| self.create_once(batch, key, &around)).await?;
        let Some(created) = created else { return Err(Error::KeyReused) };
        let view = |made: &create::CreatedTask| {
            let task = &batch.tasks[made.position];
            BasicTask {
                id: made.id,
                name: task.name.clone(),
                kind: task.kind.clone(),
                status: made.status,
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
                ended_at: made.status.is_terminal().then_some(Timestamp(created.created_at)),
                dead_end_barrier: task.dead_end_barrier,
            }
        };
        let tasks = created.tasks.iter().map(view).collect();
        Ok(Created { batch_id: created.batch_id, tasks })
    }

    /// `None`: the key was used with another body.
    async fn create_once(
        &self,
        batch: &NewBatch,
        key: Option<&Key>,
        around: &create::Circumstances,
    ) -> store::Result<Option<create::Created>> {
        let mut tx = self.begin().await?;
        let batch_id = Uuid::now_v7();
        if let Some(key) = key {
            match idempotency::take(&mut tx, key, batch_id, &batch.tasks).await? {
                Seen::Never => {}
                Seen::Before(created) => {
                    tx.rollback().await?;
                    return Ok(Some(created));
                }
                Seen::Otherwise => {
                    tx.rollback().await?;
                    return Ok(None);
                }
            }
        }
        let created = create::batch(&mut tx, batch_id, batch, around).await?;
        if let Some(key) = key {
            idempotency::record(&mut tx, key, &batch.tasks, &created).await?;
        }
        tx.commit().await?;
        Ok(Some(created))
    }

    /// With a `run`: only while the task is at that one.
    pub async fn task(&self, id: Uuid, run: Option<i32>) -> Result<WholeTask> {
        let task = query::task(&self.store, id).await?.ok_or_else(|| no_task(id))?;
        let (status, current) = (task.basic.status, task.basic.run);
        if run.is_some_and(|run| run != current) { Err(conflict(status, current, run)) } else { Ok(task) }
    }

    pub async fn tasks(&self, filter: &TaskFilter, page: Page<Uuid>, limit: i64) -> Result<Vec<BasicTask>> {
        Ok(query::tasks(&self.store, filter, page, limit).await?)
    }

    /// What a worker reports, or somebody changes.
    pub async fn patch(&self, id: Uuid, patch: &Patch) -> Result<WholeTask> {
        let done = retrying(|| self.patch_once(id, patch)).await?;
        self.answer(id, done, patch.run)
    }

    /// A sign of life, durable when this returns.
    pub async fn progress(&self, id: Uuid, run: Option<i32>, counters: Progress) -> Result<()> {
        let sign = Sign {
            id,
            run,
            success: counters.success,
            failures: counters.failures,
            expected_count: None,
            priority: None,
        };
        let written = retrying(|| async {
            let mut tx = self.begin().await?;
            let written = progress::record(&mut tx, std::slice::from_ref(&sign)).await?;
            tx.commit().await?;
            Ok(written)
        })
        .await?;
        if !written.is_empty() {
            return Ok(());
        }
        let (status, current) = query::standing(&self.store, id).await?.ok_or_else(|| no_task(id))?;
        Err(conflict(status, current, run))
    }

    pub async fn cancel(&self, id: Uuid) -> Result<WholeTask> {
        self.happened(id, &Event::Canceled).await
    }

    pub async fn pause(&self, id: Uuid) -> Result<WholeTask> {
        self.happened(id, &Event::Paused).await
    }

    pub async fn resume(&self, id: Uuid) -> Result<WholeTask> {
        self.happened(id, &Event::Resumed).await
    }

    async fn happened(&self, id: Uuid, event: &Event) -> Result<WholeTask> {
        let done = retrying(|| async {
            let mut tx = self.begin().await?;
            let decide = |task: &Task, moment| decide(task, event, moment);
            let locked = lock::by_ids(&mut tx, &[id]).await?;
            let locked = dead_ends::widen(&mut tx, locked, decide).await?;
            let Some(task) = locked.tasks.first() else { return refuse(tx, Done::Missing).await };
            match decide(task, locked.moment) {
                Err(_) => return refuse(tx, Done::Refused(Box::new(task.clone()))).await,
                Ok(None) => {}
                Ok(Some(transition)) => transitions::apply(&mut tx, &[transition], locked.moment).await?,
            }
            finish(tx, id).await
        })
        .await?;
        self.answer(id, done, None)
    }

    async fn patch_once(&self, id: Uuid, patch: &Patch) -> store::Result<Done> {
        let mut tx = self.begin().await?;
        let report = patch.result.clone().map(|result| Report { run: patch.run, result });
        let decide = |task: &Task, moment| {
            report.as_ref().map_or(Ok(None), |report| decide(task, &Event::Reported(report.clone()), moment))
        };
        let locked = lock::by_ids(&mut tx, &[id]).await?;
        let locked = dead_ends::widen(&mut tx, locked, decide).await?;
        let Some(task) = locked.tasks.first() else { return refuse(tx, Done::Missing).await };
        let refused = || Done::Refused(Box::new(task.clone()));
        let mut transition = None;
        if let Some(report) = &report {
            match decide(task, locked.moment) {
                Ok(Some(decided)) => transition = Some(decided),
                Ok(None) => return finish(tx, id).await,
                Err(_) => {
                    let about = report.run.unwrap_or(task.run - 1);
                    let recorded = attempts::recorded(&mut tx, id, about).await?;
                    if !lifecycle::repeats(task, report, recorded) {
                        return refuse(tx, refused()).await;
                    }
                    return finish(tx, id).await;
                }
            }
        } else if task.status.is_terminal() || patch.run.is_some_and(|run| run != task.run) {
            return refuse(tx, refused()).await;
        }
        let sign = Sign {
            id,
            run: None,
            success: patch.progress.success,
            failures: patch.progress.failures,
            expected_count: patch.expected_count,
            priority: patch.priority,
        };
        progress::record(&mut tx, &[sign]).await?;
        if let Some(metadata) = &patch.metadata {
            let size = progress::merge_metadata(&mut tx, id, metadata).await?;
            if size > self.metadata_bytes {
                return refuse(tx, Done::TooLarge(size)).await;
            }
        }
        if let Some(transition) = transition {
            transitions::apply(&mut tx, &[transition], locked.moment).await?;
        }
        finish(tx, id).await
    }

    fn answer(&self, id: Uuid, done: Done, run: Option<i32>) -> Result<WholeTask> {
        match done {
            Done::Task(task) => Ok(*task),
            Done::Refused(task) => Err(conflict(task.status, task.run, run)),
            Done::Missing => Err(no_task(id)),
            Done::TooLarge(size) => {
                let most = self.metadata_bytes;
                let problem = format!("metadata: must have at most {most} bytes when merged, not {size}");
                Err(Error::Invalid(vec![problem]))
            }
        }
    }
}

async fn finish(mut tx: Tx, id: Uuid) -> store::Result<Done> {
    let task = query::task_in(&mut tx, id).await?;
    tx.commit().await?;
    Ok(task.map_or(Done::Missing, |task| Done::Task(Box::new(task))))
}

async fn refuse(tx: Tx, why: Done) -> store::Result<Done> {
    tx.rollback().await?;
    Ok(why)
}

fn conflict(status: crate::domain::status::Status, current: i32, run: Option<i32>) -> Error {
    let detail = match run {
        Some(run) if run != current => {
            format!("run {run} is not the current one: the task is {status:?} and at run {current}")
        }
        _ => format!("not possible while the task is {status:?}"),
    };
    Error::Conflict { detail, status: Some(status), run: Some(current) }
}
