//! Finished batches go after their time, a chunk at a tick.

use std::time::Duration;

use super::runner::{Loop, Tick};
use crate::store::{self, Store, retention, retrying};

const LIMIT: i64 = 5000;

pub struct Retention {
    pub store: Store,
    /// Never 0 here: without a limit of days the loop is not run.
    pub days: u32,
}

impl Loop for Retention {
    const NAME: &'static str = "retention";

    fn interval(&self) -> Duration {
        Duration::from_secs(60)
    }

    async fn tick(&self) -> store::Result<Tick> {
        let processed = retrying(|| retention::delete_finished(&self.store, self.days, LIMIT)).await?;
        Ok(Tick { processed, more: processed > 0, due_in: None })
    }
}
