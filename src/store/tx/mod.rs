//! A transaction that keeps its counters. Every statement that moves tasks reports the moves to it, and the commit
//! settles them at once: the slots of rules, the statistics, the audit trail, the counters of batches (the last locks,
//! in the order of their ids), and the completion of batches; after the commit, the wake-ups and the metrics. No caller
//! can forget one of them. A transaction never decides a move itself.

pub mod deferred;
pub(super) mod pool;
pub(super) mod session;
pub(super) mod settle;

use std::collections::{BTreeSet, HashMap};
use std::fmt::{self, Display};
use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

use super::batches::completion;
use super::ledger::events::Move;
use super::ledger::retry_stats;
use super::rules::{matchers, slots};
use super::{Result, Session, Store};
use crate::domain::task::status::Status;
use crate::wake::Hints;
use pool::PooledConnection;
use session::unless_canceled;
use settle::{BatchDelta, Moves, SumDeltas, settle};

/// A transaction, which ends by [`Tx::commit`] or [`Tx::rollback`]. Dropping it instead, because its request was
/// canceled or a statement failed, closes its connection, and the server rolls back. (A transaction of the sqlx library
/// would return to the pool still open when it is dropped while it begins.)
pub struct Tx {
    connection: PooledConnection,
    ended: bool,
    pub(super) store: Store,
    session: Session,
    /// The time that the session had left when the server's limits were last set.
    limits_set_for: Duration,
    actor: Actor,
    changes: Changes,
}

/// The originator of a transaction, as the audit trail names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Actor {
    /// An API request that names no caller.
    Api,
    /// A background loop, by its name.
    Loop(&'static str),
    /// The caller that an API request names.
    Person(String),
}

impl Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Actor::Api => "api",
            Actor::Loop(name) => name,
            Actor::Person(name) => name,
        })
    }
}

#[derive(Default)]
struct Changes {
    moves: Moves,
    /// Batches in which a task came back to life.
    reopened: BTreeSet<Uuid>,
    transitions: HashMap<(Status, Status), u64>,
    stats: retry_stats::RetryStatDeltas,
    slots: slots::SlotDeltas,
    counters: Vec<MetricIncrement>,
    hints: Hints,
    now: Option<DateTime<Utc>>,
}

struct MetricIncrement {
    name: &'static str,
    labels: Vec<(&'static str, String)>,
    n: u64,
}

/// Begins a transaction that writes. The settings belong to the transaction and not to the connection, which a pooler
/// may give to other clients.
///
/// - A transaction waits for nothing but the server. If its instance is stopped or cut off in the middle, the server
///   must not keep its locks: the idle timeout ends it.
/// - No just-in-time compilation: PostgreSQL overestimates the recursive queries of a cascade, and spent a second compiling
///   what ran for milliseconds.
/// - No reading of whole tables or indexes: no statement here needs it, but a plan made while a table was nearly empty
///   does it, and is kept until the table is analyzed. So a lookup by key is declared to cost nearly nothing.
const CHANGES: &str = "begin; set local idle_in_transaction_session_timeout = '10s'; set local jit = off; \
                       set local enable_seqscan = off; set local random_page_cost = 0.01";
/// Begins a transaction that reads. The planner expects more rows of a list than a page has, and would compile its plan
/// for longer than the query runs.
const READS: &str = "begin read only; set local jit = off";
const SNAPSHOT: &str = "begin isolation level repeatable read read only";
const RELAXED: &str = "; set local synchronous_commit = off";

impl Session {
    /// Begins a transaction that writes.
    pub async fn begin(&self, actor: Actor) -> Result<Tx> {
        self.open(CHANGES, "", actor).await
    }

    /// Begins a transaction whose commit does not wait for the disk. For leases: no client was promised one, and a
    /// lease lost in a crash is taken again.
    pub async fn begin_lease(&self, actor: Actor) -> Result<Tx> {
        self.open(CHANGES, RELAXED, actor).await
    }

