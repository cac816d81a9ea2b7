//! Compares the counters with the rows every hour. The loop only reports differences; `reprise doctor --fix` repairs
//! them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::runner::{Loop, Tick};
use crate::store::ledger::audit::{self, Extent};
use crate::store::{self, Store};

/// The time limit of a tick: counting the alive tasks of a large database takes minutes.
const LIMIT: Duration = Duration::from_secs(15 * 60);
/// The time limit of the statements, which is shorter, so that the server does not keep counting after the loop has
/// given up.
const STATEMENT_LIMIT: Duration = Duration::from_secs(14 * 60);

pub struct Audit {
    store: Store,
    /// Whether the first tick has passed, which does nothing: a process that has just started has more urgent work.
    first_tick_passed: AtomicBool,
}

impl Audit {
    pub fn new(store: Store) -> Audit {
        Audit { store, first_tick_passed: AtomicBool::new(false) }
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
        if !self.first_tick_passed.swap(true, Ordering::Relaxed) {
            return Ok(Tick::default());
        }
        let found = audit::audit(&self.store, Extent::Alive, STATEMENT_LIMIT).await?;
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
