//! The current time. In production it is the time of the database, so that all instances agree. Tests set and move it
//! manually.

use std::sync::{Arc, Mutex, PoisonError};

use chrono::{DateTime, TimeDelta, Utc};

/// The source of the time of a transaction.
#[derive(Clone, Debug, Default)]
pub enum Clock {
    /// Each transaction uses PostgreSQL's clock.
    #[default]
    Database,
    /// Every statement uses this time.
    Fixed(Arc<Mutex<DateTime<Utc>>>),
}

impl Clock {
    pub fn fixed(at: DateTime<Utc>) -> Clock {
        Clock::Fixed(Arc::new(Mutex::new(at)))
    }

    /// The "now" parameter of statements: null makes the database use its own time.
    pub fn param(&self) -> Option<DateTime<Utc>> {
        match self {
            Clock::Database => None,
            Clock::Fixed(at) => Some(*at.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Advances a fixed clock. Does nothing to the clock of the database.
    pub fn advance(&self, by: TimeDelta) {
        if let Clock::Fixed(at) = self {
            *at.lock().unwrap_or_else(PoisonError::into_inner) += by;
        }
    }
}
