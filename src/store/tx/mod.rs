//! A transaction that keeps book. Whatever moves tasks tells it, and the commit settles all of it at once: the
//! slots of rules, the counters of batches (rows locked in the order of their ids, last of all locks), the audit trail,
//! the statistics, the completion of batches, and after the commit the wake-ups and the metrics. Nobody can forget one of them.

pub mod deferred;
pub(super) mod pool;
pub(super) mod session;
pub(super) mod settle;

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

use super::admission::{matchers, slots};
use super::batches::completion;
use super::ledger::events::Move;
use super::ledger::retry_stats;
use super::{Result, Session, Store};
use crate::domain::task::status::Status;
use crate::wake::Hints;
use pool::PooledConnection;
use session::wanted;
use settle::{BatchDelta, Moves, SumDeltas, settle};

/// Ends by [`Tx::commit`] or [`Tx::rollback`]. One that is dropped instead, because its request was broken off or a
/// statement failed, takes its connection with it: the server then rolls back. (A transaction of the library's own
/// goes back to the pool still open when it is dropped while it begins.)
pub struct Tx {
    connection: PooledConnection,
    ended: bool,
    pub(super) store: Store,
    session: Session,
    /// What was left of the session's time when the server was last told.
    told: Duration,
    actor: Actor,
    changes: Changes,
}

/// On whose behalf a transaction moves tasks, as the audit trail names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Actor {
    /// A request that does not say whose it is.
    Api,
    Loop(&'static str),
    /// As the request says.
    Person(String),
}

impl Actor {
    fn name(&self) -> &str {
        match self {
            Actor::Api => "api",
            Actor::Loop(name) => name,
            Actor::Person(name) => name,
        }
    }
}

#[derive(Default)]
struct Changes {
    moves: Moves,
    /// Batches in which something came back to life.
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

/// A transaction waits for nobody but the server. If its instance is stopped or cut off in the middle of it, the server
/// must not keep its locks for as long as that lasts. Set with each transaction and not with the connection, which a
/// pooler in between may give to others. The same holds for just-in-time compilation: the server takes the recursive
/// queries of a cascade for far larger than they are, and compiled for a second what then ran for milliseconds. And for
/// reading tables or indexes whole: nothing here wants that, but a plan that was made while a table was nearly empty does
/// it, and is kept until the table is analyzed. So looking up a row by its key is said to cost nearly nothing.
const CHANGES: &str = "begin; set local idle_in_transaction_session_timeout = '10s'; set local jit = off; \
                       set local enable_seqscan = off; set local random_page_cost = 0.01";
/// Lists count on more rows than a page has: their plans would be compiled, for longer than they run.
const READS: &str = "begin read only; set local jit = off";
const SNAPSHOT: &str = "begin isolation level repeatable read read only";
const RELAXED: &str = "; set local synchronous_commit = off";

impl Session {
    pub async fn begin(&self, actor: Actor) -> Result<Tx> {
        self.open(CHANGES, "", actor).await
    }

    /// For leases: nobody was promised one, and losing it in a crash only means to take it again.
    pub async fn begin_lease(&self, actor: Actor) -> Result<Tx> {
        self.open(CHANGES, RELAXED, actor).await
    }

    /// A claim is a lease, too. Holds the gate of `matchers` shared.
    pub async fn begin_claim(&self, actor: Actor) -> Result<Tx> {
        let shared = format!("{RELAXED}; select pg_advisory_xact_lock_shared({})", matchers::CLAIM_LOCK);
        self.open(CHANGES, &shared, actor).await
    }

    pub(super) async fn begin_read(&self) -> Result<Tx> {
        self.open(READS, "", Actor::Api).await
    }

    /// For looking only: all statements see the same moment.
    pub(super) async fn begin_snapshot(&self) -> Result<Tx> {
        self.open(SNAPSHOT, "", Actor::Api).await
    }

    async fn open(&self, begin: &str, then: &str, actor: Actor) -> Result<Tx> {
        let connection = wanted(self.store.pool.take()).await??;
        let told = self.left()?;
        let (store, session) = (self.store.clone(), self.clone());
        let mut tx = Tx { connection, ended: false, store, session, told, actor, changes: Changes::default() };
        tx.open(begin, then).await?;
        Ok(tx)
    }
}

impl Tx {
    /// The connection, for the next statement. Where the transaction has taken long already the server is told how much
    /// is left, so that no statement outlives us there.
    pub(super) async fn conn(&mut self) -> Result<&mut PgConnection> {
        let left = self.session.left()?;
        if left < self.told.mul_f64(0.7) {
            self.told = left;
            let limits = self.limits();
            sqlx::raw_sql(AssertSqlSafe(limits)).execute(self.connection.get()?).await?;
        }
        self.connection.get()
    }

