//! Claims tasks to be started, and writes the answers of many calls in one transaction. The calls themselves are
//! made by `calls`, with no connection held.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, mpsc};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::calls::{Caller, Held, Queue, Queued};
use super::runner::{Loop, Tick};
use crate::domain::failure::{Failure, FailureType, Trigger};
use crate::domain::lifecycle::{self, Decision, Event, Moment, Transition};
use crate::domain::task::{Flags, Task};
use crate::domain::webhook::Action;
use crate::store::transitions::{self, Claims};
use crate::store::{self, Actor, Store, dead_ends, lock, outbox, query, retrying};
use crate::wake::Hints;
use crate::webhook::{CallError, Client};

/// Tasks claimed by one statement at most; past a few hundred a larger batch gains nothing.
const CLAIM_LIMIT: usize = 200;
/// Tasks looked at by one claim at most, where rules block most of them.
const LOOK_LIMIT: usize = 2000;
/// Of those that stand aside for their receiver, how many times the calls at once are held beside what can be called.
/// A bound, because what is claimed here nobody else can start.
const ASIDE: usize = 8;
/// Answers written by one transaction at most.
const APPLY_LIMIT: usize = 200;

pub struct Settings {
    pub interval: Duration,
    pub lease: Duration,
    pub concurrency: usize,
}

/// The loop: claims, and hands over to the [`Caller`].
pub struct Start {
    store: Store,
    settings: Settings,
    held: Held,
    queue: Queue,
    /// How many of the queue the next claim looks at.
    look: AtomicUsize,
}

/// What came of one `on_start`.
pub struct Answered {
    pub(super) id: Uuid,
    pub(super) run: i32,
    pub(super) result: Result<Option<Action>, CallError>,
}

impl Start {
    pub fn new(store: Store, client: Client, settings: Settings) -> (Start, Caller, Results) {
        let (results, incoming) = mpsc::unbounded_channel();
        let (held, queue) = (Held::default(), Queue::default());
        let caller = Caller {
            store: store.clone(),
            client,
            lease: settings.lease,
            held: held.clone(),
            queue: queue.clone(),
            calls: Arc::new(Semaphore::new(settings.concurrency)),
            tracker: TaskTracker::new(),
            results,
        };
        let answers = Results { store: store.clone(), held: held.clone(), incoming };
        (Start { store, settings, held, queue, look: AtomicUsize::new(0) }, caller, answers)
    }

    async fn claim(&self, limit: usize, look: usize) -> store::Result<Claims> {
        retrying(|| async {
            let mut tx = self.store.begin_claim(Actor::Loop(Self::NAME)).await?;
            let claims = transitions::claim(&mut tx, limit, look, self.settings.lease).await?;
            // Nobody to call: it runs from now on and waits for a report.
            let silent: Vec<(Uuid, i32)> =
                claims.tasks.iter().filter(|c| !c.flags.has(Flags::ON_START)).map(|c| (c.id, c.run)).collect();
            if !silent.is_empty() {
                transitions::started(&mut tx, &silent).await?;
            }
            tx.commit().await?;
            Ok(claims)
        })
        .await
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
        let concurrency = self.settings.concurrency;
        let room = (concurrency * 2 + self.queue.aside().min(concurrency * ASIDE)).saturating_sub(self.held.len());
        if room == 0 {
            return Ok(Tick::default());
        }
        let limit = room.min(CLAIM_LIMIT);
        let Claims { tasks: mut claimed, parked, more } = self.claim(limit, self.look.load(Ordering::Relaxed)).await?;
        // Where most are blocked they are put out of the way faster than they are claimed.
        self.look.store(if parked * 2 > limit { LOOK_LIMIT } else { limit }, Ordering::Relaxed);
        // From here on each of them may be canceled or reported: what follows may take long where the database is busy.
        let since = Instant::now();
        let processed = claimed.len();
        claimed.retain(|c| c.flags.has(Flags::ON_START));
        if !claimed.is_empty() {
            let ids: Vec<Uuid> = claimed.iter().map(|c| c.id).collect();
            let mut actions: HashMap<Uuid, Action> =
                query::start_actions(&self.store, &ids).await?.into_iter().collect();
            // In the order of the queue, which the statement's answer is not in.
            claimed.sort_unstable_by_key(|c| (std::cmp::Reverse(c.priority), c.turn, c.id));
            for claimed in claimed {
                if let Some(action) = actions.remove(&claimed.id) {
                    self.held.take(claimed.id, claimed.run);
                    self.queue.push(Queued { claimed, action, since, place: None });
                }
            }
        }
        Ok(Tick { processed: processed as u64, more, due_in: None })
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
    let mut tx = store.begin(Actor::Loop(Start::NAME)).await?;
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
    // Failures first: their cascade locks other rows, and all rows are locked in one go. What was started may be above
    // what fails.
    if !failed.is_empty() {
        let decide = |task: &Task, moment: Moment| -> Decision {
            let Some((run, error)) = failed.get(&task.id) else { return Ok(None) };
            let event = Event::StartFailed { by: store.instance(), failure: failure(error) };
            lifecycle::decide(task, &event, moment).map(|decided| decided.filter(|_| task.run == *run))
        };
        let ids: Vec<Uuid> = answers.iter().map(|answer| answer.id).collect();
        let locked = lock::by_ids(&mut tx, &ids).await?;
        let locked = dead_ends::widen(&mut tx, locked, decide).await?;
        let decided: Vec<Transition> =
            locked.tasks.iter().filter_map(|task| decide(task, locked.moment).ok().flatten()).collect();
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
        retry_after: error.retry_after,
    }
}
