//! How many calls may be under way to one destination, so that a slow one leaves places for the others. Must never
//! remember a destination that nobody is calling.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

#[derive(Clone, Debug)]
pub struct HostPermits(Arc<HostPermitsInner>);

#[derive(Debug)]
struct HostPermitsInner {
    per_host: usize,
    /// By host and port: scheme and path don't matter to how busy a server is.
    open: Mutex<HashMap<String, HostEntry>>,
}

#[derive(Debug)]
struct HostEntry {
    places: Arc<Semaphore>,
    /// Who has a place or waits for one.
    users: usize,
}

/// A place, held while the call lasts.
#[derive(Debug)]
pub struct HostPermit {
    _permit: OwnedSemaphorePermit,
    _user: User,
}

/// Somebody who has or wants a place; the last one to go takes the entry away.
#[derive(Debug)]
struct User {
    places: HostPermits,
    destination: String,
}

impl Drop for User {
    fn drop(&mut self) {
        let mut open = self.places.open();
        if let Some(entry) = open.get_mut(&self.destination) {
            entry.users -= 1;
            if entry.users == 0 {
                open.remove(&self.destination);
            }
        }
    }
}

impl HostPermits {
    pub fn new(per_host: usize) -> HostPermits {
        HostPermits(Arc::new(HostPermitsInner { per_host, open: Mutex::default() }))
    }

    fn open(&self) -> MutexGuard<'_, HashMap<String, HostEntry>> {
        self.0.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place if one is free and nobody was there first.
    pub fn try_take(&self, destination: &str) -> Option<HostPermit> {
        let (places, user) = self.enter(destination);
        let permit = places.try_acquire_owned().ok()?;
        Some(HostPermit { _permit: permit, _user: user })
    }

    /// Waits for a place, behind those who came before.
    pub async fn take(&self, destination: &str) -> HostPermit {
        let (places, user) = self.enter(destination);
        match places.acquire_owned().await {
            Ok(permit) => HostPermit { _permit: permit, _user: user },
            // Nobody closes these.
            Err(_) => std::future::pending().await,
        }
    }

    fn enter(&self, destination: &str) -> (Arc<Semaphore>, User) {
        let mut open = self.open();
        let entry = open
            .entry(destination.to_owned())
            .or_insert_with(|| HostEntry { places: Arc::new(Semaphore::new(self.0.per_host)), users: 0 });
        entry.users += 1;
        (Arc::clone(&entry.places), User { places: self.clone(), destination: destination.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_destination_has_its_places_and_no_more() {
        let places = HostPermits::new(2);
        let (first, second) = (places.try_take("a:80").unwrap(), places.try_take("a:80").unwrap());
        assert!(places.try_take("a:80").is_none());
        assert!(places.try_take("a:81").is_some(), "another port is another destination");
        drop(first);
        let third = places.try_take("a:80").unwrap();
        drop((second, third));
        assert!(places.open().is_empty(), "nothing is remembered");
    }

    #[tokio::test]
    async fn places_go_to_who_came_first() {
        let places = HostPermits::new(1);
        let held = places.try_take("a:80").unwrap();
        let mut waiting = Box::pin(places.take("a:80"));
        assert!(futures_util::poll!(&mut waiting).is_pending());
        drop(held);
        assert!(places.try_take("a:80").is_none(), "it is the waiting one's");
        let got = waiting.await;
        // Who gives up waiting leaves nothing behind.
        let mut waiting = Box::pin(places.take("a:80"));
        assert!(futures_util::poll!(&mut waiting).is_pending());
        drop((waiting, got));
        assert!(places.open().is_empty());
    }
}
