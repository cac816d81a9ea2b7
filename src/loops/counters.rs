//! Settles the counters of batches that were put aside while somebody else held them.

use std::time::Duration;

use super::runner::{Loop, Tick};
use crate::store::{self, Patience, Session, Store, deferred};
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
        let together = |session: Session| async move { deferred::bring_together(&session).await };
        let (processed, left) = match self.store.retrying(Patience::Least, together).await {
            Err(error) if error.is_busy() => (0, true),
            result => result?,
        };
        Ok(Tick { processed, more: false, due_in: left.then_some(0.1) })
    }
}
