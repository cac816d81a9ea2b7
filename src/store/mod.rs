//! The only place with SQL. [`Store`] is the way in, [`Tx`] a transaction that knows what it changed and settles
//! counters, wake-ups and metrics when it commits.

pub mod attempts;
pub mod books;
pub mod create;
pub mod dead_ends;
mod dedupe;
mod derived;
mod error;
pub mod fairness;
pub mod history;
pub mod idempotency;
mod ids;
pub mod lease;
pub mod listen;
pub mod lists;
pub mod lock;
pub mod matchers;
pub mod migrate;
pub mod outbox;
pub mod policies;
pub mod progress;
pub mod query;
pub mod retention;
pub mod retry_stats;
pub mod revival;
mod secret;
mod settle;
pub mod slots;
pub mod stats;
pub mod transitions;
mod tx;
pub mod whole;

use std::ops::Deref;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection, PgConnection, PgPool};
use uuid::Uuid;

use crate::clock::Clock;
use crate::domain::retry;
use crate::wake::Wake;

pub use error::{Error, Result};
pub use tx::{Actor, Tx};

/// What an idle connection may take to show that it is still one.
const PING: Duration = Duration::from_secs(1);
/// What a transaction may take, unless it is said otherwise.
const LIMIT: Duration = Duration::from_secs(30);

/// A pool of connections and what every statement needs to know of its instance.
#[derive(Clone, Debug)]
pub struct Store(Arc<Inner>);

#[derive(Clone, Debug)]
pub struct Inner {
    pool: PgPool,
    limit: Duration,
    clock: Clock,
    wake: Wake,
    instance: Uuid,
    retry: retry::Limits,
    policies: policies::Cache,
    matchers: matchers::Cache,
    fair: fairness::InUse,
    ids: ids::Ids,
}

impl Deref for Store {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

impl Store {
    /// Does not connect yet: a database that is down is found out by the first query.
    pub fn new(
        url: &str,
        max_connections: u32,
        clock: Clock,
        retry: retry::Limits,
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
        let pool = PgPoolOptions::new()
            .max_connections(max_connections)
            .acquire_timeout(Duration::from_secs(5))
            // The pool's own test waits for an answer for as long as whoever wants the connection.
            .test_before_acquire(false)
            .before_acquire(|connection, _| Box::pin(async { Ok(answers(connection).await) }))
            .connect_lazy_with(options);
        Ok(Store(Arc::new(Inner {
            pool,
            limit: LIMIT,
            clock,
            wake: Wake::default(),
            instance: Uuid::now_v7(),
            retry,
            policies: policies::Cache::default(),
            matchers: matchers::Cache::default(),
            fair: fairness::InUse::default(),
            ids: ids::Ids::default(),
        })))
    }

    /// The same with connections of its own: however many requests there are, the loops and their leases go on.
    #[must_use]
    pub fn with_own_pool(&self, max_connections: u32) -> Store {
        let options = self.pool.connect_options().as_ref().clone();
        let pool = self.pool.options().clone().max_connections(max_connections).connect_lazy_with(options);
        Store(Arc::new(Inner { pool, ..Inner::clone(self) }))
    }

    /// The same with another limit for what a transaction may take.
    #[must_use]
    pub fn with_limit(&self, limit: Duration) -> Store {
        Store(Arc::new(Inner { limit, ..Inner::clone(self) }))
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

    /// Does what has no end of its own. A connection can fall silent without being closed: its server lost power, or
    /// somebody in between forgot it. Whatever takes longer than the limit has lost its database, and is broken off so that
    /// those behind it can go on with another connection.
    pub async fn in_time<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        match tokio::time::timeout(self.limit, work).await {
            Ok(result) => result,
            Err(_) => Err(Error::too_late(self.limit)),
        }
    }

    /// Runs `once`, in time, and again when PostgreSQL had to break it off in favour of another transaction: a client
    /// never hears of a deadlock.
    pub async fn retrying<T, F, Fut>(&self, mut once: F) -> Result<T>
    where
        F: FnMut() -> Fut,
        Fut: Future<Output = Result<T>>,
    {
        let mut tries = 0u32;
        loop {
            // On the heap, or whoever waits would carry it twice.
            match self.in_time(Box::pin(once())).await {
                Err(error) if error.is_transient() && tries < 10 => {
                    tries += 1;
                    tracing::debug!(tries, %error, "transaction repeated");
                    let most = 5u64 << tries.min(6);
                    tokio::time::sleep(Duration::from_millis(rand::random_range(0..most))).await;
                }
                result => return result,
            }
        }
    }

    pub async fn ping(&self) -> Result<()> {
        sqlx::query("select 1").execute(&self.pool).await?;
        Ok(())
    }

    /// Connections open and idle.
    pub fn pool_use(&self) -> (u32, usize) {
        (self.pool.size(), self.pool.num_idle())
    }

    pub async fn close(&self) {
        self.pool.close().await;
    }
}

async fn answers(connection: &mut PgConnection) -> bool {
    matches!(tokio::time::timeout(PING, connection.ping()).await, Ok(Ok(())))
}
