//! Answers requests that wait for a task or a batch which another instance has changed: one statement looks at all of
//! them. While no request waits, the loop sleeps and runs no statement.

use std::time::Duration;

use super::runner::{Loop, Tick};
use crate::store::{self, Store};
use crate::wake::Hints;

/// The pause between two looks while up to [`FEW`] requests wait.
const SHORT: Duration = Duration::from_millis(250);
/// The pause while more requests wait: the statement takes longer.
const LONG: Duration = Duration::from_secs(1);
const FEW: usize = 1000;
/// The sleep while no request waits. The first that does wakes the loop.
const IDLE: Duration = Duration::from_secs(3600);

pub struct CheckWaiters {
    pub store: Store,
}

impl Loop for CheckWaiters {
    const NAME: &'static str = "waiters";

    fn interval(&self) -> Duration {
        match self.store.waiters().count() {
            0 => IDLE,
            1..=FEW => SHORT,
            _ => LONG,
        }
    }

    fn hint(&self) -> Option<Hints> {
        Some(Hints::WAITERS)
    }

    async fn tick(&self) -> store::Result<Tick> {
        Ok(Tick { processed: self.store.check_awaited().await?, ..Tick::default() })
    }
}
