//! Fails Running tasks without a heartbeat, and returns claims whose instance died to the queue. A task does not delay
//! the others if another transaction has locked it or rows that it needs.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use super::held_back::HeldBack;
use super::runner::{Loop, Tick};
use crate::domain::task::Task;
use crate::domain::task::lifecycle::{Event, Moment, decide};
use crate::domain::task::status::Status;
use crate::store::graph::dead_ends;
use crate::store::outages::{self, Outages};
use crate::store::tasks::lock::{self, LockedTasks};
use crate::store::tasks::{heartbeat, transitions};
use crate::store::{self, Actor, Patience, Session, Store, Tx};
use crate::wake::Hints;

const LIMIT: i64 = 500;

pub struct Timeout {
    store: Store,
    interval: Duration,
    held_back: Mutex<HeldBack<Uuid>>,
}

/// The result of one transaction.
struct Expired {
    /// The tasks that the transaction locked.
    ids: Vec<Uuid>,
    ended: u64,
    due_in: Option<f64>,
}

impl Loop for Timeout {
    const NAME: &'static str = "timeout";

    fn interval(&self) -> Duration {
        self.interval
    }

    fn hint(&self) -> Option<Hints> {
        Some(Hints::TIMEOUT)
    }

    async fn tick(&self) -> store::Result<Tick> {
        let excluded = self.held_back().paused();
        let expire = |session| async { self.expire(session, &Which::MostOverdue { excluded: &excluded }).await };
        match self.store.retrying(Patience::Brief, expire).await {
            Ok(Some(expired)) => {
                let more = expired.ids.len() as u64 >= LIMIT.cast_unsigned();
                Ok(Tick { processed: expired.ended, more, due_in: expired.due_in })
            }
            Ok(None) => Ok(Tick { due_in: Some(outages::BEAT.as_secs_f64()), ..Tick::default() }),
            Err(error) if error.is_busy() => self.one_by_one(&excluded).await,
            Err(error) => Err(error),
        }
    }
}

/// The tasks that a transaction expires.
enum Which<'a> {
    MostOverdue { excluded: &'a [Uuid] },
    Only(Uuid),
}

impl Timeout {
    pub fn new(store: Store, interval: Duration) -> Timeout {
        Timeout { store, interval, held_back: Mutex::default() }
    }

    fn held_back(&self) -> MutexGuard<'_, HeldBack<Uuid>> {
        self.held_back.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Expires each task in its own transaction, because another transaction has locked rows that one of them needs.
    async fn one_by_one(&self, excluded: &[Uuid]) -> store::Result<Tick> {
        let overdue = self.store.reading(async |tx| lock::overdue(tx, LIMIT, excluded).await).await?;
        let (mut ended, more) = (0, overdue.len() as u64 >= LIMIT.cast_unsigned());
        for id in overdue {
            let expire = |session| async move { self.expire(session, &Which::Only(id)).await };
            match self.store.retrying(Patience::Least, expire).await {
                Ok(Some(expired)) if !expired.ids.is_empty() => {
                    ended += expired.ended;
                    self.held_back().remove(&id);
                }
                // Another transaction has locked the task or rows that it needs.
                Ok(_) => self.held_back().add(id),
                Err(error) if error.is_busy() => self.held_back().add(id),
                Err(error) => return Err(error),
            }
        }
        self.held_back().forget_old();
        Ok(Tick { processed: ended, more, due_in: None })
    }

    /// Returns `None` if the length of the last outage is not known yet: nothing counts as overdue until then.
    async fn expire(&self, session: Session, which: &Which<'_>) -> store::Result<Option<Expired>> {
        let mut tx = session.begin(Actor::Loop(Self::NAME)).await?;
        let Some(outages) = outages::known(&mut tx).await? else {
            tx.rollback().await?;
            return Ok(None);
        };
        let locked = match which {
            Which::MostOverdue { excluded } => lock::timed_out(&mut tx, LIMIT, excluded).await?,
            Which::Only(id) => lock::unlocked_tasks(&mut tx, &[*id]).await?,
        };
        let expired = expire_locked(&mut tx, locked, &outages).await?;
        tx.commit().await?;
        Ok(Some(expired))
    }
}

async fn expire_locked(tx: &mut Tx, locked: LockedTasks, outages: &Outages) -> store::Result<Expired> {
    let event = |task: &Task| if task.status == Status::Claimed { Event::LeaseRanOut } else { Event::TimedOut };
    let overdue = |task: &Task, moment: Moment| later_deadline(task, outages, moment.now).is_none();
    let decide = |task: &Task, moment: Moment| {
        if overdue(task, moment) { decide(task, &event(task), moment) } else { Ok(None) }
    };
    let locked = dead_ends::lock_ancestors(tx, locked, decide).await?;
    let (mut decided, mut extended) = (Vec::new(), Vec::new());
    for task in &locked.tasks {
        if let Some(deadline) = later_deadline(task, outages, locked.moment.now) {
            extended.push((task.id, deadline));
        }
        if let Ok(Some(transition)) = decide(task, locked.moment) {
            tracing::info!(task.id = %task.id, batch.id = %task.batch_id, run = task.run, event = ?event(task), "task overdue");
            decided.push(transition);
        }
    }
    transitions::apply(tx, &decided, locked.moment).await?;
    if !extended.is_empty() {
        heartbeat::put_off(tx, &extended).await?;
    }
    let due_in = lock::next_timeout(tx).await?;
    let ids = locked.tasks.iter().map(|task| task.id).collect();
    Ok(Expired { ids, ended: decided.len() as u64, due_in })
}

/// Returns the actual deadline of an executing task, if `timeout_at` has passed and the deadline has not. Heartbeats
/// move the deadline, and outages, in which workers could not report, do not count.
fn later_deadline(task: &Task, outages: &Outages, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
    let deadline = match task.status {
        Status::Running => {
            let timeout = TimeDelta::seconds(i64::from(task.timeout_secs));
            task.last_updated + timeout + outages.between(task.last_updated, now)
        }
        Status::Claimed => outages.moved(task.timeout_at?),
        _ => return None,
    };
    (deadline > now && task.timeout_at.is_some_and(|at| at <= now)).then_some(deadline)
}
