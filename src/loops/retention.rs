//! Deletes old rows, one chunk per tick: finished batches and statistics (unless they are kept forever), expired
//! idempotency keys, and unused slots, fair keys and matchers.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use super::runner::{Loop, Tick};
use crate::store::batches::idempotency;
use crate::store::rules::{fairness, matchers, slots};
use crate::store::{self, Patience, Session, Store, retention};

const LIMIT: i64 = 5000;

pub struct Retention {
    store: Store,
    /// 0 keeps all batches.
    days: u32,
    idempotency_ttl: Duration,
    /// Tasks to delete in one transaction. The number halves when a transaction fails and doubles when one succeeds.
    /// However slow the database is and however many rows belong to a task, some number can be deleted in time.
    chunk: AtomicI64,
}

impl Retention {
    pub fn new(store: Store, days: u32, idempotency_ttl: Duration) -> Retention {
        Retention { store, days, idempotency_ttl, chunk: AtomicI64::new(LIMIT) }
    }

    async fn delete_finished(&self) -> store::Result<retention::Deleted> {
        let chunk = self.chunk.load(Ordering::Relaxed);
        // In advance, because the runner may cancel this tick at its time limit.
        self.chunk.store((chunk / 2).max(1), Ordering::Relaxed);
        let days = self.days;
        let delete = |session: Session| async move { retention::delete_finished(&session, days, chunk).await };
        let deleted = self.store.retrying(Patience::Least, delete).await?;
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
        let (store, days, ttl, least) = (&self.store, self.days, self.idempotency_ttl, Patience::Least);
        let keys = store.retrying(least, |s| async move { idempotency::forget(&s, ttl, LIMIT).await }).await?;
        let mut idle = store.retrying(least, |s| async move { slots::forget_idle(&s, LIMIT).await }).await?;
        idle += store.retrying(least, |s| async move { fairness::forget_idle(&s, LIMIT).await }).await?;
        // Claims in progress hold the claim lock: the next tick tries again.
        match store.retrying(least, |s| async move { matchers::forget_unused(&s).await }).await {
            Err(error) if error.is_busy() || error.is_transient() => {}
            forgotten => idle += forgotten?,
        }
        let (mut deleted, mut stats) = (retention::Deleted::default(), 0);
        if days > 0 {
            deleted = self.delete_finished().await?;
            stats = store.retrying(least, |s| async move { retention::forget_stats(&s, days, LIMIT).await }).await?;
        }
        let more = keys.max(idle).max(stats) >= LIMIT.cast_unsigned() || deleted.more;
        Ok(Tick { processed: keys + idle + deleted.tasks, more, due_in: None })
    }
}
