//! Reports, changes and heartbeats of tasks. Under load, one transaction commits those of many requests; each request is
//! decided and answered by itself.

use std::collections::{HashMap, HashSet};

use uuid::Uuid;

use super::conflict::Operation;
use super::group_commit::{Job, isolate_failures};
use super::{Conflict, Error, Result, Service, invalid, no_task};
use crate::domain::request::patch::{HeartbeatRequest, Patch};
use crate::domain::request::problems::ProblemCode;
use crate::domain::task::lifecycle::{self, Event, Report, Transition, decide};
use crate::domain::task::{Flags, Task};
use crate::domain::view::TaskDetails;
use crate::store::graph::dead_ends;
use crate::store::ledger::attempts;
use crate::store::tasks::heartbeat::{self, Heartbeat};
use crate::store::tasks::lock::{self, LockedTasks};
use crate::store::tasks::{details, transitions};
use crate::store::{self, Actor, Patience, Session, Tx};

/// How often a change is tried in a lane. A locked task is usually locked for a moment, mostly to record that it was
/// started. A change of a task that is locked for longer gets its own transaction and connection.
const GROUP_TRIES: usize = 3;

/// A `PATCH` of a task, and the actor behind it.
#[derive(Clone, Debug)]
pub struct Change {
    id: Uuid,
    patch: Patch,
    actor: Actor,
}

impl Job for Change {
    /// Changes of one actor join, as the audit trail names one actor per transaction. A change of metadata does not:
    /// the merged metadata can turn out too large, which rolls back the transaction. Two changes of one task run one
    /// after the other.
    fn joins(&self, earlier: &[Change]) -> bool {
        let fits = |other: &Change| other.id != self.id && other.actor == self.actor && other.patch.metadata.is_none();
        earlier.is_empty() || self.patch.metadata.is_none() && earlier.iter().all(fits)
    }
}

impl Job for Heartbeat {
    /// Heartbeats of one task join if they are about the same run: they are added up.
    fn joins(&self, earlier: &[Heartbeat]) -> bool {
        earlier.iter().all(|other| other.id != self.id || other.run == self.run)
    }
}

/// The result of a change of one task in its transaction.
#[derive(Debug)]
pub enum Done {
    /// The task after the change.
    Task(Box<TaskDetails>),
    /// The task is changed, but too large to be read with the others.
    Changed,
    Refused(Box<Task>),
    /// The merged metadata has this many bytes.
    TooLarge(usize),
    Missing,
}

/// What to answer for a change once everything is written.
enum ChangeOutcome {
    /// The task after the change.
    Task,
    Other(Done),
}

impl Service {
    /// Records the report of a worker, or changes a task.
    pub async fn patch(&self, id: Uuid, patch: Patch) -> Result<TaskDetails> {
        let run = patch.run;
        let job = Change { id, patch, actor: self.actor.clone() };
        for _ in 0..GROUP_TRIES {
            match self.lanes.changes.submit(job.clone(), |jobs| self.change_batch(jobs)).await {
                Ok(Some(done)) => return self.answer_change(id, done, run).await,
                Ok(None) => {}
                Err(error) if error.is_busy() => break,
                Err(error) => return Err(error.into()),
            }
        }
        let done = Box::pin(self.store.waiting(|session| self.change_alone(session, &job))).await?;
        self.answer_change(id, done, run).await
    }

    /// Records a heartbeat, which is durable when this returns.
    pub async fn progress(&self, id: Uuid, run: Option<i32>, counters: HeartbeatRequest) -> Result<()> {
        let HeartbeatRequest { success, failures } = counters;
        let heartbeat = Heartbeat { id, run, success, failures, expected_count: None, priority: None };
        if written(
            self.lanes.heartbeats.submit(heartbeat.clone(), |heartbeats| self.record_heartbeats(heartbeats)).await,
        )? || written(
            self.lanes
                .slot_heartbeats
                .submit(heartbeat.clone(), |heartbeats| self.record_slot_heartbeats(heartbeats))
                .await,
        )? || self.heartbeat_waiting(&heartbeat).await?
        {
            return Ok(());
        }
        let (status, current) = details::status_and_run(&self.store, id).await?.ok_or_else(|| no_task(id))?;
        Err(Error::Conflict(Conflict::new(Operation::Heartbeat, status, current, run)))
    }

