//! One function per verb of the API: open a transaction, lock, let the domain decide, apply, commit.

mod batches;
mod deliveries;
mod retries;
mod tasks;
pub mod together;

use chrono::TimeDelta;
use uuid::Uuid;

use crate::domain::status::Status;
use crate::store::{self, Actor, Store, Tx};

pub use tasks::Created;

/// What the handlers call.
#[derive(Clone, Debug)]
pub struct Service {
    store: Store,
    metadata_bytes: usize,
    stuck_after: TimeDelta,
    actor: Actor,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is no {what} with the id {id}")]
    NotFound { what: &'static str, id: String },
    #[error("{detail}")]
    Conflict { detail: String, status: Option<Status>, run: Option<i32> },
    #[error("Idempotency-Key: was used before with another body")]
    KeyReused,
    #[error("the request is not valid")]
    Invalid(Vec<String>),
    #[error(transparent)]
    Store(#[from] store::Error),
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Service {
    pub fn new(store: Store, metadata_bytes: usize, stuck_after_secs: u64) -> Service {
        Service { store, metadata_bytes, stuck_after: retries::stuck_after(stuck_after_secs), actor: Actor::Api }
    }

    /// The same on behalf of somebody, whom the audit trail then names.
    #[must_use]
    pub fn by(&self, actor: Actor) -> Service {
        Service { actor, ..self.clone() }
    }

    pub fn store(&self) -> &Store {
        &self.store
    }

    async fn begin(&self) -> store::Result<Tx> {
        self.store.begin(self.actor.clone()).await
    }
}

fn no_task(id: Uuid) -> Error {
    Error::NotFound { what: "task", id: id.to_string() }
}

fn no_batch(id: Uuid) -> Error {
    Error::NotFound { what: "batch", id: id.to_string() }
}
