//! Requests that wait for a change of a task or for the completion of a batch. A commit of this process answers them
//! directly; changes by other instances are found by one statement for all waiting requests. A waiting request holds no
//! connection.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;
use uuid::Uuid;

use super::ledger::events::Trail;
use super::tasks::row::read_status;
use super::{Result, Store};
use crate::domain::task::status::{Status, Until};

/// The most requests that wait at a time in one process. Each holds a connection of its client and a few kilobytes.
pub const MOST_WAITERS: usize = 20_000;

/// The waiting requests of this process. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Waiters(Arc<WaitersInner>);

#[derive(Debug, Default)]
struct WaitersInner {
    /// The number of waiting requests, so that commits do without the lock while there are none.
    count: AtomicUsize,
    waiting: Mutex<Registrations>,
}

#[derive(Debug, Default)]
struct Registrations {
    next: u64,
    tasks: HashMap<Uuid, Vec<Registration>>,
    batches: HashMap<Uuid, Vec<Registration>>,
}

#[derive(Debug)]
struct Registration {
    number: u64,
    until: Until,
    answer: oneshot::Sender<()>,
}

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    Task(Uuid, Until),
    /// The completion of a batch.
    Batch(Uuid),
}

/// A waiting request. Dropping it ends the wait.
#[derive(Debug)]
pub struct Waiter {
    waiters: Waiters,
    awaited: Awaited,
    number: u64,
    answered: oneshot::Receiver<()>,
}

