//! Writes what came of the calls of `on_start`, many answers in one transaction. An answer is never lost because the
//! database is away or somebody else holds its task: it is kept aside and tried again while all others are written.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use uuid::Uuid;

use super::NAME;
use super::held::HeldClaims;
use crate::domain::retry::failure::{Failure, FailureType, Trigger};
use crate::domain::task::Task;
use crate::domain::task::lifecycle::{self, Decision, Event, Moment, Transition};
use crate::domain::webhook::Action;
use crate::store::graph::dead_ends;
use crate::store::outbox::{self, CancelAction};
use crate::store::tasks::lease::ClaimId;
use crate::store::tasks::{details, lock, transitions};
use crate::store::{self, Actor, Patience, Session, Store};
use crate::telemetry::log_limit::LogLimit;
use crate::wake::Hints;
use crate::webhook::CallError;

/// Answers written by one transaction at most.
const APPLY_LIMIT: usize = 200;
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What came of one `on_start`.
pub struct Answered {
    pub(super) claim: ClaimId,
    pub(super) run: i32,
    pub(super) result: Result<Option<Action>, CallError>,
    /// What of a good answer could not be taken, and why.
    pub(super) ignored: Option<String>,
}

/// An answer that could not be written yet.
struct Late {
    answer: Answered,
    again: Instant,
    pause: Duration,
}

pub struct Answers {
    store: Store,
    held: HeldClaims,
    incoming: mpsc::UnboundedReceiver<Answered>,
    late: Vec<Late>,
}

impl Answers {
    pub(super) fn new(store: Store, held: HeldClaims, incoming: mpsc::UnboundedReceiver<Answered>) -> Answers {
        Answers { store, held, incoming, late: Vec::new() }
    }

    /// Runs until every sender is gone, that is, until the loop and its calls have ended.
    pub async fn run(mut self) {
        while self.write_some().await {}
    }

    /// Waits for answers and writes what has come; false when no more can come.
    pub async fn write_some(&mut self) -> bool {
        let mut new = Vec::new();
        let again = self.late.iter().map(|late| late.again).min();
        match again {
            None => {
                if self.incoming.recv_many(&mut new, APPLY_LIMIT).await == 0 {
                    return false;
                }
            }
            Some(again) => tokio::select! {
                count = self.incoming.recv_many(&mut new, APPLY_LIMIT) => {
                    if count == 0 {
                        tokio::time::sleep_until(again).await;
                    }
                }
                () = tokio::time::sleep_until(again) => {}
            },
        }
        let now = Instant::now();
        let (due, waiting): (Vec<Late>, Vec<Late>) = self.late.drain(..).partition(|late| late.again <= now);
        self.late = waiting;
        let pauses: HashMap<ClaimId, Duration> = due.iter().map(|late| (late.answer.claim, late.pause)).collect();
        let answers: Vec<Answered> = new.into_iter().chain(due.into_iter().map(|late| late.answer)).collect();
        let unwritten = self.write(&answers).await;
        let (left, done): (Vec<Answered>, Vec<Answered>) =
            answers.into_iter().partition(|answer| unwritten.contains(&answer.claim));
        self.held.done(done.iter().map(|answer| answer.claim));
        for answer in left {
            let pause = pauses.get(&answer.claim).map_or(FIRST_PAUSE, |pause| (*pause * 2).min(LONGEST_PAUSE));
            self.late.push(Late { answer, again: Instant::now() + pause, pause });
        }
        self.store.wake().notify_local(Hints::START);
        true
    }

