//! Claims tasks and calls their `on_start`. Claim, commit, call with no connection held, and write the answers of
//! many calls in one transaction. A claimed task that waits for a free call has its lease renewed; one that is
//! no longer ours is dropped before it is called.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::runner::{Loop, Tick};
use crate::domain::lifecycle::{Event, Transition, decide};
use crate::domain::new_task::read_answered_action;
use crate::domain::retry::{Failure, FailureType, Trigger};
use crate::domain::task::Flags;
use crate::domain::webhook::{Action, idempotency_key};
use crate::store::transitions::{self, Claimed};
use crate::store::{self, Store, lease, lock, outbox, query, retrying};
use crate::wake::Hints;
use crate::webhook::{Call, CallError, Client};

/// Tasks claimed by one statement at most; past a few hundred a larger batch gains nothing.
const CLAIM_LIMIT: usize = 200;
/// Answers written by one transaction at most.
const APPLY_LIMIT: usize = 200;

pub struct Settings {
    pub interval: Duration,
    pub lease: Duration,
    pub concurrency: usize,
}

/// The loop and what its parts share.
pub struct Start {
    store: Store,
    client: Client,
    settings: Settings,
    held: Held,
    calls: Arc<Semaphore>,
    tracker: TaskTracker,
    results: mpsc::UnboundedSender<Answered>,
}

/// What was claimed here and has no written result yet.
#[derive(Clone, Default)]
pub struct Held(Arc<Mutex<HashMap<Uuid, Holding>>>);

#[derive(Clone, Copy)]
struct Holding {
    run: i32,
    /// Its webhook has been called: from here on only the answer ends it.
    called: bool,
}

/// What came of one `on_start`.
pub struct Answered {
    id: Uuid,
    run: i32,
    result: Result<Option<Action>, CallError>,
}

impl Start {
    pub fn new(store: Store, client: Client, settings: Settings) -> (Start, Results) {
        let (results, incoming) = mpsc::unbounded_channel();
        let held = Held::default();
        let start = Start {
            calls: Arc::new(Semaphore::new(settings.concurrency)),
            tracker: TaskTracker::new(),
            held: held.clone(),
            store: store.clone(),
            client,
            settings,
            results,
        };
        (start, Results { store, held, incoming })
    }

    /// Parts that live beside the loop: the lease keeper and the way to end in good order.
    pub fn keeper(&self) -> Keeper {
        Keeper {
            store: self.store.clone(),
            held: self.held.clone(),
            calls: Arc::clone(&self.calls),
            tracker: self.tracker.clone(),
            lease: self.settings.lease,
        }
    }

    async fn claim(&self, limit: usize) -> store::Result<Vec<Claimed>> {
        retrying(|| async {
            let mut tx = self.store.begin_relaxed().await?;
            let limit = i64::try_from(limit).unwrap_or(i64::MAX);
            let claimed = transitions::claim(&mut tx, limit, self.settings.lease).await?;
            // Nobody to call: it runs from now on and waits for a report.
            let silent: Vec<(Uuid, i32)> =
                claimed.iter().filter(|c| !c.flags.has(Flags::ON_START)).map(|c| (c.id, c.run)).collect();
            if !silent.is_empty() {
                transitions::started(&mut tx, &silent).await?;
            }
            tx.commit().await?;
            Ok(claimed)
        })
        .await
    }

    fn call(&self, claimed: &Claimed, action: Action) {
        self.held.take(claimed.id, claimed.run);
        let (calls, held, client, results) =
            (Arc::clone(&self.calls), self.held.clone(), self.client.clone(), self.results.clone());
        let claimed = claimed.clone();
        self.tracker.spawn(async move {
            let Ok(_permit) = calls.acquire().await else { return };
            if !held.about_to_call(claimed.id, claimed.run) {
                return;
            }
            let result = client
                .call(Call {
                    action: &action,
                    body: action.params.body.clone(),
                    trigger: "start",
                    idempotency_key: idempotency_key(claimed.id, "start", "success", claimed.run),
                    task: Some((claimed.id, claimed.run)),
                    attempt: Some(i64::from(claimed.attempt)),
                    trace: claimed.id,
                })
                .await;
            if let Err(error) = &result {
                tracing::info!(task.id = %claimed.id, batch.id = %claimed.batch_id, run = claimed.run, %error,
                    "on_start failed");
            }
            let result = result.map(|answer| read_answered_action(&answer.body));
            let _ = results.send(Answered { id: claimed.id, run: claimed.run, result });
        });
    }
}

