//! The only place with SQL. [`Store`] is the way in, [`Tx`] a transaction that knows what it changed and settles
//! counters, wake-ups and metrics when it commits.

/// Which pending tasks may start: rules, their slots, and turns between fair keys.
pub mod admission;
/// Batches, and requests that may be repeated.
pub mod batches;
mod error;
/// Walks along dependencies: up from dead ends, down from manual retries.
pub mod graph;
/// What happened, in rows and in counters, and the audit of those counters.
pub mod ledger;
/// Wake-ups from other instances.
pub mod listen;
/// The schema.
pub mod migrate;
/// Times during which no instance could take reports.
pub mod outages;
/// Notifications to be delivered.
pub mod outbox;
/// Pages of lists.
pub mod page;
/// Default retry policies by kind.
pub mod policies;
/// Deletion of old batches.
pub mod retention;
mod secret;
/// Tasks: creating, locking, moving and reading them.
pub mod tasks;
/// Transactions, and the connections and sessions they need.
pub mod tx;

use std::ops::Deref;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::clock::Clock;
use crate::domain::retry;
use crate::wake::Wake;

use tx::pool::Pool;

pub use error::{Error, Result};
pub use tx::session::{Patience, Session, unconditionally, while_wanted};
pub use tx::{Actor, Tx};

/// What a transaction may take, unless it is said otherwise.
const LIMIT: Duration = Duration::from_secs(30);

/// A pool of connections and what every statement needs to know of its instance.
#[derive(Clone, Debug)]
pub struct Store(Arc<StoreInner>);

#[derive(Clone, Debug)]
pub struct StoreInner {
    pool: Pool,
    /// Places for those who only look: however slow their queries are, connections are left for those who change.
    readers: Arc<Semaphore>,
    /// Places for those who wait for a lock: however many want one row, connections are left for the others.
    waiters: Arc<Semaphore>,
    limit: Duration,
    clock: Clock,
    wake: Wake,
    instance: Uuid,
    retry: retry::RetryLimits,
    policies: policies::PolicyCache,
    matchers: admission::matchers::MatcherCache,
    fair: admission::fairness::InUse,
    ids: tasks::ids::Ids,
}

impl Deref for Store {
    type Target = StoreInner;

    fn deref(&self) -> &StoreInner {
        &self.0
    }
}

impl Store {
    /// Does not connect yet: a database that is down is found out by the first query.
    pub fn new(
        url: &str,
        max_connections: u32,
        clock: Clock,
        retry: retry::RetryLimits,
    ) -> std::result::Result<Store, String> {
        let wrong = |why: String| format!("DATABASE_URL: must be a URL such as postgres://user@host/database: {why}");
        if !["postgres://", "postgresql://"].iter().any(|scheme| url.starts_with(scheme)) {
            return Err(wrong("it starts otherwise".into()));
        }
        let options = PgConnectOptions::from_str(url)
            .map_err(|error| wrong(error.to_string()))?
            .application_name("reprise")
            // Changes nothing since PostgreSQL 12, and poolers refuse it.
            .extra_float_digits(None);
        let (readers, waiters) = places(max_connections);
        Ok(Store(Arc::new(StoreInner {
            pool: Pool::new(options, max_connections),
            readers,
            waiters,
            limit: LIMIT,
            clock,
            wake: Wake::default(),
            instance: Uuid::now_v7(),
            retry,
            policies: policies::PolicyCache::default(),
            matchers: admission::matchers::MatcherCache::default(),
            fair: admission::fairness::InUse::default(),
            ids: tasks::ids::Ids::default(),
        })))
    }

    /// The same with connections of its own: however many requests there are, the loops and their leases go on.
    #[must_use]
    pub fn with_own_pool(&self, max_connections: u32) -> Store {
        let pool = Pool::new(self.pool.options().clone(), max_connections);
        let (readers, waiters) = places(max_connections);
        Store(Arc::new(StoreInner { pool, readers, waiters, ..StoreInner::clone(self) }))
    }

    /// The same with another limit for what a transaction may take.
    #[must_use]
    pub fn with_limit(&self, limit: Duration) -> Store {
        Store(Arc::new(StoreInner { limit, ..StoreInner::clone(self) }))
    }

    pub fn limit(&self) -> Duration {
        self.limit
    }

    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    pub fn wake(&self) -> &Wake {
        &self.wake
    }

    /// The id of this process among those that share the database.
    pub fn instance(&self) -> Uuid {
        self.instance
    }

    /// Whether a connection can be had and answers, soon.
    pub async fn ping(&self) -> Result<()> {
        let soon = self.with_limit(self.limit.min(Duration::from_secs(2)));
        soon.reading(async |tx| {
            sqlx::query("select 1").execute(tx.conn().await?).await?;
            Ok(())
        })
        .await
    }

    /// Connections open and idle.
    pub fn pool_use(&self) -> (usize, usize) {
        self.pool.usage()
    }

    pub fn close(&self) {
        self.pool.close();
    }
}

/// Of a pool of this size: places for readers and for those who wait for locks, each less than the whole.
fn places(connections: u32) -> (Arc<Semaphore>, Arc<Semaphore>) {
    let share = |of: u32| Arc::new(Semaphore::new(usize::try_from((connections / of).max(1)).unwrap_or(1)));
    (share(2), share(3))
}