    /// Answers which are still to be written. If all together cannot be, each stands for itself.
    async fn write(&self, answers: &[Answered]) -> HashSet<ClaimId> {
        static LIMIT: LogLimit = LogLimit::new();
        let error = match self.store.retrying(Patience::Brief, |session| write(session, answers)).await {
            Ok(busy) => return busy,
            Err(error) => error,
        };
        if error.is_unavailable() {
            if let Some(suppressed) = LIMIT.allows() {
                tracing::warn!(%error, answers = answers.len(), suppressed, "answers to on_start are not written yet");
            }
            return answers.iter().map(|answer| answer.claim).collect();
        }
        if !error.is_busy() {
            tracing::error!(%error, answers = answers.len(), "answers to on_start cannot be written together");
        }
        let mut unwritten = HashSet::new();
        for one in answers {
            let written = self.store.retrying(Patience::Least, |session| write(session, std::slice::from_ref(one)));
            match written.await {
                Ok(busy) => unwritten.extend(busy),
                Err(error) if error.is_unavailable() => {
                    // Those that were written already find that their claim has moved on.
                    return answers.iter().map(|answer| answer.claim).collect();
                }
                Err(error) if error.is_busy() || error.is_unavailable() || error.is_transient() => {
                    unwritten.insert(one.claim);
                }
                Err(error) => {
                    // Its task comes back when its lease ends.
                    tracing::error!(task.id = %one.claim.0, %error, "an answer to on_start cannot be written");
                }
            }
        }
        unwritten
    }
}

/// Answers which tasks somebody else holds: nothing was written about those.
async fn write(session: Session, answers: &[Answered]) -> store::Result<HashSet<ClaimId>> {
    let mut tx = session.begin(Actor::Loop(NAME)).await?;
    let by = session.instance();
    let (mut started, mut actions) = (Vec::new(), Vec::new());
    let mut failed: HashMap<ClaimId, &CallError> = HashMap::new();
    for answer in answers {
        let claim = answer.claim;
        match &answer.result {
            Ok(action) => {
                started.push(transitions::StartedClaim { claim, ignored: answer.ignored.clone() });
                let cancel = |action| CancelAction { claim, run: answer.run, action };
                actions.extend(action.clone().map(cancel));
            }
            Err(error) => {
                failed.insert(claim, error);
            }
        }
    }
    let mut busy = HashSet::new();
    // Failures first: their cascade locks other rows, and all rows are locked in one go. What was started may be above
    // what fails.
    if !failed.is_empty() {
        let decide = |task: &Task, moment: Moment| -> Decision {
            let Some(error) = failed.get(&(task.id, task.claim)) else { return Ok(None) };
            let event = Event::StartFailed { by, claim: task.claim, failure: failure(error) };
            lifecycle::decide(task, &event, moment)
        };
        let ids: Vec<Uuid> = answers.iter().map(|answer| answer.claim.0).collect();
        let locked = lock::unlocked_tasks(&mut tx, &ids).await?;
        let unlocked: HashSet<Uuid> = locked.tasks.iter().map(|task| task.id).collect();
        let missing: Vec<Uuid> = failed.keys().map(|(id, _)| *id).filter(|id| !unlocked.contains(id)).collect();
        if !missing.is_empty() {
            let there = details::existing(&mut tx, &missing).await?;
            busy.extend(failed.keys().filter(|(id, _)| there.contains(id)));
        }
        let locked = dead_ends::lock_ancestors(&mut tx, locked, decide).await?;
        let decided: Vec<Transition> =
            locked.tasks.iter().filter_map(|task| decide(task, locked.moment).ok().flatten()).collect();
        transitions::apply(&mut tx, &decided, locked.moment).await?;
    }
    if !started.is_empty() {
        let written = transitions::started(&mut tx, &started).await?;
        actions.retain(|cancel| !written.busy.contains(&cancel.claim));
        outbox::keep_cancel_actions(&mut tx, &actions).await?;
        if !written.busy.is_empty() {
            // One that is not there any more is in nobody's hands.
            let ids: Vec<Uuid> = written.busy.iter().map(|(id, _)| *id).collect();
            let there = details::existing(&mut tx, &ids).await?;
            busy.extend(written.busy.into_iter().filter(|(id, _)| there.contains(id)));
        }
    }
    tx.commit().await?;
    Ok(busy)
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