impl Loop for Start {
    const NAME: &'static str = "start";

    fn interval(&self) -> Duration {
        self.settings.interval
    }

    fn hint(&self) -> Option<Hints> {
        Some(Hints::START)
    }

    async fn tick(&self) -> store::Result<Tick> {
        // As many again as can be called at once: the next ones are there when a call ends.
        let room = (self.settings.concurrency * 2).saturating_sub(self.held.len());
        if room == 0 {
            return Ok(Tick::default());
        }
        let limit = room.min(CLAIM_LIMIT);
        let claimed = self.claim(limit).await?;
        let processed = claimed.len();
        let with_action: Vec<Uuid> = claimed.iter().filter(|c| c.flags.has(Flags::ON_START)).map(|c| c.id).collect();
        if !with_action.is_empty() {
            let actions = query::start_actions(&self.store, &with_action).await?;
            let mut by_id: HashMap<Uuid, Claimed> = claimed.into_iter().map(|c| (c.id, c)).collect();
            // In the order of the queue, as far as one can speak of it with many at once.
            for (id, action) in actions {
                if let Some(claimed) = by_id.remove(&id) {
                    self.call(&claimed, action);
                }
            }
        }
        Ok(Tick { processed: processed as u64, more: processed == limit, due_in: None })
    }
}

/// Writes the answers, many in one transaction.
pub struct Results {
    store: Store,
    held: Held,
    incoming: mpsc::UnboundedReceiver<Answered>,
}

impl Results {
    /// Runs until every sender is gone, that is, until the loop and its calls have ended.
    pub async fn run(mut self) {
        while self.write_some().await {}
    }

    /// Waits for answers and writes what has come; false when no more can come.
    pub async fn write_some(&mut self) -> bool {
        let mut answers = Vec::with_capacity(APPLY_LIMIT);
        if self.incoming.recv_many(&mut answers, APPLY_LIMIT).await == 0 {
            return false;
        }
        self.write(&answers).await;
        self.held.done(&answers);
        self.store.wake().here(Hints::START);
        true
    }
}

impl Results {
    /// Stays at it while the database is away. If it refuses, each answer stands for itself: one that cannot be
    /// written must not keep the others, and its task comes back when its lease ends.
    async fn write(&self, answers: &[Answered]) {
        let mut wait = Duration::from_millis(50);
        while let Err(error) = retrying(|| write(&self.store, answers)).await {
            if !error.is_unavailable() {
                tracing::error!(%error, answers = answers.len(), "answers to on_start cannot be written together");
                for one in answers {
                    if let Err(error) = retrying(|| write(&self.store, std::slice::from_ref(one))).await {
                        tracing::error!(task.id = %one.id, %error, "an answer to on_start is lost");
                    }
                }
                return;
            }
            tracing::warn!(%error, answers = answers.len(), "answers to on_start are not written yet");
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(Duration::from_secs(2));
        }
    }
}

