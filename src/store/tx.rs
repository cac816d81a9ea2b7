//! A transaction that keeps book. Whatever moves tasks tells it, and the commit settles all of it at once: the
//! slots of rules, the counters of batches (rows locked in the order of their ids, last of all locks), the audit trail,
//! the statistics, the completion of batches, and after the commit the wake-ups and the metrics. Nobody can forget one of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use chrono::{DateTime, Utc};
use sqlx::pool::PoolConnection;
use sqlx::{PgConnection, Postgres};
use uuid::Uuid;

use super::history::{self, Trail};
use super::{Result, Store, outbox, retry_stats, slots};
use crate::domain::status::Status;
use crate::wake::Hints;

/// Ends by [`Tx::commit`] or [`Tx::rollback`]. One that is dropped instead, because its request was broken off or a
/// statement failed, takes its connection with it: the server then rolls back. (A transaction of the library's own
/// goes back to the pool still open when it is dropped while it begins.)
pub struct Tx {
    connection: PoolConnection<Postgres>,
    ended: bool,
    pub(super) store: Store,
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

/// A task that changes its status, or comes into being.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    pub id: Uuid,
    pub batch_id: Uuid,
    pub from: Option<Status>,
    pub to: Status,
    pub cause: &'static str,
    pub run: i32,
    pub attempt: i16,
}

/// What a batch's row of counters is to be changed by.
#[derive(Default)]
struct Delta {
    by_status: [i32; 9],
    sums: Sums,
}

/// Of the counters of tasks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sums {
    pub success: i64,
    pub failures: i64,
    pub expected: i64,
}

#[derive(Default)]
struct Changes {
    batches: BTreeMap<Uuid, Delta>,
    /// Batches in which something came back to life.
    reopened: BTreeSet<Uuid>,
    total: [i64; 9],
    moves: HashMap<(Status, Status), u64>,
    trail: Trail,
    stats: retry_stats::Deltas,
    slots: slots::Deltas,
    counters: Vec<Counted>,
    hints: Hints,
    now: Option<DateTime<Utc>>,
}

struct Counted {
    name: &'static str,
    labels: Vec<(&'static str, String)>,
    n: u64,
}

/// A transaction waits for nobody but the server. If its instance is stopped or cut off in the middle of it, the server
/// must not keep its locks for as long as that lasts. Set with each transaction and not with the connection, which a
/// pooler in between may give to others. The same holds for just-in-time compilation: the server takes the recursive
/// queries of a cascade for far larger than they are, and compiled for a second what then ran for milliseconds.
macro_rules! begin {
    ($rest:literal) => {
        concat!("begin; set local idle_in_transaction_session_timeout = '10s'; set local jit = off", $rest)
    };
}

impl Store {
    pub async fn begin(&self, actor: Actor) -> Result<Tx> {
        self.begin_with(begin!(""), actor).await
    }

    /// Nobody was promised a claim: losing one in a crash only means to claim again. Holds the gate of `slots` shared.
    pub async fn begin_claim(&self, actor: Actor) -> Result<Tx> {
        const { assert!(slots::GATE == 8_243_118_329_669_313_793) };
        let shared =
            begin!("; set local synchronous_commit = off; select pg_advisory_xact_lock_shared(8243118329669313793)");
        self.begin_with(shared, actor).await
    }

    /// For looking only: all statements see the same moment.
    pub(super) async fn begin_snapshot(&self, actor: Actor) -> Result<Tx> {
        self.begin_with("begin isolation level repeatable read read only", actor).await
    }

    async fn begin_with(&self, statement: &'static str, actor: Actor) -> Result<Tx> {
        let connection = self.pool.acquire().await?;
        let mut tx = Tx { connection, ended: false, store: self.clone(), actor, changes: Changes::default() };
        tx.simple(statement).await?;
        Ok(tx)
    }
}

impl Tx {
    pub(super) fn conn(&mut self) -> &mut PgConnection {
        &mut self.connection
    }

    async fn simple(&mut self, statement: &'static str) -> Result<()> {
        sqlx::raw_sql(statement).execute(self.conn()).await?;
        Ok(())
    }

