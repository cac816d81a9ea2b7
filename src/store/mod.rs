//! The only place with SQL. [`Store`] is the entry point; [`Tx`] is a transaction that knows what it changed and
//! settles counters, wake-ups and metrics when it commits. The store decides nothing about tasks (`domain` does) and
//! makes no network call except to PostgreSQL.

/// Batches, and the idempotency keys of the requests that create them.
pub mod batches;
mod error;
/// Walks along dependencies: up to dead ends, down from manual retries.
pub mod graph;
/// The history of tasks in rows and in counters, and the audit of those counters.
pub mod ledger;
/// Wake-ups from other instances.
pub mod listen;
/// Migrations of the schema.
pub mod migrate;
/// Periods in which no instance could accept reports.
pub mod outages;
/// Notifications and their delivery.
pub mod outbox;
/// Pages of lists.
pub mod page;
/// Default retry policies by kind.
pub mod policies;
/// Deletion of old batches.
pub mod retention;
/// Admission of pending tasks: rules, their slots, and turns between fair keys.
pub mod rules;
mod secret;
/// Tasks: statements that create, lock, move and read them.
pub mod tasks;
/// Transactions, sessions and connections.
pub mod tx;
/// Requests that wait for a task or a batch.
pub mod waiters;

use std::ops::Deref;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::clock::Clock;
use crate::domain::retry;
use crate::wake::Wake;

use tx::pool::Pool;

pub use error::{Error, Result};
pub use tx::session::{Patience, Session, unless_canceled, with_cancellation, without_cancellation};
pub use tx::{Actor, Tx};

/// The time limit of a transaction, unless [`Store::with_limit`] sets another.
const LIMIT: Duration = Duration::from_secs(30);

/// A connection pool and the state of the instance that statements need. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Store(Arc<StoreInner>);

#[derive(Clone, Debug)]
pub struct StoreInner {
    pool: Pool,
    /// Permits for long reads: however slow they are, connections are left for writes.
    readers: Arc<Semaphore>,
    /// Permits to wait for a lock: however many requests want one row, connections are left for the others.
    waiters: Arc<Semaphore>,
    limit: Duration,
    clock: Clock,
    wake: Wake,
    awaiting: waiters::Waiters,
    instance: Uuid,
    retry: retry::RetryLimits,
    policies: policies::PolicyCache,
    matchers: rules::matchers::MatcherCache,
    fair_keys: rules::fairness::FairKeysInUse,
    ids: tasks::ids::Ids,
    /// Whether the last transaction of any pool reached the database.
    reachable: Arc<AtomicBool>,
}

impl Deref for Store {
    type Target = StoreInner;

    fn deref(&self) -> &StoreInner {
        &self.0
    }
}

impl Store {
    /// Creates a store without connecting: if the database is down, the first query fails.
    pub fn new(
        url: &str,
        max_connections: u32,
        clock: Clock,
        retry: retry::RetryLimits,
    ) -> std::result::Result<Store, String> {
        let invalid = |why: String| format!("DATABASE_URL: must be a URL such as postgres://user@host/database: {why}");
        if !["postgres://", "postgresql://"].iter().any(|scheme| url.starts_with(scheme)) {
            return Err(invalid("it does not start with postgres:// or postgresql://".into()));
        }
        let options = PgConnectOptions::from_str(url)
            .map_err(|error| invalid(error.to_string()))?
            .application_name("reprise")
            // The setting has no effect since PostgreSQL 12, and poolers refuse it.
            .extra_float_digits(None);
        let (readers, waiters) = permits(max_connections);
        Ok(Store(Arc::new(StoreInner {
            pool: Pool::new(options, max_connections),
            readers,
            waiters,
            limit: LIMIT,
            clock,
            wake: Wake::default(),
            awaiting: waiters::Waiters::default(),
            instance: Uuid::now_v7(),
            retry,
            policies: policies::PolicyCache::default(),
            matchers: rules::matchers::MatcherCache::default(),
            fair_keys: rules::fairness::FairKeysInUse::default(),
            ids: tasks::ids::Ids::default(),
            reachable: Arc::new(AtomicBool::new(true)),
        })))
    }

    /// Returns a store with a connection pool of its own, so that loops and leases go on however many requests there
    /// are.
    #[must_use]
    pub fn with_own_pool(&self, max_connections: u32) -> Store {
        let pool = Pool::new(self.pool.options().clone(), max_connections);
        let (readers, waiters) = permits(max_connections);
        Store(Arc::new(StoreInner { pool, readers, waiters, ..StoreInner::clone(self) }))
    }

    /// Returns a store with another time limit for transactions.
    #[must_use]
    pub fn with_limit(&self, limit: Duration) -> Store {
        Store(Arc::new(StoreInner { limit, ..StoreInner::clone(self) }))
    }

    /// The time limit of a transaction.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    pub fn wake(&self) -> &Wake {
        &self.wake
    }

    /// Returns the id of this process among the instances that share the database.
    pub fn instance(&self) -> Uuid {
        self.instance
    }

    /// Whether the last transaction reached the database.
    pub fn is_reachable(&self) -> bool {
        self.reachable.load(Ordering::Relaxed)
    }

    /// Checks within two seconds that a connection can be obtained and answers.
    pub async fn ping(&self) -> Result<()> {
        let soon = self.with_limit(self.limit.min(Duration::from_secs(2)));
        soon.reading(async |tx| {
            sqlx::query("select 1").execute(tx.conn().await?).await?;
            Ok(())
        })
        .await
    }

    /// Returns how many callers wait for locks with [`Patience::Long`].
    pub fn lock_waiters(&self) -> usize {
        lock_permits(self.pool.max_size()).saturating_sub(self.waiters.available_permits())
    }

    /// Returns the numbers of open and of idle connections.
    pub fn pool_use(&self) -> (usize, usize) {
        self.pool.usage()
    }

    /// Closes the pool: it hands out no more connections.
    pub fn close(&self) {
        self.pool.close();
    }
}

/// Permits for long reads (half of the connections) and for lock waits (a third).
fn permits(connections: u32) -> (Arc<Semaphore>, Arc<Semaphore>) {
    let connections = usize::try_from(connections).unwrap_or(1);
    let permits = |count: usize| Arc::new(Semaphore::new(count));
    (permits((connections / 2).max(1)), permits(lock_permits(connections)))
}

/// How many of so many connections may wait for locks.
fn lock_permits(connections: usize) -> usize {
    (connections / 3).max(1)
}
