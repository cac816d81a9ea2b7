//! Owns the only way to a transaction: [`Store::retrying`] and [`Store::reading`] give their work a [`Session`], and
//! only a session begins a transaction. So every statement has a time limit, in this process and in the server, and
//! every caller has chosen how long to wait for a lock. Only `migrate` and `listen` may use connections without a
//! session.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::store::{Error, Result, Store, Tx};

/// How long a transaction waits for a lock that another transaction holds before it fails with [`Error::Busy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Waits up to 100 ms, as long as another transaction of Reprise may hold the lock. For transactions that serve
    /// many requests or tasks: group commits and loops.
    Brief,
    /// Waits up to 10 ms. For a single request or task out of many, after their common transaction met a lock.
    Least,
    /// Waits for most of the time that the transaction has left. For a request that needs exactly this row.
    Long,
}

impl Patience {
    fn lock_timeout(self, limit: Duration) -> Duration {
        match self {
            Patience::Brief => Duration::from_millis(100).min(limit),
            Patience::Least => Duration::from_millis(10).min(limit),
            Patience::Long => limit,
        }
    }
}

tokio::task_local! {
    /// Canceled when the client of the current request is gone.
    static CANCELLATION: CancellationToken;
}

/// Runs the work of a request whose client may leave, which cancels `client_gone`. A transaction that has begun runs to
/// its end; work that still waits for a connection or a permit fails.
pub async fn with_cancellation<T>(client_gone: CancellationToken, work: impl Future<Output = T>) -> T {
    CANCELLATION.scope(client_gone, work).await
}

/// Runs work that goes on when the client is gone, because several requests share it or because it must not stop
/// halfway.
pub async fn without_cancellation<T>(work: impl Future<Output = T>) -> T {
    CANCELLATION.scope(CancellationToken::new(), work).await
}

/// Waits for a connection, a permit or another event, unless the client is gone.
pub async fn unless_canceled<T>(waiting: impl Future<Output = T>) -> Result<T> {
    match CANCELLATION.try_with(CancellationToken::clone) {
        Ok(client_gone) => client_gone.run_until_cancelled(waiting).await.ok_or_else(Error::aborted),
        Err(_) => Ok(waiting.await),
    }
}

/// The right to begin transactions until a deadline.
#[derive(Clone, Debug)]
pub struct Session {
    pub(in crate::store) store: Store,
    pub(in crate::store) patience: Patience,
    pub(in crate::store) deadline: Instant,
}

/// The time limits that the server enforces on a statement.
#[derive(Clone, Copy, Debug)]
pub(in crate::store) struct TimeLimits {
    pub lock_ms: u128,
    pub statement_ms: u128,
}

impl Session {
    /// Returns the time left until the deadline. Fails if less than 20 ms are left, too little to begin a statement.
    pub(in crate::store) fn time_left(&self) -> Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left < Duration::from_millis(20) { Err(Error::timed_out(self.store.limit)) } else { Ok(left) }
    }

    /// Computes the server's limits, which end a little before the session's own. The server does not notice that its
    /// client has given up, and its process would go on outside the pool's count.
    pub(in crate::store) fn limits(&self, left: Duration) -> TimeLimits {
        let lock = self.patience.lock_timeout(left.mul_f64(0.8));
        TimeLimits { lock_ms: lock.as_millis().max(1), statement_ms: left.mul_f64(0.9).as_millis().max(1) }
    }

    /// Returns the id of this process among the instances that share the database.
    pub fn instance(&self) -> Uuid {
        self.store.instance()
    }

    /// Whether the transaction defers the counters that another transaction has locked, instead of waiting for them.
    pub(in crate::store) fn defers(&self) -> bool {
        self.patience != Patience::Brief
    }
}

