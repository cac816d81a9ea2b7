//! What time it is. In production the database says so, which makes all instances agree;
//! a test sets the time itself and moves it by hand.

use std::sync::{Arc, Mutex, PoisonError};

use chrono::{DateTime, TimeDelta, Utc};

#[derive(Clone, Debug, Default)]
pub enum Clock {
    /// Each transaction takes PostgreSQL's `now()`.
    #[default]
    Database,
    /// Every statement gets this time instead.
    Fixed(Arc<Mutex<DateTime<Utc>>>),
}

impl Clock {
    pub fn fixed(at: DateTime<Utc>) -> Clock {
        Clock::Fixed(Arc::new(Mutex::new(at)))
    }

    /// The value of the statements' "now" parameter: null lets the database use its own time.
    pub fn param(&self) -> Option<DateTime<Utc>> {
        match self {
            Clock::Database => None,
            Clock::Fixed(at) => Some(*at.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Moves a fixed clock; the database's cannot be moved.
    pub fn advance(&self, by: TimeDelta) {
        if let Clock::Fixed(at) = self {
            *at.lock().unwrap_or_else(PoisonError::into_inner) += by;
        }
    }
}
