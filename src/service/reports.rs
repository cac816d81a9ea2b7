//! What workers say about their tasks: reports, changes, heartbeats. Under load those of many requests go into one
//! transaction (`together`); each is decided and answered for itself.

use std::collections::{HashMap, HashSet};

use uuid::Uuid;

use super::group_commit::{Job, isolate_failures};
use super::{Error, Result, Service, conflict, no_task};
use crate::domain::request::patch::{HeartbeatRequest, Patch};
use crate::domain::task::lifecycle::{self, Event, Report, Transition, decide};
use crate::domain::task::{Flags, Task};
use crate::domain::view::TaskDetails;
use crate::store::graph::dead_ends;
use crate::store::ledger::attempts;
use crate::store::tasks::heartbeat::{self, Heartbeat};
use crate::store::tasks::lock::{self, LockedTasks};
use crate::store::tasks::{details, transitions};
use crate::store::{self, Actor, Patience, Session, Tx};

/// How often a change is left to a lane. Whoever has its task locked has done so for a moment, mostly to write that it was
/// started; a transaction and a connection of its own is for what is locked for longer.
const GROUP_TRIES: usize = 3;

/// A `PATCH` and on whose behalf it is.
#[derive(Clone, Debug)]
pub struct Change {
    id: Uuid,
    patch: Patch,
    actor: Actor,
}

impl Job for Change {
    /// The audit trail names one actor per transaction. Merged metadata can turn out too large, which takes back the
    /// whole transaction, so it goes alone. Two about one task go one after the other.
    fn joins(&self, others: &[Change]) -> bool {
        let fits = |other: &Change| other.id != self.id && other.actor == self.actor && other.patch.metadata.is_none();
        others.is_empty() || self.patch.metadata.is_none() && others.iter().all(fits)
    }
}

impl Job for Heartbeat {
    /// Several about one run are added up.
    fn joins(&self, others: &[Heartbeat]) -> bool {
        others.iter().all(|other| other.id != self.id || other.run == self.run)
    }
}

/// How a change of one task went inside its transaction.
#[derive(Debug)]
pub enum Done {
    /// As it now is.
    Task(Box<TaskDetails>),
    /// It is changed, and too large to be read with the others.
    Changed,
    Refused(Box<Task>),
    TooLarge(usize),
    Missing,
}

/// What is to be answered when all is written.
enum Outcome {
    Task,
    Other(Done),
}

impl Service {
    /// What a worker reports, or somebody changes.
    pub async fn patch(&self, id: Uuid, patch: Patch) -> Result<TaskDetails> {
        let run = patch.run;
        let job = Change { id, patch, actor: self.actor.clone() };
        for _ in 0..GROUP_TRIES {
            match self.lanes.changes.submit(job.clone(), |jobs| self.change(jobs)).await {
                Ok(Some(done)) => return self.done(id, done, run).await,
                Ok(None) => {}
                Err(error) if error.is_busy() => break,
                Err(error) => return Err(error.into()),
            }
        }
        let done = Box::pin(self.store.waiting(|session| self.change_alone(session, &job))).await?;
        self.done(id, done, run).await
    }

