//! The connections of an instance. A connection can fall silent without being closed: its server lost power, or
//! something in between forgot it. So nothing here waits for a connection without a limit, and one that was given up is
//! dropped on the spot: its socket closes, its place is free, nobody asks the other side.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use deadpool::Runtime;
use deadpool::managed::{self, Metrics, Object, PoolError, QueueMode, RecycleError, RecycleResult, Timeouts};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection};

use crate::store::{Error, Result};

/// How long an idle connection may take to show that it still works.
const PING: Duration = Duration::from_secs(1);
/// How long opening a connection, or waiting for a free one, may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Connections older than this are replaced: the server keeps what it caches for them.
const LIFETIME: Duration = Duration::from_secs(30 * 60);

/// A number of connections that are opened when they are needed.
#[derive(Clone, Debug)]
pub(in crate::store) struct Pool {
    inner: managed::Pool<Manager>,
}

/// A connection on loan. It goes back when it is dropped, unless it is closed first.
pub(in crate::store) struct PooledConnection(Option<Object<Manager>>);

#[derive(Debug)]
struct Manager {
    options: PgConnectOptions,
    /// When a connection was last found silent: what is idle since before that is not worth asking.
    silence: Mutex<Option<Instant>>,
}

impl managed::Manager for Manager {
    type Type = PgConnection;
    type Error = sqlx::Error;

    async fn create(&self) -> Result<PgConnection, sqlx::Error> {
        // On the heap: whoever waits for a connection would carry the making of one, 30 KB of it.
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
        let timeouts = Timeouts { wait: Some(PATIENCE), create: Some(PATIENCE), recycle: None };
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

    /// Connections open and idle.
    pub fn usage(&self) -> (usize, usize) {
        let status = self.inner.status();
        (status.size, status.available.min(status.size))
    }

    pub async fn take(&self) -> Result<PooledConnection> {
        match self.inner.get().await {
            Ok(connection) => Ok(PooledConnection(Some(connection))),
            Err(PoolError::Backend(error)) => Err(error.into()),
            Err(PoolError::Closed) => Err(sqlx::Error::PoolClosed.into()),
            Err(_) => Err(sqlx::Error::PoolTimedOut.into()),
        }
    }

    /// Nobody is lent a connection any more, and those that come back are closed.
    pub fn close(&self) {
        self.inner.close();
    }
}

impl Drop for PooledConnection {
    /// What a large statement or answer made of its buffers is not kept until the next one.
    fn drop(&mut self) {
        if let Some(connection) = &mut self.0 {
            connection.shrink_buffers();
        }
    }
}

impl PooledConnection {
    /// Fails after [`PooledConnection::close`] only.
    pub fn get(&mut self) -> Result<&mut PgConnection> {
        self.0.as_deref_mut().ok_or_else(Error::broken_off)
    }

    /// Drops the connection and frees its place at once, whatever it was doing.
    pub fn close(&mut self) {
        if let Some(connection) = self.0.take() {
            drop(Object::take(connection));
        }
    }
}
