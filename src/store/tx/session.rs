//! The only way to a transaction: [`Store::retrying`] and [`Store::reading`] give a [`Session`] to their work, and only a
//! session begins one. So every statement has a limit in time, here and in the server, and everybody has decided how long
//! to wait for a lock that somebody else holds.

use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::store::{Error, Result, Store, Tx};

/// How long a transaction waits for a lock that somebody else holds. Past it the answer is [`Error::Busy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// For work on behalf of many, in a lane or a loop: as long as others of our own may hold it.
    Brief,
    /// For one of those many, when all together met a lock: hardly at all.
    Least,
    /// For one client, who wants just that row: nearly as long as a transaction may take.
    Long,
}

impl Patience {
    fn within(self, limit: Duration) -> Duration {
        match self {
            Patience::Brief => Duration::from_millis(100).min(limit),
            Patience::Least => Duration::from_millis(10).min(limit),
            Patience::Long => limit,
        }
    }
}

tokio::task_local! {
    /// Set when nobody wants the answer any more.
    static UNWANTED: CancellationToken;
}

/// Does work that may lose the one who wants it, which `unwanted` tells. What is begun is done to its end; what still waits
/// for a connection or for its turn is broken off.
pub async fn while_wanted<T>(unwanted: CancellationToken, work: impl Future<Output = T>) -> T {
    UNWANTED.scope(unwanted, work).await
}

/// Does work that more than one want, or that must not stop half-way: it goes on whoever is gone.
pub async fn unconditionally<T>(work: impl Future<Output = T>) -> T {
    UNWANTED.scope(CancellationToken::new(), work).await
}

/// Waits, unless nobody wants it any more.
pub(in crate::store) async fn wanted<T>(waiting: impl Future<Output = T>) -> Result<T> {
    match UNWANTED.try_with(CancellationToken::clone) {
        Ok(unwanted) => unwanted.run_until_cancelled(waiting).await.ok_or_else(Error::broken_off),
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

/// What the server is told about time when a statement begins.
#[derive(Clone, Copy, Debug)]
pub(in crate::store) struct TimeLimits {
    pub lock_ms: u128,
    pub statement_ms: u128,
}

impl Session {
    /// What is left; an error if that is nothing worth beginning.
    pub(in crate::store) fn left(&self) -> Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left < Duration::from_millis(20) { Err(Error::too_late(self.store.limit)) } else { Ok(left) }
    }

    /// The server gives up a little before we do: it does not notice that nobody is there any more, and its process
    /// would go on outside the pool's count.
    pub(in crate::store) fn limits(&self, left: Duration) -> TimeLimits {
        let lock = self.patience.within(left.mul_f64(0.8));
        TimeLimits { lock_ms: lock.as_millis().max(1), statement_ms: left.mul_f64(0.9).as_millis().max(1) }
    }

    /// The id of this process among those that share the database.
    pub fn instance(&self) -> Uuid {
        self.store.instance()
    }

    /// Whether counters that somebody else holds are settled later instead of waited for.
    pub(in crate::store) fn defers(&self) -> bool {
        self.patience != Patience::Brief
    }
}

impl Store {
    /// Runs `once` within the limit, and again when PostgreSQL had to break it off in favour of another transaction: a
    /// client never hears of a deadlock. What takes longer than the limit has lost its database, and is broken off so
    /// that those behind it can go on with another connection.
    pub async fn retrying<T, F, Fut>(&self, patience: Patience, mut once: F) -> Result<T>
    where
        F: FnMut(Session) -> Fut,
        Fut: Future<Output = Result<T>>,
    {
        let begun = Instant::now();
        let session = Session { store: self.clone(), patience, deadline: begun + self.limit };
        let mut tries = 0u32;
        loop {
            // On the heap, or whoever waits would carry it twice.
            let trying = tokio::time::timeout_at(session.deadline, Box::pin(once(session.clone())));
            let Ok(result) = trying.await else { return Err(Error::too_late(self.limit)) };
            match result {
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

    /// The same for one who waits for a lock as long as it takes. Only so many do at a time: the others wait for their
    /// turn without a connection.
    pub async fn waiting<T, F, Fut>(&self, once: F) -> Result<T>
    where
        F: FnMut(Session) -> Fut,
        Fut: Future<Output = Result<T>>,
    {
        let _place = self.place(&self.waiters).await?;
        self.retrying(Patience::Long, once).await
    }

    /// The same for one request by itself: at once if it can be, else by [`Store::waiting`].
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

    /// Looks at much, or at what may take long to be found. Only so many do at a time.
    pub async fn listing<T>(&self, look: impl AsyncFnOnce(&mut Tx) -> Result<T>) -> Result<T> {
        let _place = self.place(&self.readers).await?;
        self.reading(look).await
    }

    /// Looks at something without changing it.
    pub async fn reading<T>(&self, look: impl AsyncFnOnce(&mut Tx) -> Result<T>) -> Result<T> {
        let session = Session { store: self.clone(), patience: Patience::Brief, deadline: Instant::now() + self.limit };
        let reading = async {
            let mut tx = session.begin_read().await?;
            let found = look(&mut tx).await?;
            tx.rollback().await?;
            Ok(found)
        };
        tokio::time::timeout_at(session.deadline, reading).await.unwrap_or_else(|_| Err(Error::too_late(self.limit)))
    }

    /// Looks at everything as it is at one moment, for as long as `limit`.
    pub(in crate::store) async fn snapshot<T>(
        &self,
        limit: Duration,
        look: impl AsyncFnOnce(&mut Tx) -> Result<T>,
    ) -> Result<T> {
        let store = self.with_limit(limit);
        let session = Session { store, patience: Patience::Brief, deadline: Instant::now() + limit };
        let reading = async {
            let mut tx = session.begin_snapshot().await?;
            let found = look(&mut tx).await?;
            tx.rollback().await?;
            Ok(found)
        };
        tokio::time::timeout_at(session.deadline, reading).await.unwrap_or_else(|_| Err(Error::too_late(limit)))
    }

    async fn place<'a>(&self, places: &'a Semaphore) -> Result<tokio::sync::SemaphorePermit<'a>> {
        let place = tokio::time::timeout(self.limit, wanted(places.acquire())).await;
        let place = place.unwrap_or_else(|_| Err(Error::too_late(self.limit)))?;
        place.map_err(|_| Error::broken_off())
    }
}
