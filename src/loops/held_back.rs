//! Work items whose rows another transaction has locked. A loop skips them for a while, longer after each try, so that
//! they do not delay the other items.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The items to skip, each with its pause.
#[derive(Debug)]
pub(super) struct HeldBack<K>(HashMap<K, Pause>);

#[derive(Clone, Copy, Debug)]
struct Pause {
    until: Instant,
    length: Duration,
}

impl<K> Default for HeldBack<K> {
    fn default() -> Self {
        HeldBack(HashMap::new())
    }
}

impl<K: Copy + Eq + Hash> HeldBack<K> {
    /// Pauses an item, twice as long as the last time.
    pub fn add(&mut self, key: K) {
        let length = self.0.get(&key).map_or(FIRST_PAUSE, |pause| (pause.length * 2).min(LONGEST_PAUSE));
        self.0.insert(key, Pause { until: Instant::now() + length, length });
    }

    /// Removes an item that is done.
    pub fn remove(&mut self, key: &K) {
        self.0.remove(key);
    }

    /// Returns the items to skip now.
    pub fn paused(&self) -> Vec<K> {
        let now = Instant::now();
        self.0.iter().filter(|(_, pause)| pause.until > now).map(|(key, _)| *key).collect()
    }

    /// Removes the items whose pause ended long ago: they were not tried again, so they are no longer due.
    pub fn forget_old(&mut self) {
        let now = Instant::now();
        self.0.retain(|_, pause| pause.until + LONGEST_PAUSE > now);
    }
}