    /// Records a heartbeat after waiting for the locks on the task and its slots. If that takes too long, records at
    /// least that the worker is alive: its task must not time out meanwhile.
    async fn heartbeat_waiting(&self, heartbeat: &Heartbeat) -> store::Result<bool> {
        let error = match Box::pin(self.store.waiting(|session| self.heartbeat_alone(session, heartbeat))).await {
            Err(error) if error.is_busy() => error,
            result => return result,
        };
        let touch = |session: Session| async move {
            let mut tx = self.begin(&session).await?;
            heartbeat::touch(&mut tx, heartbeat.id, heartbeat.run).await?;
            tx.commit().await
        };
        self.store.retrying(Patience::Least, touch).await?;
        Err(error)
    }

    /// The answer to a change. Reads the task if it was too large to be read with the others.
    async fn answer_change(&self, id: Uuid, done: Done, run: Option<i32>) -> Result<TaskDetails> {
        match done {
            Done::Changed => details::task(&self.store, id).await?.ok_or_else(|| no_task(id)),
            done => self.answer(id, done, run, Operation::Report),
        }
    }

    pub(super) fn answer(&self, id: Uuid, done: Done, run: Option<i32>, operation: Operation) -> Result<TaskDetails> {
        match done {
            Done::Task(task) => Ok(*task),
            Done::Refused(task) => Err(Error::Conflict(Conflict::new(operation, task.status, task.run, run))),
            Done::Missing | Done::Changed => Err(no_task(id)),
            Done::TooLarge(size) => {
                let limit = self.metadata_bytes;
                let message = format!("must have at most {limit} bytes when merged, not {size}");
                Err(invalid("metadata", ProblemCode::TooLarge, message))
            }
        }
    }

    /// Records heartbeats of tasks without slots. The answer is false if nothing was written: the task occupies slots,
    /// is locked, has ended, is at another run, or does not exist.
    async fn record_heartbeats(&self, heartbeats: Vec<Heartbeat>) -> Vec<store::Result<bool>> {
        isolate_failures(&heartbeats, |heartbeats, patience| {
            self.store.retrying(patience, move |session| async move {
                match patience {
                    Patience::Brief => self.record_without_slots(session, heartbeats).await,
                    // Unlike the single statement, this one can defer changes of counters that are locked.
                    Patience::Least | Patience::Long => self.record_unlocked(session, heartbeats).await,
                }
            })
        })
        .await
    }

    async fn record_without_slots(&self, session: Session, heartbeats: &[Heartbeat]) -> store::Result<Vec<bool>> {
        let mut tx = self.begin(&session).await?;
        let written: HashSet<Uuid> =
            heartbeat::add_without_slots(&mut tx, &sum_by_task(heartbeats)).await?.into_iter().collect();
        tx.commit().await?;
        Ok(heartbeats.iter().map(|heartbeat| written.contains(&heartbeat.id)).collect())
    }

    /// Records heartbeats of tasks that may occupy slots, whose capacity depends on what is left to do.
    async fn record_slot_heartbeats(&self, heartbeats: Vec<Heartbeat>) -> Vec<store::Result<bool>> {
        isolate_failures(&heartbeats, |heartbeats, patience| {
            self.store.retrying(patience, move |session| self.record_unlocked(session, heartbeats))
        })
        .await
    }

    async fn record_unlocked(&self, session: Session, heartbeats: &[Heartbeat]) -> store::Result<Vec<bool>> {
        let mut tx = self.begin(&session).await?;
        let unlocked =
            lock::unlocked(&mut tx, &heartbeats.iter().map(|heartbeat| heartbeat.id).collect::<Vec<_>>()).await?;
        let sums: Vec<Heartbeat> =
            sum_by_task(heartbeats).into_iter().filter(|heartbeat| unlocked.contains(&heartbeat.id)).collect();
        let written: HashSet<Uuid> = heartbeat::record(&mut tx, &sums).await?.into_iter().collect();
        tx.commit().await?;
        Ok(heartbeats.iter().map(|heartbeat| written.contains(&heartbeat.id)).collect())
    }

