//! Looks regularly whether the counters agree with the rows. It only tells: `reprise doctor --fix` mends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::runner::{Loop, Tick};
use crate::store::ledger::audit::{self, Extent};
use crate::store::{self, Store};

/// Time for a tick: counting what is alive in a large database takes minutes.
const LIMIT: Duration = Duration::from_secs(15 * 60);
/// The server gives up a little before the loop does, so that it does not go on counting for nobody.
const STATEMENTS: Duration = Duration::from_secs(14 * 60);

pub struct Audit {
    store: Store,
    /// A process that has just begun has other things to do.
    rested: AtomicBool,
}

impl Audit {
    pub fn new(store: Store) -> Audit {
        Audit { store, rested: AtomicBool::new(false) }
    }
}

impl Loop for Audit {
    const NAME: &'static str = "audit";

    fn interval(&self) -> Duration {
        Duration::from_secs(3600)
    }

    fn limit(&self, _: &Store) -> Duration {
        LIMIT
    }

    async fn tick(&self) -> store::Result<Tick> {
        if !self.rested.swap(true, Ordering::Relaxed) {
            return Ok(Tick::default());
        }
        let found = audit::audit(&self.store, Extent::Alive, STATEMENTS).await?;
        for (counter, count) in audit::by_counter(&found) {
            let count = u32::try_from(count).unwrap_or(u32::MAX);
            metrics::gauge!("reprise_counter_differences", "counter" => counter.as_str()).set(count);
        }
        if let Some(first) = found.first() {
            tracing::error!(differences = found.len(), %first, "counters and rows differ: run `reprise doctor`");
        }
        Ok(Tick { processed: found.len() as u64, ..Tick::default() })
    }
}
