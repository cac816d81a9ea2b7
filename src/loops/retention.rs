//! What is old goes, a chunk at a tick: finished batches, if they are not to be kept, keys of requests that nobody
//! will repeat any more, slots that nobody occupies.

use std::time::Duration;

use super::runner::{Loop, Tick};
use crate::store::{self, Patience, Session, Store, fairness, idempotency, matchers, retention, slots};

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
        let (store, days, ttl) = (&self.store, self.days, self.idempotency_ttl);
        let least = Patience::Least;
        let keys = store.retrying(least, |s| async move { idempotency::forget(&s, ttl, LIMIT).await }).await?;
        let mut idle = store.retrying(least, |s| async move { slots::forget_idle(&s, LIMIT).await }).await?;
        idle += store.retrying(least, |s| async move { fairness::forget_idle(&s, LIMIT).await }).await?;
        // Claims that are under way keep it from closing the gate: next time, then.
        match store.retrying(least, |s| async move { matchers::forget_unused(&s).await }).await {
            Err(error) if error.is_busy() => {}
            forgotten => idle += forgotten?,
        }
        let mut tasks = 0;
        if days > 0 {
            let delete = |s: Session| async move { retention::delete_finished(&s, days, LIMIT).await };
            tasks = store.retrying(least, delete).await?;
        }
        let more = keys.max(idle) >= LIMIT.cast_unsigned() || tasks > 0;
        Ok(Tick { processed: keys + idle + tasks, more, due_in: None })
    }
}
