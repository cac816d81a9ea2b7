//! Running tasks without a sign of life fail; claims whose instance died go back into the queue. A task that cannot be had,
//! because somebody else holds it or what hangs on it, keeps nobody else waiting.

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

/// What a transaction looked at.
struct Expired {
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
        let but = self.held_back().now();
        let expire = |session| async { self.expire(session, &Which::MostOverdue { but: &but }).await };
        match self.store.retrying(Patience::Brief, expire).await {
            Ok(Some(expired)) => {
                let more = expired.ids.len() as u64 >= LIMIT.cast_unsigned();
                Ok(Tick { processed: expired.ended, more, due_in: expired.due_in })
            }
            Ok(None) => Ok(Tick { due_in: Some(outages::BEAT.as_secs_f64()), ..Tick::default() }),
            Err(error) if error.is_busy() => self.one_by_one(&but).await,
            Err(error) => Err(error),
        }
    }
}

enum Which<'a> {
    MostOverdue { but: &'a [Uuid] },
    Only(Uuid),
}

impl Timeout {
    pub fn new(store: Store, interval: Duration) -> Timeout {
        Timeout { store, interval, held_back: Mutex::default() }
    }

    fn held_back(&self) -> MutexGuard<'_, HeldBack<Uuid>> {
        self.held_back.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One of them needs what somebody else holds: each for itself.
    async fn one_by_one(&self, but: &[Uuid]) -> store::Result<Tick> {
        let overdue = self.store.reading(async |tx| lock::overdue(tx, LIMIT, but).await).await?;
        let (mut ended, more) = (0, overdue.len() as u64 >= LIMIT.cast_unsigned());
        for id in overdue {
            let expire = |session| async move { self.expire(session, &Which::Only(id)).await };
            match self.store.retrying(Patience::Least, expire).await {
                Ok(Some(expired)) if !expired.ids.is_empty() => {
                    ended += expired.ended;
                    self.held_back().remove(&id);
                }
                // Somebody else holds it, or what it needs.
                Ok(_) => self.held_back().add(id),
                Err(error) if error.is_busy() => self.held_back().add(id),
                Err(error) => return Err(error),
            }
        }
        self.held_back().forget_old();
        Ok(Tick { processed: ended, more, due_in: None })
    }

    /// `None`: it is not known yet for how long nobody could report, so nothing is overdue.
    async fn expire(&self, session: Session, which: &Which<'_>) -> store::Result<Option<Expired>> {
        let mut tx = session.begin(Actor::Loop(Self::NAME)).await?;
        let Some(outages) = outages::known(&mut tx).await? else {
            tx.rollback().await?;
            return Ok(None);
        };
        let locked = match which {
            Which::MostOverdue { but } => lock::timed_out(&mut tx, LIMIT, but).await?,
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
    let (mut decided, mut put_off) = (Vec::new(), Vec::new());
    for task in &locked.tasks {
        if let Some(deadline) = later_deadline(task, outages, locked.moment.now) {
            put_off.push((task.id, deadline));
        }
        if let Ok(Some(transition)) = decide(task, locked.moment) {
            tracing::info!(task.id = %task.id, batch.id = %task.batch_id, run = task.run, event = ?event(task), "task overdue");
            decided.push(transition);
        }
    }
    transitions::apply(tx, &decided, locked.moment).await?;
    if !put_off.is_empty() {
        heartbeat::put_off(tx, &put_off).await?;
    }
    let due_in = lock::next_timeout(tx).await?;
    let ids = locked.tasks.iter().map(|task| task.id).collect();
    Ok(Expired { ids, ended: decided.len() as u64, due_in })
}

/// When a task that is being executed is really overdue, if not yet: its last sign of life has moved its deadline, and
/// time in which nobody could report does not count.
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
