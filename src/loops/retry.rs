//! Moves due tasks into the queue: retries whose delay is over, and tasks whose `run_at` has come.

use std::time::Duration;

use super::runner::{Loop, Tick};
use crate::store::tasks::transitions;
use crate::store::{self, Actor, Patience, Session, Store};
use crate::wake::Hints;

const LIMIT: i64 = 1000;

pub struct Retry {
    pub store: Store,
    pub interval: Duration,
}

impl Loop for Retry {
    const NAME: &'static str = "retry";

    fn interval(&self) -> Duration {
        self.interval
    }

    fn hint(&self) -> Option<Hints> {
        Some(Hints::RETRY)
    }

    async fn tick(&self) -> store::Result<Tick> {
        match self.store.retrying(Patience::Brief, release).await {
            // Another transaction has locked the counters of a batch: defer their changes.
            Err(error) if error.is_busy() => self.store.retrying(Patience::Least, release).await,
            result => result,
        }
    }
}

async fn release(session: Session) -> store::Result<Tick> {
    let mut tx = session.begin(Actor::Loop(Retry::NAME)).await?;
    let processed = transitions::release_due(&mut tx, LIMIT).await?;
    let due_in = transitions::next_release(&mut tx).await?;
    tx.commit().await?;
    Ok(Tick { processed, more: processed >= LIMIT.cast_unsigned(), due_in })
}