    /// A task has made a move. New tasks bring their batch's counters with them.
    pub(super) fn moved(&mut self, task: Move, now: DateTime<Utc>) {
        let changes = &mut self.changes;
        changes.now = Some(now);
        if task.from == Some(task.to) {
            return;
        }
        changes.trail.add(task);
        changes.total[task.to.index()] += 1;
        if let Some(from) = task.from {
            let counts = &mut changes.batches.entry(task.batch_id).or_default().by_status;
            counts[from.index()] -= 1;
            counts[task.to.index()] += 1;
            changes.total[from.index()] -= 1;
            *changes.moves.entry((from, task.to)).or_default() += 1;
            if from.is_terminal() && !task.to.is_terminal() {
                changes.reopened.insert(task.batch_id);
            }
        }
        match task.to {
            Status::Pending => {
                self.hint(Hints::START);
                // It may have to wait for its `run_at` first, which the retry loop looks after.
                if matches!(task.from, Some(Status::Waiting | Status::Paused)) {
                    self.hint(Hints::RETRY);
                }
            }
            Status::RetryPending => self.hint(Hints::RETRY),
            Status::Running => self.hint(Hints::TIMEOUT),
            _ => {}
        }
    }

    /// A batch's counters were found to be wrong by so much.
    pub(super) fn correct_batch(&mut self, id: Uuid, by_status: [i32; 9], sums: Sums, reopened: bool) {
        self.changes.batches.insert(id, Delta { by_status, sums });
        if reopened {
            self.changes.reopened.insert(id);
        }
    }

    /// The counts by status were found to be wrong by so much.
    pub(super) fn correct_totals(&mut self, deltas: [i64; 9]) {
        self.changes.total = deltas;
    }

    /// The counters of a task have changed by so much. New tasks bring their batch's sums with them.
    pub(super) fn summed(&mut self, batch_id: Uuid, by: Sums) {
        if by == Sums::default() {
            return;
        }
        let sums = &mut self.changes.batches.entry(batch_id).or_default().sums;
        sums.success += by.success;
        sums.failures += by.failures;
        sums.expected += by.expected;
    }

    /// Tasks were deleted.
    pub(super) fn deleted(&mut self, status: Status, count: i64) {
        self.changes.total[status.index()] -= count;
    }

    /// A task has taken a slot (1) or released it (-1), or has more or less to do while it holds it.
    pub(super) fn slot(&mut self, id: i64, used: i32, load: i64) {
        let delta = self.changes.slots.entry(id).or_default();
        delta.0 += used;
        delta.1 += load;
    }

    pub(super) fn stats(&mut self) -> &mut retry_stats::Deltas {
        &mut self.changes.stats
    }

    pub(super) fn hint(&mut self, hint: Hints) {
        self.changes.hints.add(hint);
    }

    /// A metric that counts only if the transaction takes effect.
    pub(super) fn count(&mut self, name: &'static str, labels: Vec<(&'static str, String)>, n: u64) {
        self.changes.counters.push(Counted { name, labels, n });
    }

    pub async fn commit(mut self) -> Result<()> {
        let mut changes = std::mem::take(&mut self.changes);
        if slots::settle(&mut self, &changes.slots).await? {
            changes.hints.add(Hints::START);
        }
        history::insert(&mut self, &changes.trail, changes.now).await?;
        retry_stats::add(&mut self, &changes.stats, changes.now).await?;
        if changes.total.iter().any(|n| *n != 0) {
            self.settle_total(changes.total).await?;
        }
        if !changes.batches.is_empty() {
            let finished = self.settle_batches(&changes).await?;
            if !changes.reopened.is_empty() {
                outbox::reopen_batches(&mut self, &changes.reopened).await?;
            }
            if !finished.is_empty() && outbox::complete_batches(&mut self, &finished).await? {
                changes.hints.add(Hints::DELIVER);
            }
        }
        self.simple("commit").await?;
        self.ended = true;
        self.store.wake.everyone(changes.hints);
        for ((from, to), n) in changes.moves {
            let labels = [("from", from.as_str()), ("to", to.as_str())];
            metrics::counter!("reprise_transitions_total", &labels).increment(n);
        }
        for Counted { name, labels, n } in changes.counters {
            metrics::counter!(name, &labels).increment(n);
        }
        Ok(())
    }

