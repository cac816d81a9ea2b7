//! The calls of `on_start`: in the order of the queue, as many at once as may be, and never for a task that is no
//! longer ours. A task whose receiver is at its limit stands aside and lets the others pass. While a claimed task waits
//! its lease is renewed.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::Start;
use super::answers::Answered;
use crate::domain::request::new_action::read_answered_action;
use crate::domain::webhook::{Action, idempotency_key};
use crate::loops::runner::Loop;
use crate::store::tasks::lease::{self, ClaimId, Kept};
use crate::store::tasks::transitions::{self, Claimed};
use crate::store::{self, Actor, Patience, Session, Store};
use crate::telemetry::log_limit::LogLimit;
use crate::wake::Hints;
use crate::webhook::{Call, Client, HostPermit};

/// Calls begun together at most.
const AT_ONCE: usize = 200;
/// Claims looked at again together at most.
const ASKED: usize = 500;
/// A claim that is older than this may have been canceled meanwhile: it is looked at again before the call.
const FRESH: Duration = Duration::from_millis(10);
/// A claim whose row somebody else holds is looked at again after this.
const AGAIN: Duration = Duration::from_millis(200);

/// A claimed task and what to call for it.
pub(super) struct QueuedCall {
    pub claimed: Claimed,
    pub action: Action,
    /// Among the calls to its receiver, once it has one.
    pub place: Option<HostPermit>,
}

/// Claimed tasks in the order in which they are to be called.
#[derive(Clone, Default)]
pub(super) struct CallQueue(Arc<CallQueueInner>);

#[derive(Default)]
struct CallQueueInner {
    waiting: Mutex<VecDeque<QueuedCall>>,
    added: Notify,
    /// How many stand aside until their receiver has a place for them.
    aside: AtomicUsize,
}

impl CallQueue {
    pub fn push(&self, queued: QueuedCall) {
        self.waiting().push_back(queued);
        self.0.added.notify_one();
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<QueuedCall>> {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn len(&self) -> usize {
        self.waiting().len()
    }

    fn take(&self, count: usize) -> Vec<QueuedCall> {
        let mut waiting = self.waiting();
        let count = count.min(waiting.len());
        waiting.drain(..count).collect()
    }

    pub fn aside(&self) -> usize {
        self.0.aside.load(Ordering::Acquire)
    }

    fn step_aside(&self) {
        self.0.aside.fetch_add(1, Ordering::AcqRel);
    }

    /// It has been its turn before: it is the next one.
    fn come_back(&self, queued: QueuedCall) {
        self.0.aside.fetch_sub(1, Ordering::AcqRel);
        self.waiting().push_front(queued);
    }

    async fn not_empty(&self) {
        while self.len() == 0 {
            self.0.added.notified().await;
        }
    }
}

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
        self.store.wake().here(Hints::START);
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

/// Keeps the leases of what is held, and gives back at the end what was not started.
pub struct Keeper {
    store: Store,
    held: HeldClaims,
    tracker: TaskTracker,
    lease: Duration,
}

impl Keeper {
    /// Renews at a third of the lease, so that one lost renewal does no harm.
    pub async fn run(&self, shutdown: CancellationToken) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(self.lease / 3) => {}
                () = shutdown.cancelled() => return,
            }
            if let Err(error) = self.renew().await {
                tracing::warn!(%error, "leases were not renewed");
            }
        }
    }

    pub async fn renew(&self) -> store::Result<()> {
        let held = self.held.all();
        if held.is_empty() {
            return Ok(());
        }
        let (held, lease, at) = (held.as_slice(), self.lease, Instant::now());
        let renew = |session: Session| async move { lease::renew(&session, held, lease).await };
        let kept = self.store.retrying(Patience::Brief, renew).await?;
        self.held.keep(held, &kept, None, at + lease);
        Ok(())
    }

    /// Ends in good order, once the loop and the caller have ended: what was not called goes back into the queue, and
    /// the calls under way get `grace` to be answered. Their leases are still renewed meanwhile.
    pub async fn drain(&self, grace: Duration) {
        let unstarted = self.held.drop_uncalled();
        if !unstarted.is_empty() {
            let unstarted = unstarted.as_slice();
            let write = |session: Session| async move {
                let mut tx = session.begin(Actor::Loop(Start::NAME)).await?;
                let count = transitions::give_back(&mut tx, unstarted).await?;
                tx.commit().await?;
                Ok(count)
            };
            let given_back = match self.store.retrying(Patience::Brief, write).await {
                Err(error) if error.is_busy() => self.store.retrying(Patience::Least, write).await,
                result => result,
            };
            match given_back {
                Ok(count) => tracing::info!(count, "unstarted tasks given back"),
                Err(error) => tracing::warn!(%error, "unstarted tasks not given back: their leases will end"),
            }
        }
        self.tracker.close();
        let waiting = async {
            let renewing = async {
                loop {
                    tokio::time::sleep(self.lease / 3).await;
                    let _ = self.renew().await;
                }
            };
            tokio::select! {
                () = self.tracker.wait() => {}
                () = renewing => {}
            }
        };
        if tokio::time::timeout(grace, waiting).await.is_err() {
            tracing::warn!(calls = self.tracker.len(), "calls are still unanswered: their leases will end");
        }
    }
}

