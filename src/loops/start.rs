//! Claims tasks to be started, and writes the answers of many calls in one transaction. The calls themselves are
//! made by `calls`, with no connection held.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::calls::{Caller, Held, Queue, Queued};
use super::runner::{Loop, Tick};
use crate::domain::failure::{Failure, FailureType, Trigger};
use crate::domain::lifecycle::{self, Decision, Event, Moment, Transition};
use crate::domain::task::Task;
use crate::domain::webhook::Action;
use crate::store::transitions::{self, Claims};
use crate::store::{self, Actor, Store, dead_ends, lock, outbox};
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
    /// Why the answer's cancel action was ignored, if it was.
    pub ignored: Option<String>,
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
        let answers = Results { store: store.clone(), held: held.clone(), incoming, late: Vec::new() };
        (Start { store, settings, held, queue, look: AtomicUsize::new(0) }, caller, answers)
    }

    /// And when it was done: from then on each of them may be canceled or reported.
    async fn claim(&self, limit: usize, look: usize) -> store::Result<(Claims, Instant)> {
        self.store
            .retrying(|| async {
                let mut tx = self.store.begin_claim(Actor::Loop(Self::NAME)).await?;
                let claims = transitions::claim(&mut tx, limit, look, self.settings.lease).await?;
                // Nobody to call: it runs from now on and waits for a report.
                let silent: Vec<(Uuid, i32)> =
                    claims.tasks.iter().filter(|c| c.on_start.is_none()).map(|c| (c.id, c.run)).collect();
                if !silent.is_empty() {
                    transitions::started(&mut tx, &silent).await?;
                }
                let since = Instant::now();
                tx.commit().await?;
                Ok((claims, since))
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
        // Not for a few at a time, while there are others to call.
        if room == 0 || room < concurrency / 2 && self.queue.len() > 0 {
            return Ok(Tick::default());
        }
        let limit = room.min(CLAIM_LIMIT);
        let (claims, since) = self.claim(limit, self.look.load(Ordering::Relaxed)).await?;
        let Claims { tasks: mut claimed, parked, more } = claims;
        // Where most are blocked they are put out of the way faster than they are claimed.
        self.look.store(if parked * 2 > limit { LOOK_LIMIT } else { limit }, Ordering::Relaxed);
        let processed = claimed.len();
        // In the order of the queue, which the statement's answer is not in.
        claimed.sort_unstable_by_key(|c| (std::cmp::Reverse(c.priority), c.turn, c.id));
        for mut claimed in claimed {
            if let Some(action) = claimed.on_start.take() {
                self.held.take(claimed.id, claimed.run, since);
                self.queue.push(Queued { claimed, action, place: None });
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
    /// Answers about tasks that somebody else had locked. Mostly that is a report, which came before this.
    late: Vec<Answered>,
}

impl Results {
    /// Runs until every sender is gone, that is, until the loop and its calls have ended.
    pub async fn run(mut self) {
        while self.write_some().await {}
    }

    /// Waits for answers and writes what has come; false when no more can come.
    pub async fn write_some(&mut self) -> bool {
        let mut answers = std::mem::take(&mut self.late);
        // With the next ones, or now if there are none.
        let any = !answers.is_empty();
        let more = self.incoming.recv_many(&mut answers, APPLY_LIMIT);
        let more = if any { more.now_or_never().unwrap_or(0) } else { more.await };
        if answers.is_empty() {
            return false;
        }
        let others = self.write(&answers, more == 0).await;
        (self.late, answers) = answers.into_iter().partition(|answer| others.contains(&answer.id));
        self.held.done(&answers);
        self.store.wake().here(Hints::START);
        true
    }
}

impl Results {
    /// Stays at it while the database is away. If it refuses, each answer stands for itself: one that cannot be
    /// written must not keep the others, and its task comes back when its lease ends. Answers which tasks are in other
    /// hands, if it is not to `wait` for them.
    async fn write(&self, answers: &[Answered], wait: bool) -> HashSet<Uuid> {
        let mut pause = Duration::from_millis(50);
        loop {
            let error = match self.store.retrying(|| write(&self.store, answers, wait)).await {
                Ok(others) => return others,
                Err(error) => error,
            };
            if !error.is_unavailable() {
                tracing::error!(%error, answers = answers.len(), "answers to on_start cannot be written together");
                for one in answers {
                    if let Err(error) =
                        self.store.retrying(|| write(&self.store, std::slice::from_ref(one), true)).await
                    {
                        tracing::error!(task.id = %one.id, %error, "an answer to on_start is lost");
                    }
                }
                return HashSet::new();
            }
            tracing::warn!(%error, answers = answers.len(), "answers to on_start are not written yet");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(2));
        }
    }
}

async fn write(store: &Store, answers: &[Answered], wait: bool) -> store::Result<HashSet<Uuid>> {
    let mut tx = store.begin(Actor::Loop(Start::NAME)).await?;
    let (mut started, mut actions, mut failed) = (Vec::new(), Vec::new(), HashMap::new());
    for answer in answers {
        match &answer.result {
            Ok(action) => {
                started.push((answer.id, answer.run));
                actions.extend(action.clone().map(|action| (answer.id, answer.run, action)));
            }
            Err(error) => {
                failed.insert((answer.id, answer.run), error);
            }
        }
    }
    let ids: Vec<Uuid> = answers.iter().map(|answer| answer.id).collect();
    // Failures first: their cascade locks other rows, and all rows are locked in one go. What was started may be above
    // what fails.
    if !failed.is_empty() {
        let decide = |task: &Task, moment: Moment| -> Decision {
            let Some(error) = failed.get(&(task.id, task.run)) else { return Ok(None) };
            lifecycle::decide(task, &Event::StartFailed { by: store.instance(), failure: failure(error) }, moment)
        };
        let locked = lock::by_ids(&mut tx, &ids).await?;
        let locked = dead_ends::widen(&mut tx, locked, decide).await?;
        let decided: Vec<Transition> =
            locked.tasks.iter().filter_map(|task| decide(task, locked.moment).ok().flatten()).collect();
        transitions::apply(&mut tx, &decided, locked.moment).await?;
    } else if wait {
        lock::by_ids(&mut tx, &ids).await?;
    }
    let mut others = HashSet::new();
    if !started.is_empty() {
        others = transitions::started(&mut tx, &started).await?;
        actions.retain(|(id, _, _)| !others.contains(id));
        outbox::keep_cancel_actions(&mut tx, &actions).await?;
    }
    tx.commit().await?;
    Ok(if wait { HashSet::new() } else { others })
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
