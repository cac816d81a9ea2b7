//! Limits the concurrent calls to one destination, so that a slow receiver does not use up the calls of the others.
//! Must never keep an entry for a destination without calls.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The permits of all destinations. Clones share them.
#[derive(Clone, Debug)]
pub struct HostPermits(Arc<HostPermitsInner>);

#[derive(Debug)]
struct HostPermitsInner {
    per_host: usize,
    /// Keyed by host and port, because scheme and path do not change how busy a server is.
    hosts: Mutex<HashMap<String, HostEntry>>,
}

#[derive(Debug)]
struct HostEntry {
    permits: Arc<Semaphore>,
    /// Calls that hold a permit or wait for one.
    users: usize,
}

/// The right to make one call to a destination, held until the call ends.
#[derive(Debug)]
pub struct HostPermit {
    _permit: OwnedSemaphorePermit,
    _user: HostUser,
}

/// A call that holds a permit of a destination or waits for one. Dropping the last one removes the destination's entry.
#[derive(Debug)]
struct HostUser {
    host_permits: HostPermits,
    destination: String,
}

impl Drop for HostUser {
    fn drop(&mut self) {
        let mut hosts = self.host_permits.hosts();
        if let Some(entry) = hosts.get_mut(&self.destination) {
            entry.users -= 1;
            if entry.users == 0 {
                hosts.remove(&self.destination);
            }
        }
    }
}

impl HostPermits {
    pub fn new(per_host: usize) -> HostPermits {
        HostPermits(Arc::new(HostPermitsInner { per_host, hosts: Mutex::default() }))
    }

    fn hosts(&self) -> MutexGuard<'_, HashMap<String, HostEntry>> {
        self.0.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a permit if one is available and no call waits for it.
    pub fn try_acquire(&self, destination: &str) -> Option<HostPermit> {
        let (permits, user) = self.register(destination);
        let permit = permits.try_acquire_owned().ok()?;
        Some(HostPermit { _permit: permit, _user: user })
    }

    /// Waits for a permit, after the calls that already wait.
    pub async fn acquire(&self, destination: &str) -> HostPermit {
        let (permits, user) = self.register(destination);
        match permits.acquire_owned().await {
            Ok(permit) => HostPermit { _permit: permit, _user: user },
            // The semaphore is never closed.
            Err(_) => std::future::pending().await,
        }
    }

    fn register(&self, destination: &str) -> (Arc<Semaphore>, HostUser) {
        let mut hosts = self.hosts();
        let entry = hosts
            .entry(destination.to_owned())
            .or_insert_with(|| HostEntry { permits: Arc::new(Semaphore::new(self.0.per_host)), users: 0 });
        entry.users += 1;
        (Arc::clone(&entry.permits), HostUser { host_permits: self.clone(), destination: destination.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_destination_has_a_fixed_number_of_permits() {
        let permits = HostPermits::new(2);
        let (first, second) = (permits.try_acquire("a:80").unwrap(), permits.try_acquire("a:80").unwrap());
        assert!(permits.try_acquire("a:80").is_none());
        assert!(permits.try_acquire("a:81").is_some(), "another port is another destination");
        drop(first);
        let third = permits.try_acquire("a:80").unwrap();
        drop((second, third));
        assert!(permits.hosts().is_empty(), "no entry is left");
    }

    #[tokio::test]
    async fn permits_go_to_the_call_that_waited_longest() {
        let permits = HostPermits::new(1);
        let held = permits.try_acquire("a:80").unwrap();
        let mut waiting = Box::pin(permits.acquire("a:80"));
        assert!(futures_util::poll!(&mut waiting).is_pending());
        drop(held);
        assert!(permits.try_acquire("a:80").is_none(), "the permit belongs to the waiting call");
        let got = waiting.await;
        // A call that stops waiting leaves no entry.
        let mut waiting = Box::pin(permits.acquire("a:80"));
        assert!(futures_util::poll!(&mut waiting).is_pending());
        drop((waiting, got));
        assert!(permits.hosts().is_empty());
    }
}