/// What was claimed here and has no written result yet.
#[derive(Clone, Default)]
pub(super) struct HeldClaims(Arc<Mutex<HashMap<Uuid, HeldClaim>>>);

#[derive(Clone, Copy)]
struct HeldClaim {
    /// The number of the claim.
    claim: i32,
    /// When it was last known to be ours.
    known: Instant,
    /// Until when it is so at least, by the clock of this machine.
    until: Instant,
    /// Its webhook has been called: from here on only the answer ends it.
    called: bool,
    /// How much of it is held in memory.
    bytes: usize,
}

impl HeldClaims {
    fn map(&self) -> MutexGuard<'_, HashMap<Uuid, HeldClaim>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn len(&self) -> usize {
        self.map().len()
    }

    pub fn bytes(&self) -> usize {
        self.map().values().map(|holding| holding.bytes).sum()
    }

    pub fn take(&self, claimed: &Claimed, known: Instant, until: Instant) {
        let holding = HeldClaim { claim: claimed.claim, known, until, called: false, bytes: claimed.bytes };
        self.map().insert(claimed.id, holding);
    }

    /// If it is not certain that all of these are still ours: which to ask about. With them go others that are still to
    /// be called, those first that have not been asked about for longest.
    fn doubtful(&self, batch: &[QueuedCall]) -> Vec<ClaimId> {
        let map = self.map();
        let old = |holding: &HeldClaim| !holding.called && holding.known.elapsed() > FRESH;
        if !batch.iter().any(|queued| map.get(&queued.claimed.id).is_some_and(old)) {
            return Vec::new();
        }
        let soon: HashSet<Uuid> = batch.iter().map(|queued| queued.claimed.id).collect();
        let mut doubtful: Vec<(bool, Instant, Uuid, i32)> =
            map.iter().filter(|(_, h)| old(h)).map(|(id, h)| (!soon.contains(id), h.known, *id, h.claim)).collect();
        doubtful.sort_unstable();
        doubtful.into_iter().take(ASKED).map(|(_, _, id, claim)| (id, claim)).collect()
    }

    /// `None`: it is no longer ours to call. `Some(false)`: it may be, but its lease is nearly over, or somebody else holds
    /// it.
    fn about_to_call(&self, claim: ClaimId, lease: Duration, busy: bool) -> Option<bool> {
        let mut map = self.map();
        let holding = map.get_mut(&claim.0).filter(|holding| holding.claim == claim.1)?;
        holding.called = !busy && Instant::now() + lease / 10 < holding.until;
        Some(holding.called)
    }

    fn all(&self) -> Vec<ClaimId> {
        self.map().iter().map(|(id, holding)| (*id, holding.claim)).collect()
    }

    /// Of those that were `asked` about, only those that were kept are still ours, `until` then at least; what is not,
    /// and is not called yet, is dropped. Those that are about to be called were ours `at` that time.
    fn keep(&self, asked: &[ClaimId], kept: &Kept, at: Option<Instant>, until: Instant) {
        let mut map = self.map();
        for claim in asked {
            match map.get_mut(&claim.0).filter(|holding| holding.claim == claim.1) {
                Some(holding) if kept.ours.contains(claim) => {
                    holding.known = at.unwrap_or(holding.known);
                    holding.until = holding.until.max(until);
                }
                Some(holding) if !holding.called && !kept.busy.contains(claim) => {
                    map.remove(&claim.0);
                }
                _ => {}
            }
        }
    }

    fn drop_uncalled(&self) -> Vec<ClaimId> {
        let mut map = self.map();
        let uncalled = map.iter().filter(|(_, h)| !h.called).map(|(id, h)| (*id, h.claim)).collect();
        map.retain(|_, h| h.called);
        uncalled
    }

    pub fn done(&self, claims: impl Iterator<Item = ClaimId>) {
        let mut map = self.map();
        for (id, claim) in claims {
            if map.get(&id).is_some_and(|holding| holding.claim == claim) {
                map.remove(&id);
            }
        }
    }
}
