//! The connection pool of an instance. A connection can fall silent without being closed: its server lost power, or a
//! network device in between forgot it. So nothing here may wait for a connection without a limit. A connection that is
//! given up is dropped at once: its socket closes and its place in the pool is free, without notifying the server.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use deadpool::Runtime;
use deadpool::managed::{self, Metrics, Object, PoolError, QueueMode, RecycleError, RecycleResult, Timeouts};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection};

use crate::store::{Error, Result};

/// How long an idle connection may take to answer a ping.
const PING: Duration = Duration::from_secs(1);
/// How long opening a connection, or waiting for an idle one, may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections older than this are replaced, because the server never frees what it caches for them.
const LIFETIME: Duration = Duration::from_secs(30 * 60);

/// A bounded number of connections, opened when they are needed.
#[derive(Clone, Debug)]
pub(in crate::store) struct Pool {
    inner: managed::Pool<Manager>,
}

/// A connection in use. Dropping it returns it to the pool, unless it is closed first.
pub(in crate::store) struct PooledConnection(Option<Object<Manager>>);

#[derive(Debug)]
struct Manager {
    options: PgConnectOptions,
    /// When a connection was last found silent. Connections idle since before that are dropped without a ping.
    silence: Mutex<Option<Instant>>,
}

impl managed::Manager for Manager {
    type Type = PgConnection;
    type Error = sqlx::Error;

    async fn create(&self) -> Result<PgConnection, sqlx::Error> {
        // On the heap: otherwise every future that waits for a connection holds 30 KB for opening one.
        Box::pin(PgConnection::connect_with(&self.options)).await
    }

    async fn recycle(&self, connection: &mut PgConnection, metrics: &Metrics) -> RecycleResult<sqlx::Error> {
        let last_used = Instant::now().checked_sub(metrics.last_used());
        let silence = || self.silence.lock().unwrap_or_else(PoisonError::into_inner);
        if metrics.age() > LIFETIME {
            return Err(RecycleError::message("too old"));
        }
        if silence().is_some_and(|silence| last_used.is_none_or(|used| used < silence)) {
            return Err(RecycleError::message("idle since before a silence"));
        }
        let Ok(answer) = tokio::time::timeout(PING, connection.ping()).await else {
            *silence() = Some(Instant::now());
            return Err(RecycleError::message("silent"));
        };
        Ok(answer?)
    }
}

impl Pool {
    pub fn new(options: PgConnectOptions, size: u32) -> Pool {
        let manager = Manager { options, silence: Mutex::default() };
        let timeouts = Timeouts { wait: Some(CONNECT_TIMEOUT), create: Some(CONNECT_TIMEOUT), recycle: None };
        let builder = managed::Pool::builder(manager)
            .max_size(usize::try_from(size).unwrap_or(1))
            .timeouts(timeouts)
            .queue_mode(QueueMode::Lifo)
            .runtime(Runtime::Tokio1);
        Pool { inner: builder.build().expect("time limits come with a runtime") }
    }

    pub fn options(&self) -> &PgConnectOptions {
        &self.inner.manager().options
    }

    pub fn max_size(&self) -> usize {
        self.inner.status().max_size
    }

    /// Returns the numbers of open and of idle connections.
    pub fn usage(&self) -> (usize, usize) {
        let status = self.inner.status();
        (status.size, status.available.min(status.size))
    }

    /// Takes an idle connection or opens one.
    pub async fn take(&self) -> Result<PooledConnection> {
        match self.inner.get().await {
            Ok(connection) => Ok(PooledConnection(Some(connection))),
            Err(PoolError::Backend(error)) => Err(error.into()),
            Err(PoolError::Closed) => Err(sqlx::Error::PoolClosed.into()),
            Err(_) => Err(sqlx::Error::PoolTimedOut.into()),
        }
    }

    /// Closes the pool: it hands out no more connections and closes those that come back.
    pub fn close(&self) {
        self.inner.close();
    }
}

impl Drop for PooledConnection {
    /// Shrinks the buffers, which a large statement or answer may have grown.
    fn drop(&mut self) {
        if let Some(connection) = &mut self.0 {
            connection.shrink_buffers();
        }
    }
}

impl PooledConnection {
    /// Returns the connection. Fails only after [`PooledConnection::close`].
    pub fn get(&mut self) -> Result<&mut PgConnection> {
        self.0.as_deref_mut().ok_or_else(Error::aborted)
    }

    /// Drops the connection and frees its place at once, whatever it was doing.
    pub fn close(&mut self) {
        if let Some(connection) = self.0.take() {
            drop(Object::take(connection));
        }
    }
}
