//! The operations of the API, one function each: begin a transaction, lock, let the domain decide, apply, commit.

mod batches;
mod conflict;
mod deliveries;
mod group_commit;
mod reports;
mod retries;
mod tasks;
mod waiting;

use std::sync::Arc;

use chrono::TimeDelta;
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::domain::request::problems::{FieldProblem, ProblemCode};
use crate::store::tasks::heartbeat::Heartbeat;
use crate::store::{self, Actor, Session, Store, Tx};

use group_commit::GroupCommit;

pub use conflict::{Conflict, ConflictCode};
pub use tasks::Created;

/// The operations that handlers call, on behalf of one actor.
#[derive(Clone, Debug)]
pub struct Service {
    store: Store,
    metadata_bytes: usize,
    stuck_after: TimeDelta,
    actor: Actor,
    lanes: Arc<Lanes>,
}

/// The group commit queues. Two lanes keep two cores busy; more lanes mainly add latency. Heartbeats are quick and have
/// one lane: two would only wait for each other at the counters of their batch.
#[derive(Debug)]
struct Lanes {
    changes: GroupCommit<reports::Change, Option<reports::Done>>,
    heartbeats: GroupCommit<Heartbeat, bool>,
    /// Heartbeats of tasks that occupy slots.
    slot_heartbeats: GroupCommit<Heartbeat, bool>,
    creations: GroupCommit<tasks::Creation, store::tasks::create::StoredBatch>,
    /// Permits to read the answer after a wait.
    answers: Arc<Semaphore>,
}

impl Default for Lanes {
    fn default() -> Lanes {
        Lanes {
            changes: GroupCommit::new(2, 200),
            heartbeats: GroupCommit::new(1, 500),
            slot_heartbeats: GroupCommit::new(1, 500),
            creations: GroupCommit::new(2, 200),
            answers: Arc::new(Semaphore::new(2)),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{} {id} does not exist", what.name())]
    NotFound { what: Resource, id: String },
    #[error("{}", .0.detail)]
    Conflict(Conflict),
    #[error("Idempotency-Key: already used with a different body")]
    KeyReused,
    #[error("{0} requests wait for tasks and batches already; try again later, or without wait_secs")]
    TooManyWaiters(usize),
    #[error("invalid request")]
    Invalid(Vec<FieldProblem>),
    #[error(transparent)]
    Store(#[from] store::Error),
}

/// What a request names that may not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    Task,
    Batch,
    Delivery,
    RetryPolicy,
}

impl Resource {
    const fn name(self) -> &'static str {
        match self {
            Resource::Task => "task",
            Resource::Batch => "batch",
            Resource::Delivery => "delivery",
            Resource::RetryPolicy => "retry policy",
        }
    }
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Service {
    pub fn new(store: Store, metadata_bytes: usize, stuck_after_secs: u64) -> Service {
        let stuck_after = retries::stuck_after(stuck_after_secs);
        Service { store, metadata_bytes, stuck_after, actor: Actor::Api, lanes: Arc::default() }
    }

    /// Returns the service acting on behalf of `actor`, whom the audit trail names.
    #[must_use]
    pub fn on_behalf_of(&self, actor: Actor) -> Service {
        Service { actor, ..self.clone() }
    }

    pub fn actor(&self) -> &Actor {
        &self.actor
    }

    pub fn store(&self) -> &Store {
        &self.store
    }

    async fn begin(&self, session: &Session) -> store::Result<Tx> {
        session.begin(self.actor.clone()).await
    }
}

fn no_task(id: Uuid) -> Error {
    Error::NotFound { what: Resource::Task, id: id.to_string() }
}

fn no_batch(id: Uuid) -> Error {
    Error::NotFound { what: Resource::Batch, id: id.to_string() }
}

/// The error for a request with one invalid field.
fn invalid(path: &str, code: ProblemCode, message: impl std::fmt::Display) -> Error {
    Error::Invalid(vec![FieldProblem::new(path, code, message)])
}
