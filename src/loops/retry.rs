//! What has become due goes into the queue: retries, and tasks that were not to run before now.

use std::time::Duration;

use super::runner::{Loop, Tick};
use crate::store::{self, Actor, Store, stats, transitions};
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
        self.store
            .retrying(|| async {
                let mut tx = self.store.begin(Actor::Loop(Self::NAME)).await?;
                let processed = transitions::release_due(&mut tx, LIMIT).await?;
                let due_in = stats::next_release(&mut tx).await?;
                tx.commit().await?;
                Ok(Tick { processed, more: processed >= LIMIT.cast_unsigned(), due_in })
            })
            .await
    }
}