impl Store {
    /// Runs `once` within the store's time limit, and repeats it when PostgreSQL aborted it in favor of another
    /// transaction: a client never sees a deadlock. Work that exceeds the limit has lost its database. It is dropped,
    /// so that the work behind it can go on with another connection.
    pub async fn retrying<T, F, Fut>(&self, patience: Patience, mut once: F) -> Result<T>
    where
        F: FnMut(Session) -> Fut,
        Fut: Future<Output = Result<T>>,
    {
        let begun = Instant::now();
        let session = Session { store: self.clone(), patience, deadline: begun + self.limit };
        let mut tries = 0u32;
        loop {
            // On the heap: otherwise the caller's future holds it twice.
            let trying = tokio::time::timeout_at(session.deadline, Box::pin(once(session.clone())));
            let result = trying.await.unwrap_or_else(|_| Err(Error::timed_out(self.limit)));
            match self.noted(result) {
                Err(error) if error.is_transient() && tries < 10 && begun.elapsed() < self.limit / 2 => {
                    tries += 1;
                    tracing::debug!(tries, %error, "transaction repeated");
                    let most = 5u64 << tries.min(6);
                    tokio::time::sleep(Duration::from_millis(rand::random_range(0..most))).await;
                }
                result => return result,
            }
        }
    }

    /// Runs `once` with [`Patience::Long`]. At most a third of the connections wait for locks like this at a time;
    /// further callers wait for a permit, without a connection.
    pub async fn waiting<T, F, Fut>(&self, once: F) -> Result<T>
    where
        F: FnMut(Session) -> Fut,
        Fut: Future<Output = Result<T>>,
    {
        let _permit = self.permit(&self.waiters).await?;
        self.retrying(Patience::Long, once).await
    }

    /// Runs the work of a single request: first with [`Patience::Brief`], then, if it met a lock, by
    /// [`Store::waiting`].
    pub async fn alone<T, F, Fut>(&self, mut once: F) -> Result<T>
    where
        F: FnMut(Session) -> Fut,
        Fut: Future<Output = Result<T>>,
    {
        match self.retrying(Patience::Brief, &mut once).await {
            Err(error) if error.is_busy() => self.waiting(once).await,
            result => result,
        }
    }

    /// Runs a read that may return many rows or take long to find them. At most half of the connections do so at a
    /// time.
    pub async fn listing<T>(&self, read: impl AsyncFnOnce(&mut Tx) -> Result<T>) -> Result<T> {
        let _permit = self.permit(&self.readers).await?;
        self.reading(read).await
    }

    /// Runs a short read in a read-only transaction.
    pub async fn reading<T>(&self, read: impl AsyncFnOnce(&mut Tx) -> Result<T>) -> Result<T> {
        let session = Session { store: self.clone(), patience: Patience::Brief, deadline: Instant::now() + self.limit };
        let reading = async {
            let mut tx = session.begin_read().await?;
            let found = read(&mut tx).await?;
            tx.rollback().await?;
            Ok(found)
        };
        let read = tokio::time::timeout_at(session.deadline, reading).await;
        self.noted(read.unwrap_or_else(|_| Err(Error::timed_out(self.limit))))
    }

    /// Notes whether the database was reachable, for `/health`.
    fn noted<T>(&self, result: Result<T>) -> Result<T> {
        match &result {
            Ok(_) => self.reachable.store(true, Ordering::Relaxed),
            Err(error) if error.is_unavailable() => self.reachable.store(false, Ordering::Relaxed),
            Err(_) => {}
        }
        result
    }

    /// Runs reads that all see the same snapshot, for at most `limit`.
    pub(in crate::store) async fn snapshot<T>(
        &self,
        limit: Duration,
        read: impl AsyncFnOnce(&mut Tx) -> Result<T>,
    ) -> Result<T> {
        let store = self.with_limit(limit);
        let session = Session { store, patience: Patience::Brief, deadline: Instant::now() + limit };
        let reading = async {
            let mut tx = session.begin_snapshot().await?;
            let found = read(&mut tx).await?;
            tx.rollback().await?;
            Ok(found)
        };
        tokio::time::timeout_at(session.deadline, reading).await.unwrap_or_else(|_| Err(Error::timed_out(limit)))
    }

    async fn permit<'a>(&self, permits: &'a Semaphore) -> Result<tokio::sync::SemaphorePermit<'a>> {
        let permit = tokio::time::timeout(self.limit, unless_canceled(permits.acquire())).await;
        let permit = permit.unwrap_or_else(|_| Err(Error::timed_out(self.limit)))?;
        permit.map_err(|_| Error::aborted())
    }
}
