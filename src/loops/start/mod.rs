//! Claims tasks to be started. The calls are made by `calls`, with no connection held, and what came of them is written
//! by `answers`.

pub mod answers;
pub mod caller;
mod held;
pub mod lease;
mod queue;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, mpsc};
use tokio_util::task::TaskTracker;

use super::runner::{Loop, Tick};
use crate::store::admission::matchers;
use crate::store::tasks::transitions::{self, Claims};
use crate::store::{self, Actor, Patience, Session, Store};
use crate::wake::Hints;
use crate::webhook::Client;
use answers::Answers;
use caller::StartCaller;
use held::HeldClaims;
use queue::{CallQueue, QueuedCall};

/// The name of the loop, and the actor of everything it writes.
const NAME: &str = "start";
/// Tasks claimed by one statement at most; past a few hundred a larger batch gains nothing.
const CLAIM_LIMIT: usize = 200;
/// Tasks looked at by one claim at most, where rules block most of them.
const LOOK_LIMIT: usize = 2000;
/// Of those that stand aside for their receiver, how many times the calls at once are held beside what can be called.
/// A bound, because what is claimed here nobody else can start.
const ASIDE: usize = 8;
/// What the actions of all tasks that are claimed here may have; past it nothing more is claimed.
const HELD_BYTES: usize = 16 * 1024 * 1024;

pub struct StartSettings {
    pub interval: Duration,
    pub lease: Duration,
    pub concurrency: usize,
}

/// The loop: claims, and hands over to the [`StartCaller`].
pub struct Start {
    store: Store,
    settings: StartSettings,
    held: HeldClaims,
    queue: CallQueue,
    /// How many of the queue the next claim looks at.
    look: AtomicUsize,
}

impl Start {
    pub fn new(store: Store, client: Client, settings: StartSettings) -> (Start, StartCaller, Answers) {
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
        let answers = Answers::new(store.clone(), held.clone(), incoming);
        (Start { store, settings, held, queue, look: AtomicUsize::new(0) }, caller, answers)
    }

    async fn claim(&self, limit: usize, look: usize) -> store::Result<Granted> {
        let claim = |session| self.claim_once(session, limit, look);
        match self.store.retrying(Patience::Brief, claim).await {
            // Something that some of them need is in other hands: without those.
            Err(error) if error.is_busy() => self.store.retrying(Patience::Least, claim).await,
            granted => granted,
        }
    }

    async fn claim_once(&self, session: Session, limit: usize, look: usize) -> store::Result<Granted> {
        let mut tx = session.begin_claim(Actor::Loop(Self::NAME)).await?;
        let at = Instant::now();
        let claims = transitions::claim(&mut tx, limit, look, self.settings.lease).await?;
        // Nobody to call: it runs from now on and waits for a report.
        let silent = claims.tasks.iter().filter(|claimed| claimed.on_start.is_none());
        let silent: Vec<transitions::StartedClaim> =
            silent.map(|claimed| transitions::StartedClaim { claim: claimed.claim_id(), ignored: None }).collect();
        if !silent.is_empty() {
            transitions::started(&mut tx, &silent).await?;
        }
        let known = Instant::now();
        tx.commit().await?;
        Ok(Granted { claims, at, known })
    }
}

/// What was claimed. The leases began after `at`; from `known` on each task may be canceled or reported.
struct Granted {
    claims: Claims,
    at: Instant,
    known: Instant,
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
        // As many again as can be called at once: the next ones are there when a call ends.
        let concurrency = self.settings.concurrency;
        let room = (concurrency * 2 + self.queue.aside().min(concurrency * ASIDE)).saturating_sub(self.held.len());
        // Not for a few at a time, while there are others to call.
        if room == 0 || room < concurrency / 2 && self.queue.len() > 0 || self.held.bytes() > HELD_BYTES {
            return Ok(Tick::default());
        }
        let limit = room.min(CLAIM_LIMIT);
        let Granted { claims, at, known } = match self.claim(limit, self.look.load(Ordering::Relaxed)).await {
            Ok(granted) => granted,
            // New matchers are being counted, or somebody keeps everybody from claiming.
            Err(error) if error.is_busy() => return Ok(Tick { due_in: Some(0.0), ..Tick::default() }),
            Err(error) => return Err(error),
        };
        let Claims { tasks: claimed, parked, busy, more, unknown } = claims;
        // Where most are blocked they are put out of the way faster than they are claimed.
        self.look.store(if parked * 2 > limit || busy > 0 { LOOK_LIMIT } else { limit }, Ordering::Relaxed);
        let processed = claimed.len();
        for mut claimed in claimed {
            if let Some(action) = claimed.on_start.take() {
                self.held.take(&claimed, known, at + self.settings.lease);
                self.queue.push(QueuedCall { claimed, action, place: None });
            }
        }
        // After all that was claimed is in the queue. What keeps it from being known now does not for ever.
        let mut known = false;
        if !unknown.is_empty() {
            match matchers::try_register(&self.store, &unknown).await {
                Ok(()) => known = true,
                Err(error) => tracing::debug!(%error, "matchers not registered yet"),
            }
        }
        // Where everything that was looked at is in other hands, there is nothing more to be had at once.
        let more = known || more && (processed > 0 || parked > 0);
        let due_in = (busy > 0 || !unknown.is_empty()).then_some(0.0);
        Ok(Tick { processed: processed as u64, more, due_in })
    }
}