    /// Begins a claim: a lease that also holds the claim lock ([`matchers::CLAIM_LOCK`]) shared.
    pub async fn begin_claim(&self, actor: Actor) -> Result<Tx> {
        let shared = format!("{RELAXED}; select pg_advisory_xact_lock_shared({})", matchers::CLAIM_LOCK);
        self.open(CHANGES, &shared, actor).await
    }

    /// Begins a read-only transaction.
    pub(super) async fn begin_read(&self) -> Result<Tx> {
        self.open(READS, "", Actor::Api).await
    }

    /// Begins a read-only transaction whose statements all see the same snapshot.
    pub(super) async fn begin_snapshot(&self) -> Result<Tx> {
        self.open(SNAPSHOT, "", Actor::Api).await
    }

    async fn open(&self, begin: &str, then: &str, actor: Actor) -> Result<Tx> {
        let connection = unless_canceled(self.store.pool.take()).await??;
        let limits_set_for = self.time_left()?;
        let (store, session) = (self.store.clone(), self.clone());
        let mut tx =
            Tx { connection, ended: false, store, session, limits_set_for, actor, changes: Changes::default() };
        tx.open(begin, then).await?;
        Ok(tx)
    }
}

impl Tx {
    /// Returns the connection for the next statement. A transaction that has already taken long first sets the server's
    /// limits to the time left, so that no statement outlives the session.
    pub(super) async fn conn(&mut self) -> Result<&mut PgConnection> {
        let left = self.session.time_left()?;
        if left < self.limits_set_for.mul_f64(0.7) {
            self.limits_set_for = left;
            let limits = self.limits();
            sqlx::raw_sql(AssertSqlSafe(limits)).execute(self.connection.get()?).await?;
        }
        self.connection.get()
    }

    fn limits(&self) -> String {
        let limits = self.session.limits(self.limits_set_for);
        format!("set local lock_timeout = {}; set local statement_timeout = {}", limits.lock_ms, limits.statement_ms)
    }

    /// Begins the transaction. The limits come first, so that they hold for a lock in `then` too.
    async fn open(&mut self, begin: &str, then: &str) -> Result<()> {
        let statement = format!("{begin}; {}{then}", self.limits());
        sqlx::raw_sql(AssertSqlSafe(statement)).execute(self.connection.get()?).await?;
        Ok(())
    }

    async fn simple(&mut self, statement: &'static str) -> Result<()> {
        sqlx::raw_sql(statement).execute(self.connection.get()?).await?;
        Ok(())
    }

    /// Whether the transaction defers the counters that another transaction has locked, instead of waiting for them.
    pub(super) fn defers(&self) -> bool {
        self.session.defers()
    }

    /// Reports the move of a task. The counters of a new batch are inserted with it and count its tasks already.
    pub(super) fn moved(&mut self, id: Uuid, made: Move, now: DateTime<Utc>) {
        let changes = &mut self.changes;
        changes.now = changes.now.max(Some(now));
        if made.from == Some(made.to) {
            return;
        }
        changes.moves.total[made.to.index()] += 1;
        if let Some(from) = made.from {
            let counts = &mut changes.moves.batches.entry(made.batch_id).or_default().by_status;
            counts[from.index()] -= 1;
            counts[made.to.index()] += 1;
            changes.moves.total[from.index()] -= 1;
            *changes.transitions.entry((from, made.to)).or_default() += 1;
            if from.is_terminal() && !made.to.is_terminal() {
                changes.reopened.insert(made.batch_id);
            }
        }
        match made.to {
            // `create` sends the hint: it knows whether the new task can start.
            Status::Pending if made.from.is_none() => {}
            Status::Pending => {
                self.hint(Hints::START);
                // The task may have to wait for its `run_at` first, which is the retry loop's work.
                if matches!(made.from, Some(Status::Waiting | Status::Paused)) {
                    self.hint(Hints::RETRY);
                }
            }
            Status::RetryPending => self.hint(Hints::RETRY),
            Status::Running => self.hint(Hints::TIMEOUT),
            _ => {}
        }
        self.changes.moves.trail.add(id, made);
    }