impl Waiter {
    /// Waits until the condition holds or cannot hold any more, as far as this process knows.
    pub async fn answered(&mut self) {
        // The sender is dropped only after it has sent, or with this waiter.
        let _ = (&mut self.answered).await;
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut waiting = self.waiters.lock();
        let (map, id) = waiting.map_of(self.awaited);
        if let Some(list) = map.get_mut(&id) {
            list.retain(|registration| registration.number != self.number);
            if list.is_empty() {
                map.remove(&id);
            }
        }
        drop(waiting);
        self.waiters.0.count.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Registrations {
    fn map_of(&mut self, awaited: Awaited) -> (&mut HashMap<Uuid, Vec<Registration>>, Uuid) {
        match awaited {
            Awaited::Task(id, _) => (&mut self.tasks, id),
            Awaited::Batch(id) => (&mut self.batches, id),
        }
    }
}

impl Waiters {
    fn lock(&self) -> MutexGuard<'_, Registrations> {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of waiting requests.
    pub fn count(&self) -> usize {
        self.0.count.load(Ordering::SeqCst)
    }

    /// Registers a request; `None` if [`MOST_WAITERS`] requests wait already. The caller reads the current state
    /// afterwards: then no change is missed, because a commit looks for waiting requests after it is visible.
    pub fn register(&self, awaited: Awaited) -> Option<Waiter> {
        if self.0.count.fetch_add(1, Ordering::SeqCst) >= MOST_WAITERS {
            self.0.count.fetch_sub(1, Ordering::SeqCst);
            return None;
        }
        let (answer, answered) = oneshot::channel();
        let mut waiting = self.lock();
        waiting.next += 1;
        let number = waiting.next;
        let until = match awaited {
            Awaited::Task(_, until) => until,
            Awaited::Batch(_) => Until::Terminal,
        };
        let (map, id) = waiting.map_of(awaited);
        map.entry(id).or_default().push(Registration { number, until, answer });
        drop(waiting);
        Some(Waiter { waiters: self.clone(), awaited, number, answered })
    }

    /// Answers the requests for which the moves of a committed transaction were awaited.
    pub(super) fn committed(&self, trail: &Trail, completed: &[Uuid]) {
        if self.count() == 0 {
            return;
        }
        let mut waiting = self.lock();
        if !waiting.tasks.is_empty() {
            for (id, to) in trail.moves() {
                answer(&mut waiting.tasks, id, Some(to));
            }
        }
        for id in completed {
            answer(&mut waiting.batches, *id, None);
        }
    }

    /// Returns the awaited tasks, each with the status awaited in the form of the database, if it is a certain one, and
    /// the awaited batches.
    fn awaited(&self) -> (Vec<(Uuid, Option<&'static str>)>, Vec<Uuid>) {
        let waiting = self.lock();
        let mut tasks = Vec::with_capacity(waiting.tasks.len());
        for (id, list) in &waiting.tasks {
            let first = tasks.len();
            for registration in list {
                let awaited = (*id, registration.until.status().map(Status::as_str));
                if !tasks[first..].contains(&awaited) {
                    tasks.push(awaited);
                }
            }
        }
        (tasks, waiting.batches.keys().copied().collect())
    }
}

/// Answers the requests that wait for this task or batch. Without a status, all of them are answered.
fn answer(map: &mut HashMap<Uuid, Vec<Registration>>, id: Uuid, status: Option<Status>) {
    let Some(list) = map.get_mut(&id) else { return };
    let due = |registration: &mut Registration| status.is_none_or(|status| registration.until.is_settled_by(status));
    for registration in list.extract_if(.., due) {
        let _ = registration.answer.send(());
    }
    if list.is_empty() {
        map.remove(&id);
    }
}

impl Store {
    pub fn waiters(&self) -> &Waiters {
        &self.awaiting
    }

    /// Reads the state of everything that requests wait for, and answers the requests whose condition holds or whose
    /// task or batch is gone. Returns the number of answered tasks and batches.
    pub async fn check_awaited(&self) -> Result<u64> {
        let (tasks, batches) = self.awaiting.awaited();
        if tasks.is_empty() && batches.is_empty() {
            return Ok(0);
        }
        let (ids, until): (Vec<Uuid>, Vec<Option<&str>>) = tasks.into_iter().unzip();
        let (moved, completed) = self
            .reading(async |tx| {
                let mut moved = Vec::new();
                if !ids.is_empty() {
                    let rows = sqlx::query!(
                        r#"select u.id as "id!", t.status::text as status
                           from unnest($1::uuid[], $2::text[]) u(id, until) left join task t on t.id = u.id
                           where t.id is null or t.ended_at is not null or u.until::task_status = t.status"#,
                        &ids,
                        &until as &[Option<&str>],
                    )
                    .fetch_all(tx.conn().await?)
                    .await?;
                    for row in rows {
                        moved.push((row.id, row.status.as_deref().map(read_status).transpose()?));
                    }
                }
                let mut completed = Vec::new();
                if !batches.is_empty() {
                    completed = sqlx::query_scalar!(
                        r#"select u.id as "id!" from unnest($1::uuid[]) u(id) left join batch b on b.id = u.id
                           where b.id is null or b.completed_at is not null"#,
                        &batches,
                    )
                    .fetch_all(tx.conn().await?)
                    .await?;
                }
                Ok((moved, completed))
            })
            .await?;
        let mut waiting = self.awaiting.lock();
        for (id, status) in &moved {
            answer(&mut waiting.tasks, *id, *status);
        }
        for id in &completed {
            answer(&mut waiting.batches, *id, None);
        }
        Ok((moved.len() + completed.len()) as u64)
    }

    /// Reads whether a wait is over before it begins: the condition holds or cannot hold any more, or there is no such
    /// task or batch.
    pub async fn is_settled(&self, awaited: Awaited, run: Option<i32>) -> Result<bool> {
        match awaited {
            Awaited::Task(id, until) => {
                let found = super::tasks::details::status_and_run(self, id).await?;
                Ok(found.is_none_or(|(status, current)| {
                    until.is_settled_by(status) || run.is_some_and(|run| run != current)
                }))
            }
            Awaited::Batch(id) => {
                let open = sqlx::query_scalar!("select id from batch where id = $1 and completed_at is null", id);
                let open = self.reading(async |tx| Ok(open.fetch_optional(tx.conn().await?).await?)).await?;
                Ok(open.is_none())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_answered(waiter: &mut Waiter) -> bool {
        waiter.answered.try_recv().is_ok()
    }

    #[test]
    fn requests_are_answered_when_their_condition_is_settled() {
        let (waiters, id) = (Waiters::default(), Uuid::now_v7());
        let mut ended = waiters.register(Awaited::Task(id, Until::Terminal)).unwrap();
        let mut running = waiters.register(Awaited::Task(id, Until::Status(Status::Running))).unwrap();
        let move_to = |status| answer(&mut waiters.lock().tasks, id, Some(status));
        move_to(Status::Claimed);
        assert!(!is_answered(&mut ended) && !is_answered(&mut running));
        move_to(Status::Running);
        assert!(!is_answered(&mut ended) && is_answered(&mut running));
        move_to(Status::Canceled);
        assert!(is_answered(&mut ended));
        drop((ended, running));
        assert_eq!(waiters.count(), 0);
    }

    #[test]
    fn a_dropped_request_leaves_nothing_behind() {
        let (waiters, id) = (Waiters::default(), Uuid::now_v7());
        let kept = waiters.register(Awaited::Batch(id)).unwrap();
        drop(waiters.register(Awaited::Batch(id)));
        assert_eq!((waiters.count(), waiters.lock().batches[&id].len()), (1, 1));
        drop(kept);
        assert!(waiters.count() == 0 && waiters.lock().batches.is_empty());
    }

    #[test]
    fn the_number_of_waiting_requests_is_bounded() {
        let (waiters, id) = (Waiters::default(), Uuid::now_v7());
        let mut all: Vec<Waiter> = (0..MOST_WAITERS).map(|_| waiters.register(Awaited::Batch(id)).unwrap()).collect();
        assert!(waiters.register(Awaited::Batch(id)).is_none());
        answer(&mut waiters.lock().batches, id, None);
        assert!(all.iter_mut().all(is_answered));
        all.pop();
        assert!(waiters.register(Awaited::Batch(id)).is_some());
    }
}
