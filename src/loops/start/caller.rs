//! The calls of `on_start`: in the order of the queue, as many at once as may be, and never for a task that is no
//! longer ours. A task whose receiver is at its limit stands aside and lets the others pass. While a claimed task waits
//! its lease is renewed.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::answers::Answered;
use super::held::HeldClaims;
use super::lease::Keeper;
use super::queue::{CallQueue, QueuedCall};
use crate::domain::request::new_action::read_answered_action;
use crate::domain::webhook::idempotency_key;
use crate::store::tasks::lease::{self, ClaimId};
use crate::store::{Patience, Session, Store};
use crate::telemetry::log_limit::LogLimit;
use crate::wake::Hints;
use crate::webhook::{Call, Client};

/// Calls begun together at most.
const AT_ONCE: usize = 200;
/// A claim whose row somebody else holds is looked at again after this.
const AGAIN: Duration = Duration::from_millis(200);

pub struct StartCaller {
    pub(super) store: Store,
    pub(super) client: Client,
    pub(super) lease: Duration,
    pub(super) held: HeldClaims,
    pub(super) queue: CallQueue,
    pub(super) calls: Arc<Semaphore>,
    pub(super) tracker: TaskTracker,
    pub(super) results: mpsc::UnboundedSender<Answered>,
}

impl StartCaller {
    pub fn keeper(&self) -> Keeper {
        Keeper { store: self.store.clone(), held: self.held.clone(), tracker: self.tracker.clone(), lease: self.lease }
    }

    pub async fn run(self, shutdown: CancellationToken) {
        // What is dropped here has not been called and goes back into the queue of the database.
        tokio::select! {
            () = self.call_for_ever() => {}
            () = shutdown.cancelled() => {}
        }
    }

    async fn call_for_ever(&self) {
        // A free place among all calls is not kept for one that cannot be made yet.
        let mut aside = FuturesUnordered::new();
        loop {
            tokio::select! {
                () = self.queue.not_empty() => {}
                Some(queued) = aside.next() => {
                    let mut ready = vec![queued];
                    while let Some(Some(queued)) = aside.next().now_or_never() {
                        ready.push(queued);
                    }
                    ready.into_iter().rev().for_each(|queued| self.queue.come_back(queued));
                }
            }
            let Ok(first) = Arc::clone(&self.calls).acquire_owned().await else { return };
            let mut permits = vec![first];
            while permits.len() < self.queue.len().min(AT_ONCE)
                && let Ok(permit) = Arc::clone(&self.calls).try_acquire_owned()
            {
                permits.push(permit);
            }
            let mut batch = Vec::with_capacity(permits.len());
            for mut queued in self.queue.take(permits.len()) {
                queued.place = queued.place.or_else(|| self.client.try_place(&queued.action));
                if queued.place.is_some() {
                    batch.push(queued);
                } else {
                    aside.push(self.later(queued, None));
                }
            }
            let busy = self.drop_lost(&batch).await;
            for (queued, permit) in batch.into_iter().zip(permits) {
                let claim = queued.claimed.claim_id();
                match self.held.about_to_call(claim, self.lease, busy.contains(&claim)) {
                    Some(true) => self.call(queued, permit),
                    // Whether it is still ours is not known, or not for long enough.
                    Some(false) => aside.push(self.later(QueuedCall { place: None, ..queued }, Some(AGAIN))),
                    None => {}
                }
            }
        }
    }

    /// Stands aside until its receiver has a place for it, or for a while.
    fn later(&self, mut queued: QueuedCall, pause: Option<Duration>) -> impl Future<Output = QueuedCall> + use<'_> {
        self.queue.step_aside();
        // There is room for others now.
        self.store.wake().notify_local(Hints::START);
        async move {
            match pause {
                Some(pause) => tokio::time::sleep(pause).await,
                None => queued.place = Some(self.client.place(&queued.action).await),
            }
            queued
        }
    }

    /// Asks the database if some of them have waited: what was canceled, or lost to another instance, is not called.
    /// Those behind them are asked about as well. Under load calls begin one by one, and each would have to ask. Answers
    /// of which it cannot be known, because somebody else holds them.
    async fn drop_lost(&self, batch: &[QueuedCall]) -> HashSet<ClaimId> {
        static LIMIT: LogLimit = LogLimit::new();
        let asked = self.held.doubtful(batch);
        if asked.is_empty() {
            return HashSet::new();
        }
        let (asked, lease) = (asked.as_slice(), self.lease);
        let confirm = |session: Session| async move { lease::confirm(&session, asked, lease).await };
        let mut wait = Duration::from_millis(50);
        loop {
            let at = Instant::now();
            match self.store.retrying(Patience::Brief, confirm).await {
                Ok(kept) => {
                    self.held.keep(asked, &kept, Some(at), at + lease / 2);
                    return kept.busy;
                }
                Err(error) => {
                    if let Some(suppressed) = LIMIT.allows() {
                        tracing::warn!(%error, suppressed, "nothing is called: it is not known whether it may be");
                    }
                }
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(Duration::from_secs(2));
        }
    }

    fn call(&self, queued: QueuedCall, permit: OwnedSemaphorePermit) {
        let (client, results) = (self.client.clone(), self.results.clone());
        let QueuedCall { claimed, mut action, place, .. } = queued;
        let Some(place) = place else { return };
        self.tracker.spawn(async move {
            let body = action.params.body.take().map(String::from);
            let result = client
                .call(
                    Call {
                        action: &action,
                        body,
                        trigger: "start",
                        idempotency_key: idempotency_key(claimed.id, "start", "success", claimed.run),
                        task: Some((claimed.id, claimed.run)),
                        attempt: Some(i64::from(claimed.attempt)),
                        trace: claimed.id,
                    },
                    place,
                )
                .await;
            drop(permit);
            if let Err(error) = &result {
                tracing::info!(task.id = %claimed.id, batch.id = %claimed.batch_id, run = claimed.run, %error,
                    "on_start failed");
            }
            let mut ignored = None;
            let result = result.map(|answer| match read_answered_action(&answer.body) {
                Ok(action) => action,
                Err(reason) => {
                    // It may name what the receiver sent.
                    let reason = reason.replace(char::is_control, " ");
                    tracing::warn!(task.id = %claimed.id, batch.id = %claimed.batch_id, run = claimed.run, %reason,
                        "the cancel action in the answer to on_start is not valid and ignored");
                    ignored = Some(reason);
                    None
                }
            });
            let _ = results.send(Answered { claim: claimed.claim_id(), run: claimed.run, result, ignored });
        });
    }
}
