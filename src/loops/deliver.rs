//! Sends the notifications of the outbox: leases them, sends many concurrently without a database connection, and
//! writes the results in batches. A notification that waits for a host permit lets the others pass, and is postponed
//! before its lease ends.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};
use tokio_util::task::TaskTracker;

use super::runner::{Loop, Tick};
use crate::domain::webhook::{batch_idempotency_key, idempotency_key, notification_body};
use crate::store::outbox;
use crate::store::outbox::delivery::{Leased, Postponed, Sent};
use crate::store::{self, Actor, Patience, Session, Store};
use crate::telemetry::log_limit::LogLimit;
use crate::wake::Hints;
use crate::webhook::{Call, Client, HostPermit};

/// Notifications leased by one transaction at most.
const LEASE_LIMIT: usize = 200;
/// Results written by one statement at most.
const WRITE_LIMIT: usize = 200;
/// Bytes of all notifications in flight above which the loop leases nothing more.
const IN_FLIGHT_BYTES: usize = 32 * 1024 * 1024;
/// The longest pause before a result is written again, if another transaction has locked its notification.
const WRITE_PAUSE: Duration = Duration::from_millis(200);
/// Notifications that may wait for a host permit in addition to the sendable ones, as a multiple of the concurrency.
const WAITING_FACTOR: usize = 8;

#[derive(Clone, Copy, Debug)]
pub struct DeliverySettings {
    pub interval: Duration,
    pub concurrency: usize,
    /// How long a notification stays leased: longer than sending it and writing the result may take.
    pub lease: Duration,
    /// How long a notification may wait for its permits, well within its lease.
    pub patience: Duration,
    pub max_attempts: i32,
    pub retry_base: Duration,
    pub retry_max: Duration,
}

pub struct Deliver {
    store: Store,
    client: Client,
    settings: DeliverySettings,
    in_flight: Arc<AtomicUsize>,
    /// Bytes of memory that the notifications in flight take.
    bytes: Arc<AtomicUsize>,
    /// Notifications in flight that wait for a host permit.
    waiting: Arc<AtomicUsize>,
    /// One permit for each concurrent call.
    calls: Arc<Semaphore>,
    tracker: TaskTracker,
    results: mpsc::UnboundedSender<DeliveryResult>,
}

enum DeliveryResult {
    Sent(Sent),
    NotSent(Postponed),
}

impl Deliver {
    pub fn new(store: Store, client: Client, settings: DeliverySettings) -> (Deliver, ResultWriter) {
        let (results, incoming) = mpsc::unbounded_channel();
        let in_flight = Arc::new(AtomicUsize::new(0));
        let writer =
            ResultWriter { store: store.clone(), in_flight: Arc::clone(&in_flight), incoming, unwritten: Vec::new() };
        let bytes = Arc::default();
        let (waiting, calls) = (Arc::default(), Arc::new(Semaphore::new(settings.concurrency)));
        let tracker = TaskTracker::new();
        (Deliver { store, client, settings, in_flight, bytes, waiting, calls, tracker, results }, writer)
    }

    /// Returns the tracker of the sends in progress, which the shutdown waits for.
    pub fn tracker(&self) -> TaskTracker {
        self.tracker.clone()
    }

    /// Returns the number of leased notifications whose results are not written yet.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire)
    }

    fn send(&self, delivery: Leased) {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        self.bytes.fetch_add(delivery.bytes, Ordering::AcqRel);
        let bytes = Arc::clone(&self.bytes);
        let (client, results, settings) = (self.client.clone(), self.results.clone(), self.settings);
        let (calls, waiting) = (Arc::clone(&self.calls), Arc::clone(&self.waiting));
        let host_permit = client.try_host_permit(&delivery.action);
        let waits = host_permit.is_none();
        if waits {
            waiting.fetch_add(1, Ordering::AcqRel);
        }
        self.tracker.spawn(async move {
            let permits = tokio::time::timeout(settings.patience, async {
                let host_permit = match host_permit {
                    Some(host_permit) => host_permit,
                    None => client.host_permit(&delivery.action).await,
                };
                (host_permit, calls.acquire().await)
            })
            .await;
            if waits {
                waiting.fetch_sub(1, Ordering::AcqRel);
            }
            let result = match permits {
                Ok((host_permit, _call_permit)) => {
                    DeliveryResult::Sent(send(&client, &delivery, &settings, host_permit).await)
                }
                Err(_) => DeliveryResult::NotSent(postponed(&delivery, settings.patience)),
            };
            bytes.fetch_sub(delivery.bytes, Ordering::AcqRel);
            let _ = results.send(result);
        });
    }

    /// Returns how many more notifications may be in flight.
    fn room(&self) -> usize {
        let concurrency = self.settings.concurrency;
        let waiting = self.waiting.load(Ordering::Acquire).min(concurrency * WAITING_FACTOR);
        (concurrency + waiting).saturating_sub(self.in_flight())
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
        let room = self.room();
        if room == 0 || self.bytes.load(Ordering::Acquire) > IN_FLIGHT_BYTES {
            return Ok(Tick::default());
        }
        let limit = room.min(LEASE_LIMIT);
        let lease = |session: Session| async move {
            let mut tx = session.begin_lease(Actor::Loop(Self::NAME)).await?;
            let count = i64::try_from(limit).unwrap_or(i64::MAX);
            let (leased, more) = outbox::delivery::lease(&mut tx, count, self.settings.lease).await?;
            let due_in = outbox::delivery::next_due(&mut tx).await?;
            tx.commit().await?;
            Ok((leased, more, due_in))
        };
        let (leased, more, due_in) = self.store.retrying(Patience::Brief, lease).await?;
        let processed = leased.len();
        for delivery in leased {
            self.send(delivery);
        }
        Ok(Tick { processed: processed as u64, more, due_in })
    }
}