    async fn heartbeat_alone(&self, session: Session, heartbeat: &Heartbeat) -> store::Result<bool> {
        let mut tx = self.begin(&session).await?;
        let written = heartbeat::record(&mut tx, std::slice::from_ref(heartbeat)).await?;
        tx.commit().await?;
        Ok(!written.is_empty())
    }

    /// Changes the tasks that are not locked. The answer is `None` if the task is locked or does not exist: a lane does
    /// not wait for a lock, which would hold up every request in it.
    async fn change_batch(&self, jobs: Vec<Change>) -> Vec<store::Result<Option<Done>>> {
        isolate_failures(&jobs, |jobs, patience| {
            self.store.retrying(patience, move |session| self.change_unlocked(session, jobs))
        })
        .await
    }

    async fn change_unlocked(&self, session: Session, jobs: &[Change]) -> store::Result<Vec<Option<Done>>> {
        let Some(first) = jobs.first() else { return Ok(Vec::new()) };
        let mut tx = session.begin(first.actor.clone()).await?;
        let (locked, views) =
            details::lock_unlocked(&mut tx, &jobs.iter().map(|job| job.id).collect::<Vec<_>>()).await?;
        let unlocked: HashSet<Uuid> = locked.tasks.iter().map(|task| task.id).collect();
        let changes: Vec<&Change> = jobs.iter().filter(|job| unlocked.contains(&job.id)).collect();
        let mut done = self.change_in(tx, locked, views, &changes).await?.into_iter();
        Ok(jobs.iter().map(|job| if unlocked.contains(&job.id) { done.next() } else { None }).collect())
    }

    async fn change_alone(&self, session: Session, job: &Change) -> store::Result<Done> {
        let mut tx = session.begin(job.actor.clone()).await?;
        let locked = lock::by_ids(&mut tx, &[job.id]).await?;
        Ok(self.change_in(tx, locked, HashMap::new(), &[job]).await?.pop().unwrap_or(Done::Missing))
    }

