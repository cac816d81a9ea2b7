//! Work that could not be done because somebody else holds a row that it needs. It is left out for a while, longer each
//! time, so that it costs the others nothing, and tried again.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_secs(5);

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
    /// It was in other hands once more.
    pub fn add(&mut self, key: K) {
        let length = self.0.get(&key).map_or(FIRST, |pause| (pause.length * 2).min(LONGEST));
        self.0.insert(key, Pause { until: Instant::now() + length, length });
    }

    /// It is done.
    pub fn remove(&mut self, key: &K) {
        self.0.remove(key);
    }

    /// What is not to be tried now.
    pub fn now(&self) -> Vec<K> {
        let now = Instant::now();
        self.0.iter().filter(|(_, pause)| pause.until > now).map(|(key, _)| *key).collect()
    }

    /// What has not been tried for so long that nobody does any more.
    pub fn forget_old(&mut self) {
        let now = Instant::now();
        self.0.retain(|_, pause| pause.until + LONGEST > now);
    }
}