    /// Gives back every lock and begins anew. Nothing may have been written.
    pub(super) async fn anew(&mut self) -> Result<()> {
        self.simple(concat!("rollback; ", begin!(""))).await
    }

    pub async fn rollback(mut self) -> Result<()> {
        self.simple("rollback").await?;
        self.ended = true;
        Ok(())
    }

    pub(super) fn actor(&self) -> String {
        self.actor.name().to_owned()
    }

    /// Adds up the deltas per batch; answers which batches have nothing alive any more.
    async fn settle_batches(&mut self, changes: &Changes) -> Result<Vec<Uuid>> {
        let ids: Vec<Uuid> = changes.batches.keys().copied().collect();
        let column = |i: usize| -> Vec<i32> { changes.batches.values().map(|delta| delta.by_status[i]).collect() };
        let sum =
            |of: fn(&Sums) -> i64| -> Vec<i64> { changes.batches.values().map(|delta| of(&delta.sums)).collect() };
        let now = changes.now.or(self.store.clock().param());
        let rows = sqlx::query!(
            r#"with d as (
                   select * from unnest($1::uuid[], $2::int[], $3::int[], $4::int[], $5::int[], $6::int[], $7::int[],
                                        $8::int[], $9::int[], $10::int[], $11::bigint[], $12::bigint[],
                                        $13::bigint[])
                       d(batch_id, waiting, pending, claimed, running, retry_pending, paused, success, failure,
                         canceled, total_success, total_failures, total_expected)
               ),
               locked as materialized (
                   select c.batch_id from batch_count c where c.batch_id = any($1) order by c.batch_id for update
               )
               update batch_count c set
                   waiting = c.waiting + d.waiting, pending = c.pending + d.pending, claimed = c.claimed + d.claimed,
                   running = c.running + d.running, retry_pending = c.retry_pending + d.retry_pending,
                   paused = c.paused + d.paused, success = c.success + d.success, failure = c.failure + d.failure,
                   canceled = c.canceled + d.canceled, total_success = c.total_success + d.total_success,
                   total_failures = c.total_failures + d.total_failures,
                   total_expected = c.total_expected + d.total_expected, updated_at = coalesce($14, now())
               from d
               where c.batch_id = d.batch_id and (select count(*) from locked) >= 0
               returning c.batch_id,
                   c.waiting + c.pending + c.claimed + c.running + c.retry_pending + c.paused as "alive!""#,
            &ids,
            &column(0),
            &column(1),
            &column(2),
            &column(3),
            &column(4),
            &column(5),
            &column(6),
            &column(7),
            &column(8),
            &sum(|sums| sums.success),
            &sum(|sums| sums.failures),
            &sum(|sums| sums.expected),
            now,
        )
        .fetch_all(self.conn())
        .await?;
        Ok(rows.into_iter().filter(|row| row.alive == 0).map(|row| row.batch_id).collect())
    }

    async fn settle_total(&mut self, n: [i64; 9]) -> Result<()> {
        sqlx::query!(
            "insert into status_count as s (shard, waiting, pending, claimed, running, retry_pending, paused,
                                            success, failure, canceled)
             values (pg_backend_pid() % 16, $1, $2, $3, $4, $5, $6, $7, $8, $9)
             on conflict (shard) do update set
                 waiting = s.waiting + excluded.waiting, pending = s.pending + excluded.pending,
                 claimed = s.claimed + excluded.claimed, running = s.running + excluded.running,
                 retry_pending = s.retry_pending + excluded.retry_pending, paused = s.paused + excluded.paused,
                 success = s.success + excluded.success, failure = s.failure + excluded.failure,
                 canceled = s.canceled + excluded.canceled",
            n[0],
            n[1],
            n[2],
            n[3],
            n[4],
            n[5],
            n[6],
            n[7],
            n[8],
        )
        .execute(self.conn())
        .await?;
        Ok(())
    }
}

impl Drop for Tx {
    fn drop(&mut self) {
        if !self.ended {
            self.connection.close_on_drop();
        }
    }
}
