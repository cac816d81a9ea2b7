//! A move that one statement made without a decision.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use crate::domain::task::status::Status;
use crate::store::Tx;
use crate::store::ledger::events::Move;

/// A task that one of these statements has moved.
pub(super) struct Moved {
    pub id: Uuid,
    pub batch_id: Uuid,
    pub run: i32,
    pub attempt: i16,
    pub last_updated: DateTime<Utc>,
}

impl Moved {
    /// Reports the move to the transaction.
    pub fn record(&self, tx: &mut Tx, from: Status, to: Status, cause: &'static str, reason: Option<String>) {
        let Moved { id, batch_id, run, attempt, last_updated } = *self;
        tx.moved(id, Move { batch_id, from: Some(from), to, cause, run, attempt, reason }, last_updated);
    }
}
