//! Ids of new tasks. Each id comes after those that this process made before, and none is earlier than the time it is
//! made for. Ids never come from the clock of this machine.

use std::sync::{Arc, Mutex, PoisonError};

use chrono::{DateTime, Utc};
use uuid::{ContextV7, Timestamp, Uuid};

/// The generator of ids.
#[derive(Clone, Debug)]
pub(in crate::store) struct Ids(Arc<Mutex<ContextV7>>);

impl Default for Ids {
    fn default() -> Ids {
        Ids(Arc::new(Mutex::new(ContextV7::new())))
    }
}

impl Ids {
    /// Makes `count` ids for the time `at`, which is the database's: lists find tasks by the time in their ids.
    pub fn made_at(&self, at: DateTime<Utc>, count: usize) -> Vec<Uuid> {
        let secs = u64::try_from(at.timestamp()).unwrap_or(0);
        let context = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let id = |_| Uuid::new_v7(Timestamp::from_unix(&*context, secs, at.timestamp_subsec_nanos()));
        (0..count).map(id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_ascend_even_if_the_time_goes_back() {
        let (ids, at) = (Ids::default(), |secs| DateTime::from_timestamp(secs, 0).unwrap());
        let made: Vec<Uuid> = [100, 100, 7, 101, 101].into_iter().flat_map(|secs| ids.made_at(at(secs), 50)).collect();
        assert!(made.is_sorted_by(|a, b| a < b));
        let time = |id: &Uuid| id.get_timestamp().unwrap().to_unix().0;
        assert_eq!((time(&made[0]), time(&made[120]), time(&made[249])), (100, 100, 101));
    }
}
