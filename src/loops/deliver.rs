//! Sends the notifications of the outbox: lease, send many at once with no connection held, mark in batches.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use super::runner::{Loop, Tick};
use crate::domain::webhook::{batch_idempotency_key, idempotency_key, notification_body};
use crate::store::outbox::{self, Leased, Sent};
use crate::store::{self, Store};
use crate::wake::Hints;
use crate::webhook::{Call, Client};

const LEASE_LIMIT: usize = 200;
const MARK_LIMIT: usize = 200;

#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub interval: Duration,
    pub concurrency: usize,
    /// How long sending one may take, with everything around it.
    pub lease: Duration,
    pub max_attempts: i32,
    pub retry_base: Duration,
    pub retry_max: Duration,
}

pub struct Deliver {
    store: Store,
    client: Client,
    settings: Settings,
    in_flight: Arc<AtomicUsize>,
    tracker: TaskTracker,
    results: mpsc::UnboundedSender<Sent>,
}

impl Deliver {
    pub fn new(store: Store, client: Client, settings: Settings) -> (Deliver, Marks) {
        let (results, incoming) = mpsc::unbounded_channel();
        let in_flight = Arc::new(AtomicUsize::new(0));
        let marks = Marks { store: store.clone(), in_flight: Arc::clone(&in_flight), incoming };
        (Deliver { store, client, settings, in_flight, tracker: TaskTracker::new(), results }, marks)
    }

    /// The sends under way, to wait for at the end.
    pub fn tracker(&self) -> TaskTracker {
        self.tracker.clone()
    }

    /// Sends whose results are not written yet.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire)
    }

    fn send(&self, delivery: Leased) {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        let (client, results, settings) = (self.client.clone(), self.results.clone(), self.settings);
        self.tracker.spawn(async move {
            let sent = send(&client, &delivery, &settings).await;
            let _ = results.send(sent);
        });
    }
}

impl Loop for Deliver {
    const NAME: &'static str = "delivery";

    fn interval(&self) -> Duration {
        self.settings.interval
    }

    fn hint(&self) -> Option<Hints> {
        Some(Hints::DELIVER)
    }

    async fn tick(&self) -> store::Result<Tick> {
        let room = self.settings.concurrency.saturating_sub(self.in_flight());
        if room == 0 {
            return Ok(Tick::default());
        }
        let limit = room.min(LEASE_LIMIT);
        let leased = outbox::lease(&self.store, i64::try_from(limit).unwrap_or(i64::MAX), self.settings.lease).await?;
        let processed = leased.len();
        for delivery in leased {
            self.send(delivery);
        }
        let due_in = outbox::next_due(&self.store).await?;
        Ok(Tick { processed: processed as u64, more: processed == limit, due_in })
    }
}

async fn send(client: &Client, delivery: &Leased, settings: &Settings) -> Sent {
    let idempotency_key = match delivery.task_id {
        Some(task) => idempotency_key(task, &delivery.trigger, &delivery.condition, delivery.run),
        None => batch_idempotency_key(delivery.batch_id, delivery.run),
    };
    let answer = client
        .call(Call {
            action: &delivery.action,
            body: Some(notification_body(delivery.action.params.body.clone(), delivery.state.clone())),
            trigger: &delivery.trigger,
            idempotency_key,
            task: delivery.task_id.map(|id| (id, delivery.run)),
            attempt: delivery.state["attempt"].as_i64(),
            trace: delivery.task_id.unwrap_or(delivery.batch_id),
        })
        .await;
    let (status, error) = match answer {
        Ok(answer) => (Some(answer.status), None),
        Err(error) => (error.status, Some(error.message)),
    };
    let again_in = (delivery.attempts < settings.max_attempts).then(|| backoff(delivery.attempts, settings));
    if let Some(error) = &error {
        let exhausted = again_in.is_none();
        let (id, attempts) = (delivery.id, delivery.attempts);
        tracing::warn!(delivery.id = id, task.id = delivery.task_id.map(tracing::field::display), batch.id = %delivery.batch_id, attempts, exhausted,
            error, "notification not delivered");
    }
    Sent { id: delivery.id, attempts: delivery.attempts, status, error, again_in }
}

/// Doubling from the base, capped, with up to a tenth of jitter so that a receiver that comes back is not flooded.
fn backoff(attempts: i32, settings: &Settings) -> Duration {
    let doublings = u32::try_from(attempts - 1).unwrap_or(0).min(31);
    let delay = settings.retry_base.saturating_mul(1 << doublings).min(settings.retry_max);
    delay.mul_f64(rand::random_range(1.0..1.1))
}

/// Writes what came of the sends, many in one statement.
pub struct Marks {
    store: Store,
    in_flight: Arc<AtomicUsize>,
    incoming: mpsc::UnboundedReceiver<Sent>,
}

impl Marks {
    pub async fn run(mut self) {
        while self.write_some().await {}
    }

    /// Waits for results and writes what has come; false when no more can come.
    pub async fn write_some(&mut self) -> bool {
        let mut sent = Vec::with_capacity(MARK_LIMIT);
        let count = self.incoming.recv_many(&mut sent, MARK_LIMIT).await;
        if count == 0 {
            return false;
        }
        let mut wait = Duration::from_millis(50);
        while let Err(error) = outbox::mark(&self.store, &sent).await {
            if !error.is_unavailable() {
                tracing::error!(%error, results = count, "results of notifications are lost: they will be sent again");
                break;
            }
            tracing::warn!(%error, results = count, "results of notifications are not written yet");
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(Duration::from_secs(2));
        }
        self.in_flight.fetch_sub(count, Ordering::AcqRel);
        self.store.wake().here(Hints::DELIVER);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_up_to_its_limit() {
        let settings = Settings {
            interval: Duration::from_secs(1),
            concurrency: 1,
            lease: Duration::from_secs(1),
            max_attempts: 12,
            retry_base: Duration::from_secs(1),
            retry_max: Duration::from_secs(300),
        };
        for (attempts, secs) in [(1, 1), (2, 2), (3, 4), (9, 256), (10, 300), (1000, 300)] {
            let delay = backoff(attempts, &settings);
            let low = Duration::from_secs(secs);
            assert!(delay >= low && delay <= low.mul_f64(1.1), "{attempts}: {delay:?}");
        }
    }
}