    /// Decides and applies changes of locked tasks, and commits. `views` holds the details of the locked tasks, or
    /// nothing.
    async fn change_in(
        &self,
        mut tx: Tx,
        locked: LockedTasks,
        mut views: HashMap<Uuid, TaskDetails>,
        jobs: &[&Change],
    ) -> store::Result<Vec<Done>> {
        let Some(first) = jobs.first() else {
            tx.rollback().await?;
            return Ok(Vec::new());
        };
        let report = |patch: &Patch| patch.result.clone().map(|result| Report { run: patch.run, result });
        let reports: HashMap<Uuid, Report> =
            jobs.iter().filter_map(|job| Some((job.id, report(&job.patch)?))).collect();
        let proven: HashSet<Uuid> = jobs.iter().filter(|job| job.patch.proven).map(|job| job.id).collect();
        let decide = |task: &Task, moment| match reports.get(&task.id) {
            Some(report) if proven.contains(&task.id) && report.run == Some(task.run) => {
                // Claims commit asynchronously: a crash of the database may lose one after its worker was called.
                let claimed = Task { claimed_run: report.run, ..task.clone() };
                decide(&claimed, &Event::Reported(report.clone()), moment)
            }
            Some(report) => decide(task, &Event::Reported(report.clone()), moment),
            None => Ok(None),
        };
        let ids: Vec<Uuid> = jobs.iter().map(|job| job.id).collect();
        let locked = dead_ends::lock_ancestors(&mut tx, locked, decide).await?;
        let tasks: HashMap<Uuid, &Task> = locked.tasks.iter().map(|task| (task.id, task)).collect();
        let (mut heartbeats, mut decided, mut outcomes) = (Vec::new(), Vec::new(), Vec::with_capacity(jobs.len()));
        for Change { id, patch, .. } in jobs {
            let Some(task) = tasks.get(id) else {
                outcomes.push(ChangeOutcome::Other(Done::Missing));
                continue;
            };
            let refused = || ChangeOutcome::Other(Done::Refused(Box::new((*task).clone())));
            outcomes.push(match (reports.get(id), decide(task, locked.moment)) {
                (Some(_), Ok(Some(transition))) => {
                    decided.push(transition);
                    heartbeats.extend(has_other_changes(patch).then(|| heartbeat_from(*id, patch)));
                    ChangeOutcome::Task
                }
                (Some(_), Ok(None)) => ChangeOutcome::Task,
                (Some(report), Err(_)) => {
                    let run = report.run.unwrap_or(task.run - 1);
                    let recorded = attempts::recorded(&mut tx, *id, run).await?;
                    if lifecycle::repeats(task, report, recorded) { ChangeOutcome::Task } else { refused() }
                }
                (None, _) if task.status.is_terminal() || patch.run.is_some_and(|run| run != task.run) => refused(),
                (None, _) => {
                    heartbeats.push(heartbeat_from(*id, patch));
                    ChangeOutcome::Task
                }
            });
        }
        if !heartbeats.is_empty() {
            heartbeat::record(&mut tx, &heartbeats).await?;
        }
        // A change with metadata is always alone in its transaction.
        if let (Some(metadata), [ChangeOutcome::Task]) = (&first.patch.metadata, outcomes.as_slice())
            && (!decided.is_empty() || !heartbeats.is_empty())
        {
            views.clear();
            let size = heartbeat::merge_metadata(&mut tx, first.id, metadata).await?;
            if size > self.metadata_bytes {
                tx.rollback().await?;
                return Ok(vec![Done::TooLarge(size)]);
            }
        }
        transitions::apply(&mut tx, &decided, locked.moment).await?;
        // Usually only the decided tasks have changed. The search for dead ends may have released the locks meanwhile.
        let searches_dead_ends = |task: &Task| task.flags.has(Flags::DEAD_END) || task.flags.has(Flags::TELLS_PARENTS);
        if views.is_empty() || !heartbeats.is_empty() || locked.tasks.iter().any(searches_dead_ends) {
            views = details::small_tasks_in(&mut tx, &ids).await?;
        } else {
            for task in decided.iter().map(Transition::task) {
                views.entry(task.id).and_modify(|view| view.follow(task, locked.moment.now));
            }
        }
        tx.commit().await?;
        let done = |(outcome, id): (ChangeOutcome, &Uuid)| match outcome {
            ChangeOutcome::Task => views.remove(id).map_or(Done::Changed, |task| Done::Task(Box::new(task))),
            ChangeOutcome::Other(done) => done,
        };
        Ok(outcomes.into_iter().zip(&ids).map(done).collect())
    }
}

/// Treats a heartbeat that met a lock as not written yet.
fn written(result: store::Result<bool>) -> store::Result<bool> {
    match result {
        Err(error) if error.is_busy() => Ok(false),
        result => result,
    }
}

/// Adds up the heartbeats of each task. They are about the same run: see [`Job::joins`].
fn sum_by_task(heartbeats: &[Heartbeat]) -> Vec<Heartbeat> {
    let mut sums: HashMap<Uuid, Heartbeat> = HashMap::with_capacity(heartbeats.len());
    for heartbeat in heartbeats {
        let sum =
            sums.entry(heartbeat.id).or_insert_with(|| Heartbeat { success: 0, failures: 0, ..heartbeat.clone() });
        sum.success += heartbeat.success;
        sum.failures += heartbeat.failures;
    }
    sums.into_values().collect()
}

/// The heartbeat that a patch contains: what it adds to counters, and that its worker is alive.
fn heartbeat_from(id: Uuid, patch: &Patch) -> Heartbeat {
    Heartbeat {
        id,
        run: None,
        success: patch.progress.success,
        failures: patch.progress.failures,
        expected_count: patch.expected_count,
        priority: patch.priority,
    }
}

/// Whether a patch changes more than the result. After a result alone, the task needs no heartbeat.
fn has_other_changes(patch: &Patch) -> bool {
    patch.progress != HeartbeatRequest::default() || patch.expected_count.is_some() || patch.priority.is_some()
}
