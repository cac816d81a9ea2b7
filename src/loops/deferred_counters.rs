//! Merges the deferred counter changes of batches whose counters another transaction had locked.

use std::time::Duration;

use uuid::Uuid;

use super::runner::{Loop, Tick};
use crate::store::tx::deferred::{self, Merged};
use crate::store::{self, Patience, Session, Store};
use crate::wake::Hints;

pub struct Counters {
    pub store: Store,
}

impl Loop for Counters {
    const NAME: &'static str = "counters";

    fn interval(&self) -> Duration {
        Duration::from_secs(1)
    }

    fn hint(&self) -> Option<Hints> {
        Some(Hints::COUNTERS)
    }

    async fn tick(&self) -> store::Result<Tick> {
        let (mut processed, mut left, mut after) = (0, false, Some(Uuid::nil()));
        while let Some(from) = after {
            let merge = |session: Session| async move { deferred::merge(&session, from).await };
            let done = match self.store.retrying(Patience::Least, merge).await {
                Err(error) if error.is_busy() => Merged { left: true, ..Merged::default() },
                result => result?,
            };
            processed += done.batches;
            left |= done.left;
            after = done.last;
        }
        Ok(Tick { processed, more: false, due_in: left.then_some(0.1) })
    }
}