async fn write(store: &Store, answers: &[Answered]) -> store::Result<()> {
    let mut tx = store.begin().await?;
    let (mut started, mut actions, mut failed) = (Vec::new(), Vec::new(), HashMap::new());
    for answer in answers {
        match &answer.result {
            Ok(action) => {
                started.push((answer.id, answer.run));
                actions.extend(action.clone().map(|action| (answer.id, answer.run, action)));
            }
            Err(error) => {
                failed.insert(answer.id, (answer.run, error));
            }
        }
    }
    // Failures first: their cascade locks other rows, and rows are locked before counters.
    if !failed.is_empty() {
        let mut ids: Vec<Uuid> = failed.keys().copied().collect();
        ids.sort_unstable();
        let locked = lock::by_ids(&mut tx, &ids).await?;
        let decided: Vec<Transition> = locked
            .tasks
            .iter()
            .filter_map(|task| {
                let (run, error) = failed.get(&task.id)?;
                let event = Event::StartFailed { by: store.instance(), failure: failure(error) };
                decide(task, &event, locked.moment).ok().flatten().filter(|_| task.run == *run)
            })
            .collect();
        transitions::apply(&mut tx, &decided, locked.moment).await?;
    }
    if !started.is_empty() {
        transitions::started(&mut tx, &started).await?;
        outbox::keep_cancel_actions(&mut tx, &actions).await?;
    }
    tx.commit().await
}

fn failure(error: &CallError) -> Failure {
    Failure {
        trigger: Trigger::WebhookFailure,
        failure_type: error.failure_type,
        reason: match error.failure_type {
            FailureType::Timeout if error.status.is_none() => "on_start: no answer in time".into(),
            _ => format!("on_start: {}", error.message),
        },
        http_status: error.status,
    }
}

/// Keeps the leases of what is held, and gives back at the end what was not started.
pub struct Keeper {
    store: Store,
    held: Held,
    calls: Arc<Semaphore>,
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
        let ours = lease::renew(&self.store, &held, self.lease).await?;
        self.held.keep(&held, &ours);
        Ok(())
    }

    /// Ends in good order: nothing new is called, what was not called goes back into the queue, and the calls under
    /// way get `grace` to be answered. Their leases are still renewed meanwhile.
    pub async fn drain(&self, grace: Duration) {
        self.calls.close();
        let unstarted = self.held.drop_uncalled();
        if !unstarted.is_empty() {
            let given_back = retrying(|| async {
                let mut tx = self.store.begin().await?;
                let count = transitions::give_back(&mut tx, &unstarted).await?;
                tx.commit().await?;
                Ok(count)
            })
            .await;
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

impl Held {
    fn map(&self) -> MutexGuard<'_, HashMap<Uuid, Holding>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn len(&self) -> usize {
        self.map().len()
    }

    fn take(&self, id: Uuid, run: i32) {
        self.map().insert(id, Holding { run, called: false });
    }

    /// False if it is no longer ours to call.
    fn about_to_call(&self, id: Uuid, run: i32) -> bool {
        match self.map().get_mut(&id) {
            Some(holding) if holding.run == run => {
                holding.called = true;
                true
            }
            _ => false,
        }
    }

    fn all(&self) -> Vec<(Uuid, i32)> {
        self.map().iter().map(|(id, holding)| (*id, holding.run)).collect()
    }

    /// Of those that were `asked` about, only `ours` are still ours; what is not and was not called is dropped.
    fn keep(&self, asked: &[(Uuid, i32)], ours: &[Uuid]) {
        let ours: std::collections::HashSet<&Uuid> = ours.iter().collect();
        let mut map = self.map();
        for (id, run) in asked {
            if !ours.contains(id) && map.get(id).is_some_and(|h| h.run == *run && !h.called) {
                map.remove(id);
            }
        }
    }

    fn drop_uncalled(&self) -> Vec<(Uuid, i32)> {
        let mut map = self.map();
        let uncalled: Vec<(Uuid, i32)> = map.iter().filter(|(_, h)| !h.called).map(|(id, h)| (*id, h.run)).collect();
        map.retain(|_, h| h.called);
        uncalled
    }

    fn done(&self, answers: &[Answered]) {
        let mut map = self.map();
        for answer in answers {
            if map.get(&answer.id).is_some_and(|h| h.run == answer.run) {
                map.remove(&answer.id);
            }
        }
    }
}
