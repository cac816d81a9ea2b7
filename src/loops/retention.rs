//! What is old goes, a chunk at a tick: finished batches, if they are not to be kept, keys of requests that nobody
//! will repeat any more, slots that nobody occupies.

use std::time::Duration;

use super::runner::{Loop, Tick};
use crate::store::{self, Store, fairness, idempotency, retention, slots};

const LIMIT: i64 = 5000;

pub struct Retention {
    pub store: Store,
    /// 0 keeps all batches.
    pub days: u32,
    pub idempotency_ttl: Duration,
}

impl Loop for Retention {
    const NAME: &'static str = "retention";

    fn interval(&self) -> Duration {
        Duration::from_secs(60)
    }

    async fn tick(&self) -> store::Result<Tick> {
        let keys = idempotency::forget(&self.store, self.idempotency_ttl, LIMIT).await?;
        let idle = slots::forget_idle(&self.store, LIMIT).await? + fairness::forget_idle(&self.store, LIMIT).await?;
        let mut tasks = 0;
        if self.days > 0 {
            tasks = self.store.retrying(|| retention::delete_finished(&self.store, self.days, LIMIT)).await?;
        }
        let more = keys.max(idle) >= LIMIT.cast_unsigned() || tasks > 0;
        Ok(Tick { processed: keys + idle + tasks, more, due_in: None })
    }
}
