//! Deletes what is old, a chunk at a tick: finished batches and statistics, if they are not to be kept, keys of requests
//! that nobody will repeat any more, slots that nobody occupies.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use super::runner::{Loop, Tick};
use crate::store::{self, Store, fairness, idempotency, retention, slots};

const LIMIT: i64 = 5000;

pub struct Retention {
    store: Store,
    /// 0 keeps all batches.
    days: u32,
    idempotency_ttl: Duration,
    /// Tasks to delete in a transaction. It halves when one fails and doubles when one succeeds: however slow the
    /// database is and however much hangs on a task, some number can be deleted in time.
    chunk: AtomicI64,
}

impl Retention {
    pub fn new(store: Store, days: u32, idempotency_ttl: Duration) -> Retention {
        Retention { store, days, idempotency_ttl, chunk: AtomicI64::new(LIMIT) }
    }

    async fn delete_finished(&self) -> store::Result<retention::Deleted> {
        let chunk = self.chunk.load(Ordering::Relaxed);
        // It may be broken off as well as fail.
        self.chunk.store((chunk / 2).max(1), Ordering::Relaxed);
        let deleted = self.store.retrying(|| retention::delete_finished(&self.store, self.days, chunk)).await?;
        self.chunk.store(chunk.saturating_mul(2).min(LIMIT), Ordering::Relaxed);
        Ok(deleted)
    }
}

impl Loop for Retention {
    const NAME: &'static str = "retention";

    fn interval(&self) -> Duration {
        Duration::from_secs(60)
    }

    async fn tick(&self) -> store::Result<Tick> {
        let keys = idempotency::forget(&self.store, self.idempotency_ttl, LIMIT).await?;
        let idle = slots::forget_idle(&self.store, LIMIT).await? + fairness::forget_idle(&self.store, LIMIT).await?;
        let (mut deleted, mut stats) = (retention::Deleted::default(), 0);
        if self.days > 0 {
            deleted = self.delete_finished().await?;
            stats = self.store.retrying(|| retention::forget_stats(&self.store, self.days, LIMIT)).await?;
        }
        let more = keys.max(idle).max(stats) >= LIMIT.cast_unsigned() || deleted.more;
        Ok(Tick { processed: keys + idle + deleted.tasks, more, due_in: None })
    }
}