    /// Changes the counters of a batch by exactly these deltas. For repairs, merges and deletions.
    pub(super) fn correct_batch(&mut self, id: Uuid, by_status: [i32; 9], sums: SumDeltas, reopened: bool) {
        self.changes.moves.batches.insert(id, BatchDelta { by_status, sums });
        if reopened {
            self.changes.reopened.insert(id);
        }
    }

    /// Changes the counts by status by exactly these deltas. For repairs.
    pub(super) fn correct_totals(&mut self, deltas: [i64; 9]) {
        self.changes.moves.total = deltas;
    }

    /// Reports that the counters of a task have changed. The sums of a new batch are inserted with it.
    pub(super) fn summed(&mut self, batch_id: Uuid, by: SumDeltas) {
        if by == SumDeltas::default() {
            return;
        }
        let sums = &mut self.changes.moves.batches.entry(batch_id).or_default().sums;
        sums.success += by.success;
        sums.failures += by.failures;
        sums.expected += by.expected;
    }

    /// Reports the deletion of tasks.
    pub(super) fn deleted(&mut self, status: Status, count: i64) {
        self.changes.moves.total[status.index()] -= count;
    }

    /// Reports that a task has taken a slot (`used` is 1) or released it (-1), or that its remaining work has changed
    /// by `load` while it holds the slot.
    pub(super) fn slot(&mut self, id: i64, used: i32, load: i64) {
        let delta = self.changes.slots.entry(id).or_default();
        delta.0 += used;
        delta.1 += load;
    }

    /// Returns the statistics that the commit writes.
    pub(super) fn stats(&mut self) -> &mut retry_stats::RetryStatDeltas {
        &mut self.changes.stats
    }

    /// Wakes a loop after the commit.
    pub(super) fn hint(&mut self, hint: Hints) {
        self.changes.hints.add(hint);
    }

    /// Increments a metric after the commit.
    pub(super) fn count(&mut self, name: &'static str, labels: Vec<(&'static str, String)>, n: u64) {
        self.changes.counters.push(MetricIncrement { name, labels, n });
    }

    /// Settles all reported changes, commits, then wakes loops and increments metrics.
    pub async fn commit(mut self) -> Result<()> {
        let mut changes = std::mem::take(&mut self.changes);
        if slots::settle(&mut self, &changes.slots).await? {
            changes.hints.add(Hints::START);
        }
        retry_stats::add(&mut self, &changes.stats, changes.now).await?;
        // Counters of batches are the last locks, even when the transaction does not wait for them.
        if self.defers() {
            deferred::defer(&mut self, &mut changes.moves.batches, &mut changes.hints).await?;
        }
        let finished = settle(&mut self, &changes.moves, changes.now).await?;
        let completed = completion::settle(&mut self, &changes.reopened, finished, &mut changes.hints).await?;
        self.simple("commit").await?;
        self.ended = true;
        self.store.wake.notify_all(changes.hints);
        self.store.awaiting.committed(&changes.moves.trail, &completed);
        for ((from, to), n) in changes.transitions {
            let labels = [("from", from.as_str()), ("to", to.as_str())];
            metrics::counter!("reprise_transitions_total", &labels).increment(n);
        }
        for MetricIncrement { name, labels, n } in changes.counters {
            metrics::counter!(name, &labels).increment(n);
        }
        Ok(())
    }

    /// Releases every lock and begins the transaction again. Nothing may have been written.
    pub(super) async fn restart(&mut self) -> Result<()> {
        self.open(&format!("rollback; {CHANGES}"), "").await
    }

    pub async fn rollback(mut self) -> Result<()> {
        self.simple("rollback").await?;
        self.ended = true;
        Ok(())
    }

    pub(super) fn actor(&self) -> String {
        self.actor.to_string()
    }
}

impl Drop for Tx {
    fn drop(&mut self) {
        if !self.ended {
            self.connection.close();
        }
    }
}