    /// A heartbeat, durable when this returns.
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
        Err(conflict(status, current, run))
    }

    /// Waits for whoever holds the task, or the slots that it occupies. If that takes too long, at least that its worker
    /// lives is noted: it must not time out while it tries.
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

    /// The answer, with the task read again where it was too large to be read with others.
    async fn done(&self, id: Uuid, done: Done, run: Option<i32>) -> Result<TaskDetails> {
        match done {
            Done::Changed => details::task(&self.store, id).await?.ok_or_else(|| no_task(id)),
            done => self.answer(id, done, run),
        }
    }

    pub(super) fn answer(&self, id: Uuid, done: Done, run: Option<i32>) -> Result<TaskDetails> {
        match done {
            Done::Task(task) => Ok(*task),
            Done::Refused(task) => Err(conflict(task.status, task.run, run)),
            Done::Missing | Done::Changed => Err(no_task(id)),
            Done::TooLarge(size) => {
                let most = self.metadata_bytes;
                let problem = format!("metadata: must have at most {most} bytes when merged, not {size}");
                Err(Error::Invalid(vec![problem]))
            }
        }
    }

    /// False: it was not written. Its task occupies slots, is in other hands, has ended, is at another run, or is not there.
    async fn record_heartbeats(&self, heartbeats: Vec<Heartbeat>) -> Vec<store::Result<bool>> {
        isolate_failures(&heartbeats, |heartbeats, patience| {
            self.store.retrying(patience, move |session| async move {
                match patience {
                    Patience::Brief => self.heartbeats_without_slots(session, heartbeats).await,
                    // Counters that somebody else holds are settled later, which that statement cannot do.
                    Patience::Least | Patience::Long => self.heartbeats_of_unlocked(session, heartbeats).await,
                }
            })
        })
        .await
    }

    async fn heartbeats_without_slots(&self, session: Session, heartbeats: &[Heartbeat]) -> store::Result<Vec<bool>> {
        let mut tx = self.begin(&session).await?;
        let written: HashSet<Uuid> =
            heartbeat::add_without_slots(&mut tx, &added_up(heartbeats)).await?.into_iter().collect();
        tx.commit().await?;
        Ok(heartbeats.iter().map(|heartbeat| written.contains(&heartbeat.id)).collect())
    }

    /// The same where slots may have to know what is left to do.
    async fn record_slot_heartbeats(&self, heartbeats: Vec<Heartbeat>) -> Vec<store::Result<bool>> {
        isolate_failures(&heartbeats, |heartbeats, patience| {
            self.store.retrying(patience, move |session| self.heartbeats_of_unlocked(session, heartbeats))
        })
        .await
    }

    async fn heartbeats_of_unlocked(&self, session: Session, heartbeats: &[Heartbeat]) -> store::Result<Vec<bool>> {
        let mut tx = self.begin(&session).await?;
        let unlocked =
            lock::unlocked(&mut tx, &heartbeats.iter().map(|heartbeat| heartbeat.id).collect::<Vec<_>>()).await?;
        let sums: Vec<Heartbeat> =
            added_up(heartbeats).into_iter().filter(|heartbeat| unlocked.contains(&heartbeat.id)).collect();
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

    /// `None`: the task is in other hands, or not there. A lane waits for nobody, or one lock would hold up all.
    async fn change(&self, jobs: Vec<Change>) -> Vec<store::Result<Option<Done>>> {
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
        let of_unlocked: Vec<&Change> = jobs.iter().filter(|job| unlocked.contains(&job.id)).collect();
        let mut done = self.change_in(tx, locked, views, &of_unlocked).await?.into_iter();
        Ok(jobs.iter().map(|job| if unlocked.contains(&job.id) { done.next() } else { None }).collect())
    }

    async fn change_alone(&self, session: Session, job: &Change) -> store::Result<Done> {
        let mut tx = session.begin(job.actor.clone()).await?;
        let locked = lock::by_ids(&mut tx, &[job.id]).await?;
        Ok(self.change_in(tx, locked, HashMap::new(), &[job]).await?.pop().unwrap_or(Done::Missing))
    }

    /// `views` is how those that were locked are shown, or nothing.
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
                // Claims are not waited for until they are durable: one may be lost in a crash of the database after its
                // worker was called.
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
                outcomes.push(Outcome::Other(Done::Missing));
                continue;
            };
            let refused = || Outcome::Other(Done::Refused(Box::new((*task).clone())));
            outcomes.push(match (reports.get(id), decide(task, locked.moment)) {
                (Some(_), Ok(Some(transition))) => {
                    decided.push(transition);
                    heartbeats.extend(says_more(patch).then(|| heartbeat_of(*id, patch)));
                    Outcome::Task
                }
                (Some(_), Ok(None)) => Outcome::Task,
                (Some(report), Err(_)) => {
                    let about = report.run.unwrap_or(task.run - 1);
                    let recorded = attempts::recorded(&mut tx, *id, about).await?;
                    if lifecycle::repeats(task, report, recorded) { Outcome::Task } else { refused() }
                }
                (None, _) if task.status.is_terminal() || patch.run.is_some_and(|run| run != task.run) => refused(),
                (None, _) => {
                    heartbeats.push(heartbeat_of(*id, patch));
                    Outcome::Task
                }
            });
        }
        if !heartbeats.is_empty() {
            heartbeat::record(&mut tx, &heartbeats).await?;
        }
        // Alone, if there is any.
        if let (Some(metadata), [Outcome::Task]) = (&first.patch.metadata, outcomes.as_slice())
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
        // Mostly nothing but what was decided has changed. Looking for dead ends may have let go of the tasks in between.
        let looked_up = |task: &Task| task.flags.has(Flags::DEAD_END) || task.flags.has(Flags::TELLS_PARENTS);
        if views.is_empty() || !heartbeats.is_empty() || locked.tasks.iter().any(looked_up) {
            views = details::small_tasks_in(&mut tx, &ids).await?;
        } else {
            for task in decided.iter().map(Transition::task) {
                views.entry(task.id).and_modify(|view| view.follow(task, locked.moment.now));
            }
        }
        tx.commit().await?;
        let done = |(outcome, id): (Outcome, &Uuid)| match outcome {
            Outcome::Task => views.remove(id).map_or(Done::Changed, |task| Done::Task(Box::new(task))),
            Outcome::Other(done) => done,
        };
        Ok(outcomes.into_iter().zip(&ids).map(done).collect())
    }
}

/// What is in other hands is not written yet.
fn written(result: store::Result<bool>) -> store::Result<bool> {
    match result {
        Err(error) if error.is_busy() => Ok(false),
        result => result,
    }
}

/// One heartbeat for each task. Those about one task are about one run: see [`Job::joins`].
fn added_up(heartbeats: &[Heartbeat]) -> Vec<Heartbeat> {
    let mut sums: HashMap<Uuid, Heartbeat> = HashMap::with_capacity(heartbeats.len());
    for heartbeat in heartbeats {
        let sum =
            sums.entry(heartbeat.id).or_insert_with(|| Heartbeat { success: 0, failures: 0, ..heartbeat.clone() });
        sum.success += heartbeat.success;
        sum.failures += heartbeat.failures;
    }
    sums.into_values().collect()
}

/// What a patch adds to counters, and that its worker is alive.
fn heartbeat_of(id: Uuid, patch: &Patch) -> Heartbeat {
    Heartbeat {
        id,
        run: None,
        success: patch.progress.success,
        failures: patch.progress.failures,
        expected_count: patch.expected_count,
        priority: patch.priority,
    }
}

/// Than a result, after which nobody needs a heartbeat any more.
fn says_more(patch: &Patch) -> bool {
    patch.progress != HeartbeatRequest::default() || patch.expected_count.is_some() || patch.priority.is_some()
}