    fn limits(&self) -> String {
        let limits = self.session.limits(self.told);
        format!("set local lock_timeout = {}; set local statement_timeout = {}", limits.lock_ms, limits.statement_ms)
    }

    /// The limits come first: what is waited for right at the beginning has them, too.
    async fn open(&mut self, begin: &str, then: &str) -> Result<()> {
        let statement = format!("{begin}; {}{then}", self.limits());
        sqlx::raw_sql(AssertSqlSafe(statement)).execute(self.connection.get()?).await?;
        Ok(())
    }

    async fn simple(&mut self, statement: &'static str) -> Result<()> {
        sqlx::raw_sql(statement).execute(self.connection.get()?).await?;
        Ok(())
    }

    /// Whether counters that somebody else holds are settled later instead of waited for.
    pub(super) fn defers(&self) -> bool {
        self.session.defers()
    }

    /// A task has made a move. New tasks bring their batch's counters with them.
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
            // Whoever made it knows whether it can start.
            Status::Pending if made.from.is_none() => {}
            Status::Pending => {
                self.hint(Hints::START);
                // It may have to wait for its `run_at` first, which the retry loop looks after.
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

    /// A batch's counters were found to be wrong by so much.
    pub(super) fn correct_batch(&mut self, id: Uuid, by_status: [i32; 9], sums: SumDeltas, reopened: bool) {
        self.changes.moves.batches.insert(id, BatchDelta { by_status, sums });
        if reopened {
            self.changes.reopened.insert(id);
        }
    }

    /// The counts by status were found to be wrong by so much.
    pub(super) fn correct_totals(&mut self, deltas: [i64; 9]) {
        self.changes.moves.total = deltas;
    }

    /// The counters of a task have changed by so much. New tasks bring their batch's sums with them.
    pub(super) fn summed(&mut self, batch_id: Uuid, by: SumDeltas) {
        if by == SumDeltas::default() {
            return;
        }
        let sums = &mut self.changes.moves.batches.entry(batch_id).or_default().sums;
        sums.success += by.success;
        sums.failures += by.failures;
        sums.expected += by.expected;
    }

    /// Tasks were deleted.
    pub(super) fn deleted(&mut self, status: Status, count: i64) {
        self.changes.moves.total[status.index()] -= count;
    }

    /// A task has taken a slot (1) or released it (-1), or has more or less to do while it holds it.
    pub(super) fn slot(&mut self, id: i64, used: i32, load: i64) {
        let delta = self.changes.slots.entry(id).or_default();
        delta.0 += used;
        delta.1 += load;
    }

    pub(super) fn stats(&mut self) -> &mut retry_stats::RetryStatDeltas {
        &mut self.changes.stats
    }

    pub(super) fn hint(&mut self, hint: Hints) {
        self.changes.hints.add(hint);
    }

    /// A metric that counts only if the transaction takes effect.
    pub(super) fn count(&mut self, name: &'static str, labels: Vec<(&'static str, String)>, n: u64) {
        self.changes.counters.push(MetricIncrement { name, labels, n });
    }

    pub async fn commit(mut self) -> Result<()> {
        let mut changes = std::mem::take(&mut self.changes);
        if slots::settle(&mut self, &changes.slots).await? {
            changes.hints.add(Hints::START);
        }
        retry_stats::add(&mut self, &changes.stats, changes.now).await?;
        // Counters of batches are the last locks, also where they are not waited for.
        if self.defers() {
            deferred::defer(&mut self, &mut changes.moves.batches, &mut changes.hints).await?;
        }
        let finished = settle(&mut self, &changes.moves, changes.now).await?;
        completion::settle(&mut self, &changes.reopened, finished, &mut changes.hints).await?;
        self.simple("commit").await?;
        self.ended = true;
        self.store.wake.notify_all(changes.hints);
        for ((from, to), n) in changes.transitions {
            let labels = [("from", from.as_str()), ("to", to.as_str())];
            metrics::counter!("reprise_transitions_total", &labels).increment(n);
        }
        for MetricIncrement { name, labels, n } in changes.counters {
            metrics::counter!(name, &labels).increment(n);
        }
        Ok(())
    }

    /// Gives back every lock and begins anew. Nothing may have been written.
    pub(super) async fn anew(&mut self) -> Result<()> {
        self.open(&format!("rollback; {CHANGES}"), "").await
    }

    pub async fn rollback(mut self) -> Result<()> {
        self.simple("rollback").await?;
        self.ended = true;
        Ok(())
    }

    pub(super) fn actor(&self) -> String {
        self.actor.name().to_owned()
    }
}

impl Drop for Tx {
    fn drop(&mut self) {
        if !self.ended {
            self.connection.close();
        }
    }
}
