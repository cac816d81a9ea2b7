//! Calls `on_start` of the queued tasks, in queue order and up to the concurrency limit. The caller never calls a task
//! whose claim this instance has lost. A task whose receiver has no host permit left is set aside, and the others pass
//! it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::answers::StartAnswer;
use super::held::{HeldClaims, MayCall};
use super::lease_keeper::LeaseKeeper;
use super::queue::{CallQueue, QueuedCall};
use crate::domain::request::new_action::read_answered_action;
use crate::domain::webhook::idempotency_key;
use crate::store::tasks::lease::{self, ClaimId};
use crate::store::{Patience, Session, Store};
use crate::telemetry::log_limit::LogLimit;
use crate::wake::Hints;
use crate::webhook::{Call, Client};

/// Calls begun in one pass at most.
const BATCH_LIMIT: usize = 200;
/// The pause before a claim is confirmed again, if another transaction has locked its row or its lease is nearly over.
const CONFIRM_PAUSE: Duration = Duration::from_millis(200);

/// Takes calls from the queue and makes them.
pub struct StartCaller {
    pub(super) store: Store,
    pub(super) client: Client,
    pub(super) lease: Duration,
    pub(super) held: HeldClaims,
    pub(super) queue: CallQueue,
    /// One permit for each concurrent call.
    pub(super) calls: Arc<Semaphore>,
    pub(super) tracker: TaskTracker,
    pub(super) results: mpsc::UnboundedSender<StartAnswer>,
}

impl StartCaller {
    pub fn lease_keeper(&self) -> LeaseKeeper {
        let (store, held, tracker) = (self.store.clone(), self.held.clone(), self.tracker.clone());
        LeaseKeeper { store, held, tracker, lease: self.lease }
    }

    pub async fn run(self, shutdown: CancellationToken) {
        // `LeaseKeeper::drain` returns tasks that were not called to the queue of the database.
        tokio::select! {
            () = self.call_queued() => {}
            () = shutdown.cancelled() => {}
        }
    }

    async fn call_queued(&self) {
        // Calls that cannot be made yet hold none of the permits in `self.calls`.
        let mut set_aside = FuturesUnordered::new();
        loop {
            tokio::select! {
                () = self.queue.not_empty() => {}
                Some(queued) = set_aside.next() => {
                    let mut ready = vec![queued];
                    while let Some(Some(queued)) = set_aside.next().now_or_never() {
                        ready.push(queued);
                    }
                    ready.into_iter().rev().for_each(|queued| self.queue.put_back(queued));
                }
            }
            let Ok(first) = Arc::clone(&self.calls).acquire_owned().await else { return };
            let mut permits = vec![first];
            while permits.len() < self.queue.len().min(BATCH_LIMIT)
                && let Ok(permit) = Arc::clone(&self.calls).try_acquire_owned()
            {
                permits.push(permit);
            }
            let mut batch = Vec::with_capacity(permits.len());
            for mut queued in self.queue.take(permits.len()) {
                queued.host_permit = queued.host_permit.or_else(|| self.client.try_host_permit(&queued.action));
                if queued.host_permit.is_some() {
                    batch.push(queued);
                } else {
                    set_aside.push(self.set_aside(queued, None));
                }
            }
            let busy = self.drop_lost(&batch).await;
            for (queued, permit) in batch.into_iter().zip(permits) {
                let claim = queued.claimed.claim_id();
                match self.held.begin_call(claim, self.lease, busy.contains(&claim)) {
                    MayCall::Yes => self.call(queued, permit),
                    MayCall::NotYet => {
                        let queued = QueuedCall { host_permit: None, ..queued };
                        set_aside.push(self.set_aside(queued, Some(CONFIRM_PAUSE)));
                    }
                    MayCall::No => {}
                }
            }
        }
    }

    /// Keeps a call out of the queue for `pause` or, without one, until it has a host permit.
    fn set_aside(&self, mut queued: QueuedCall, pause: Option<Duration>) -> impl Future<Output = QueuedCall> + use<'_> {
        self.queue.set_aside();
        // The loop may claim another task instead.
        self.store.wake().notify_local(Hints::START);
        async move {
            match pause {
                Some(pause) => tokio::time::sleep(pause).await,
                None => queued.host_permit = Some(self.client.host_permit(&queued.action).await),
            }
            queued
        }
    }

    /// Confirms the claims of a batch, unless all are fresh, and drops those that were canceled or lost to another
    /// instance. One query confirms claims behind the batch as well: under load calls begin one by one, and each would
    /// need its own query. Returns the claims whose rows another transaction has locked.
    async fn drop_lost(&self, batch: &[QueuedCall]) -> HashSet<ClaimId> {
        static LIMIT: LogLimit = LogLimit::new();
        let asked = self.held.to_confirm(batch);
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
                    self.held.update(asked, &kept, Some(at), at + lease / 2);
                    return kept.busy;
                }
                Err(error) => {
                    if let Some(suppressed) = LIMIT.allows() {
                        tracing::warn!(%error, claims = asked.len(), suppressed, "claims not confirmed, calls delayed");
                    }
                }
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(Duration::from_secs(2));
        }
    }

    fn call(&self, queued: QueuedCall, permit: OwnedSemaphorePermit) {
        let (client, results) = (self.client.clone(), self.results.clone());
        let QueuedCall { claimed, mut action, host_permit } = queued;
        let Some(host_permit) = host_permit else { return };
        self.tracker.spawn(async move {
            let body = action.params.body.take().map(String::from);
            let result = client
                .call(
                    Call {
                        action: &action,
                        body,
                        trigger: "start",
                        idempotency_key: idempotency_key(claimed.id, "start", "success", claimed.run, 0),
                        task: Some((claimed.id, claimed.run)),
                        attempt: Some(i64::from(claimed.attempt)),
                        trace: claimed.id,
                    },
                    host_permit,
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
                    // The reason may quote the answer of the receiver.
                    let reason = reason.replace(char::is_control, " ");
                    tracing::warn!(task.id = %claimed.id, batch.id = %claimed.batch_id, run = claimed.run, %reason,
                        "invalid cancel action in the answer to on_start ignored");
                    ignored = Some(reason);
                    None
                }
            });
            let _ = results.send(StartAnswer { claim: claimed.claim_id(), run: claimed.run, result, ignored });
        });
    }
}