/// Postpones a notification that got no permit in time. This is not an attempt, because the receiver did not fail. The
/// delay is longer than the wait was, so that the notifications behind it are sent first.
fn postponed(delivery: &Leased, patience: Duration) -> Postponed {
    let again_in = patience.mul_f64(rand::random_range(2.0..6.0));
    Postponed { id: delivery.id, attempts: delivery.attempts, again_in }
}

async fn send(client: &Client, delivery: &Leased, settings: &DeliverySettings, host_permit: HostPermit) -> Sent {
    let idempotency_key = match delivery.task_id {
        Some(task) => idempotency_key(task, &delivery.trigger, &delivery.condition, delivery.run, delivery.position),
        None => batch_idempotency_key(delivery.batch_id, delivery.run, delivery.position),
    };
    let answer = client
        .call(
            Call {
                action: &delivery.action,
                body: Some(notification_body(delivery.action.params.body.as_ref(), &delivery.state)),
                trigger: &delivery.trigger,
                idempotency_key,
                task: delivery.task_id.map(|id| (id, delivery.run)),
                attempt: delivery.attempt,
                trace: delivery.task_id.unwrap_or(delivery.batch_id),
            },
            host_permit,
        )
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

/// Returns a delay that doubles from `retry_base` up to `retry_max`, with up to a tenth of jitter so that a receiver
/// that recovers is not flooded.
fn backoff(attempts: i32, settings: &DeliverySettings) -> Duration {
    let doublings = u32::try_from(attempts - 1).unwrap_or(0).min(31);
    let delay = settings.retry_base.saturating_mul(1 << doublings).min(settings.retry_max);
    delay.mul_f64(rand::random_range(1.0..1.1))
}

/// Writes the results of the sends, many in one statement.
pub struct ResultWriter {
    store: Store,
    in_flight: Arc<AtomicUsize>,
    incoming: mpsc::UnboundedReceiver<DeliveryResult>,
    /// Results of notifications that another transaction has locked.
    unwritten: Vec<Sent>,
}

impl ResultWriter {
    /// Runs until all senders are dropped and all results are written.
    pub async fn run(mut self) {
        while self.write_some().await {}
    }

    /// Waits for results and writes those that have arrived. Returns false when no more can arrive.
    pub async fn write_some(&mut self) -> bool {
        static LIMIT: LogLimit = LogLimit::new();
        let mut results = Vec::with_capacity(WRITE_LIMIT);
        let receiving = self.incoming.recv_many(&mut results, WRITE_LIMIT);
        let count = if self.unwritten.is_empty() {
            receiving.await
        } else {
            // Write the unwritten results together with the next ones, or after the pause.
            match tokio::time::timeout(WRITE_PAUSE, receiving).await {
                Ok(0) => {
                    tokio::time::sleep(WRITE_PAUSE).await;
                    0
                }
                Ok(count) => count,
                Err(_) => 0,
            }
        };
        if count == 0 && self.unwritten.is_empty() {
            return false;
        }
        let (mut sent, mut not_sent) = (std::mem::take(&mut self.unwritten), Vec::new());
        for result in results {
            match result {
                DeliveryResult::Sent(one) => sent.push(one),
                DeliveryResult::NotSent(one) => not_sent.push(one),
            }
        }
        if !not_sent.is_empty()
            && let Err(error) = self.postpone(&not_sent).await
        {
            // They become due again when their leases end.
            tracing::warn!(%error, count = not_sent.len(), "notifications not postponed");
        }
        let mut wait = Duration::from_millis(50);
        while !sent.is_empty() {
            let error = match self.mark(&sent).await {
                Ok(busy) => {
                    self.unwritten = sent.into_iter().filter(|one| busy.contains(&one.id)).collect();
                    break;
                }
                Err(error) => error,
            };
            if !error.is_unavailable() && !error.is_transient() && !error.is_busy() {
                // The notifications are sent again when their leases end.
                tracing::error!(%error, results = sent.len(), "results of notifications lost");
                break;
            }
            if let Some(suppressed) = LIMIT.allows() {
                tracing::warn!(%error, results = sent.len(), suppressed, "results of notifications not written yet");
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(Duration::from_secs(2));
        }
        self.in_flight.fetch_sub(count, Ordering::AcqRel);
        self.store.wake().notify_local(Hints::DELIVER);
        true
    }

    async fn mark(&self, sent: &[Sent]) -> store::Result<HashSet<i64>> {
        let mark = |session: Session| async move { outbox::delivery::mark(&session, sent).await };
        self.store.retrying(Patience::Brief, mark).await
    }

    async fn postpone(&self, not_sent: &[Postponed]) -> store::Result<()> {
        let postpone = |session: Session| async move { outbox::delivery::postpone(&session, not_sent).await };
        self.store.retrying(Patience::Brief, postpone).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_up_to_its_limit() {
        let settings = DeliverySettings {
            interval: Duration::from_secs(1),
            concurrency: 1,
            lease: Duration::from_secs(1),
            patience: Duration::from_secs(1),
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
