//! Writes the answers to `on_start`, many in one transaction. An answer is never lost because the database is
//! unavailable or another transaction has locked the task: the writer keeps it, writes the others and tries again.

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
const WRITE_LIMIT: usize = 200;
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The answer to a call of `on_start`, or the error of the call.
pub struct StartAnswer {
    pub(super) claim: ClaimId,
    pub(super) run: i32,
    pub(super) result: Result<Option<Action>, CallError>,
    /// Why the cancel action of a 2xx answer was ignored.
    pub(super) ignored: Option<String>,
}

/// An answer that could not be written yet.
struct UnwrittenAnswer {
    answer: StartAnswer,
    retry_at: Instant,
    pause: Duration,
}

/// Receives the answers from the calls and writes them.
pub struct AnswerWriter {
    store: Store,
    held: HeldClaims,
    incoming: mpsc::UnboundedReceiver<StartAnswer>,
    unwritten: Vec<UnwrittenAnswer>,
}

impl AnswerWriter {
    pub(super) fn new(store: Store, held: HeldClaims, incoming: mpsc::UnboundedReceiver<StartAnswer>) -> AnswerWriter {
        AnswerWriter { store, held, incoming, unwritten: Vec::new() }
    }

    /// Runs until all senders are dropped, that is, until the caller and its calls have ended, and all answers are
    /// written.
    pub async fn run(mut self) {
        while self.write_some().await {}
    }

    /// Waits for answers and writes those that have arrived. Returns false when no more can arrive.
    pub async fn write_some(&mut self) -> bool {
        let mut new = Vec::new();
        let retry_at = self.unwritten.iter().map(|unwritten| unwritten.retry_at).min();
        match retry_at {
            None => {
                if self.incoming.recv_many(&mut new, WRITE_LIMIT).await == 0 {
                    return false;
                }
            }
            Some(retry_at) => tokio::select! {
                count = self.incoming.recv_many(&mut new, WRITE_LIMIT) => {
                    if count == 0 {
                        tokio::time::sleep_until(retry_at).await;
                    }
                }
                () = tokio::time::sleep_until(retry_at) => {}
            },
        }
        let now = Instant::now();
        let (due, not_due): (Vec<UnwrittenAnswer>, Vec<UnwrittenAnswer>) =
            self.unwritten.drain(..).partition(|unwritten| unwritten.retry_at <= now);
        self.unwritten = not_due;
        let pauses: HashMap<ClaimId, Duration> = due.iter().map(|due| (due.answer.claim, due.pause)).collect();
        let answers: Vec<StartAnswer> = new.into_iter().chain(due.into_iter().map(|due| due.answer)).collect();
        let failed = self.write(&answers).await;
        let (left, written): (Vec<StartAnswer>, Vec<StartAnswer>) =
            answers.into_iter().partition(|answer| failed.contains(&answer.claim));
        self.held.remove(written.iter().map(|answer| answer.claim));
        for answer in left {
            let pause = pauses.get(&answer.claim).map_or(FIRST_PAUSE, |pause| (*pause * 2).min(LONGEST_PAUSE));
            self.unwritten.push(UnwrittenAnswer { answer, retry_at: Instant::now() + pause, pause });
        }
        self.store.wake().notify_local(Hints::START);
        true
    }

    /// Writes answers in one transaction or, if that fails, in one transaction each. Returns the claims whose answers
    /// are still to be written.
    async fn write(&self, answers: &[StartAnswer]) -> HashSet<ClaimId> {
        static LIMIT: LogLimit = LogLimit::new();
        let error = match self.store.retrying(Patience::Brief, |session| write(session, answers)).await {
            Ok(busy) => return busy,
            Err(error) => error,
        };
        if error.is_unavailable() {
            if let Some(suppressed) = LIMIT.allows() {
                tracing::warn!(%error, answers = answers.len(), suppressed, "answers to on_start not written yet");
            }
            return answers.iter().map(|answer| answer.claim).collect();
        }
        if !error.is_busy() {
            tracing::error!(%error, answers = answers.len(), "batch of answers to on_start not written");
        }
        let mut unwritten = HashSet::new();
        for one in answers {
            let written = self.store.retrying(Patience::Least, |session| write(session, std::slice::from_ref(one)));
            match written.await {
                Ok(busy) => unwritten.extend(busy),
                Err(error) if error.is_unavailable() => {
                    // Writing an answer a second time changes nothing, because its claim has moved on.
                    return answers.iter().map(|answer| answer.claim).collect();
                }
                Err(error) if error.is_busy() || error.is_unavailable() || error.is_transient() => {
                    unwritten.insert(one.claim);
                }
                Err(error) => {
                    // The timeout loop returns the task to the queue when its lease ends.
                    tracing::error!(task.id = %one.claim.0, %error, "answer to on_start lost");
                }
            }
        }
        unwritten
    }
}

/// Writes answers in one transaction. Returns the claims whose rows another transaction has locked, for which nothing
/// was written.
async fn write(session: Session, answers: &[StartAnswer]) -> store::Result<HashSet<ClaimId>> {
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
    // Failures first: their cascade locks other rows, among them perhaps ancestors that this transaction starts, and
    // all rows must be locked at once.
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
            let existing = details::existing(&mut tx, &missing).await?;
            busy.extend(failed.keys().filter(|(id, _)| existing.contains(id)));
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
            // A deleted task is not locked: its answer is done.
            let ids: Vec<Uuid> = written.busy.iter().map(|(id, _)| *id).collect();
            let existing = details::existing(&mut tx, &ids).await?;
            busy.extend(written.busy.into_iter().filter(|(id, _)| existing.contains(id)));
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
