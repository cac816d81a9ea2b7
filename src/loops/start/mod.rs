//! Starts tasks, in four steps. The loop in this file claims tasks and puts them into the `queue`. The `caller` calls
//! their `on_start` without a database connection. `answers` writes the results. Meanwhile `held` knows which claims
//! this instance holds, and `lease_keeper` renews them.

pub mod answers;
pub mod caller;
mod held;
pub mod lease_keeper;
mod queue;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, mpsc};
use tokio_util::task::TaskTracker;

use super::runner::{Loop, Tick};
use crate::store::rules::matchers;
use crate::store::tasks::transitions::{self, Claims};
use crate::store::{self, Actor, Patience, Session, Store};
use crate::wake::Hints;
use crate::webhook::Client;
use answers::AnswerWriter;
use caller::StartCaller;
use held::HeldClaims;
use queue::{CallQueue, QueuedCall};

/// The name of the loop and the actor of its transactions.
const NAME: &str = "start";
/// Tasks claimed by one statement at most. Beyond a few hundred, a larger batch gains nothing.
const CLAIM_LIMIT: usize = 200;
/// Tasks examined by one claim at most, where rules block most of them.
const EXAMINE_LIMIT: usize = 2000;
/// Tasks that may be set aside in addition to the callable ones, as a multiple of the concurrency. Bounded, because no
/// other instance can start a task that is claimed here.
const SET_ASIDE_FACTOR: usize = 8;
/// Bytes of the actions of all held tasks above which the loop claims nothing more.
const HELD_BYTES: usize = 16 * 1024 * 1024;

pub struct StartSettings {
    pub interval: Duration,
    pub lease: Duration,
    pub concurrency: usize,
}

/// The loop, which claims tasks and queues their calls for the [`StartCaller`].
pub struct Start {
    store: Store,
    settings: StartSettings,
    held: HeldClaims,
    queue: CallQueue,
    /// Tasks that the next claim examines.
    examine: AtomicUsize,
}

impl Start {
    pub fn new(store: Store, client: Client, settings: StartSettings) -> (Start, StartCaller, AnswerWriter) {
        let (results, incoming) = mpsc::unbounded_channel();
        let (held, queue) = (HeldClaims::default(), CallQueue::default());
        let caller = StartCaller {
            store: store.clone(),
            client,
            lease: settings.lease,
            held: held.clone(),
            queue: queue.clone(),
            calls: Arc::new(Semaphore::new(settings.concurrency)),
            tracker: TaskTracker::new(),
            results,
        };
        let answers = AnswerWriter::new(store.clone(), held.clone(), incoming);
        (Start { store, settings, held, queue, examine: AtomicUsize::new(0) }, caller, answers)
    }

    async fn claim(&self, limit: usize, examine: usize) -> store::Result<Granted> {
        let claim = |session| self.claim_once(session, limit, examine);
        match self.store.retrying(Patience::Brief, claim).await {
            // Another transaction has locked rows that some of the tasks need: claim the others.
            Err(error) if error.is_busy() => self.store.retrying(Patience::Least, claim).await,
            granted => granted,
        }
    }

    async fn claim_once(&self, session: Session, limit: usize, examine: usize) -> store::Result<Granted> {
        let mut tx = session.begin_claim(Actor::Loop(Self::NAME)).await?;
        let before_leases = Instant::now();
        let claims = transitions::claim(&mut tx, limit, examine, self.settings.lease).await?;
        // A task without `on_start` is Running at once and waits for a report.
        let silent = claims.tasks.iter().filter(|claimed| claimed.on_start.is_none());
        let silent: Vec<transitions::StartedClaim> =
            silent.map(|claimed| transitions::StartedClaim { claim: claimed.claim_id(), ignored: None }).collect();
        if !silent.is_empty() {
            transitions::started(&mut tx, &silent).await?;
        }
        let before_commit = Instant::now();
        tx.commit().await?;
        Ok(Granted { claims, before_leases, before_commit })
    }
}

/// The result of a claim.
struct Granted {
    claims: Claims,
    /// A time before the leases began.
    before_leases: Instant,
    /// From the commit on, each task may be canceled or reported.
    before_commit: Instant,
}

impl Loop for Start {
    const NAME: &'static str = NAME;

    fn interval(&self) -> Duration {
        self.settings.interval
    }

    fn hint(&self) -> Option<Hints> {
        Some(Hints::START)
    }

    async fn tick(&self) -> store::Result<Tick> {
        // Twice the concurrency, so that the next task is claimed already when a call ends.
        let concurrency = self.settings.concurrency;
        let set_aside = self.queue.set_aside_count().min(concurrency * SET_ASIDE_FACTOR);
        let room = (concurrency * 2 + set_aside).saturating_sub(self.held.len());
        // While there are calls in the queue, wait until a larger batch can be claimed.
        if room == 0 || room < concurrency / 2 && self.queue.len() > 0 || self.held.bytes() > HELD_BYTES {
            return Ok(Tick::default());
        }
        let limit = room.min(CLAIM_LIMIT);
        let granted = match self.claim(limit, self.examine.load(Ordering::Relaxed)).await {
            Ok(granted) => granted,
            // Another transaction counts the tasks of new matchers or holds the claim lock.
            Err(error) if error.is_busy() => return Ok(Tick { due_in: Some(0.0), ..Tick::default() }),
            Err(error) => return Err(error),
        };
        let Granted { claims, before_leases, before_commit } = granted;
        let Claims { tasks: claimed, blocked, busy, more, unknown } = claims;
        // Where rules block most tasks, a claim examines more of them, to move them to their blocked groups quickly.
        let examine = if blocked * 2 > limit || busy > 0 { EXAMINE_LIMIT } else { limit };
        self.examine.store(examine, Ordering::Relaxed);
        let processed = claimed.len();
        for mut claimed in claimed {
            if let Some(action) = claimed.on_start.take() {
                self.held.add(&claimed, before_commit, before_leases + self.settings.lease);
                self.queue.push(QueuedCall { claimed, action, host_permit: None });
            }
        }
        // Only after all claimed tasks are queued. If this fails, a later tick tries again.
        let mut registered = false;
        if !unknown.is_empty() {
            match matchers::try_register(&self.store, &unknown).await {
                Ok(()) => registered = true,
                Err(error) => tracing::debug!(%error, "matchers not registered"),
            }
        }
        // If other transactions have locked all examined tasks, claiming again at once would find the same.
        let more = registered || more && (processed > 0 || blocked > 0);
        let due_in = (busy > 0 || !unknown.is_empty()).then_some(0.0);
        Ok(Tick { processed: processed as u64, more, due_in })
    }
}
