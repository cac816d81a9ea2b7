//! Limits how often one kind of line is logged, above all during an outage of the database: the first five in a minute
//! are logged, the rest counted.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const WINDOW: Duration = Duration::from_secs(60);
const PER_WINDOW: u32 = 5;

/// A limit for one kind of log line.
#[derive(Debug)]
pub struct LogLimit(Mutex<State>);

#[derive(Debug)]
struct State {
    since: Option<Instant>,
    written: u32,
    suppressed: u64,
}

impl LogLimit {
    pub const fn new() -> LogLimit {
        LogLimit(Mutex::new(State { since: None, written: 0, suppressed: 0 }))
    }

    /// Whether to log the next line. If so, returns the number of lines suppressed before it.
    pub fn allows(&self) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.since.is_none_or(|since| since.elapsed() >= WINDOW) {
            state.since = Some(Instant::now());
            state.written = 0;
        }
        if state.written == PER_WINDOW {
            state.suppressed += 1;
            return None;
        }
        state.written += 1;
        Some(std::mem::take(&mut state.suppressed))
    }
}

impl Default for LogLimit {
    fn default() -> LogLimit {
        LogLimit::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_five_lines_are_logged_and_the_rest_counted() {
        let limit = LogLimit::new();
        let written = (0..100).filter(|_| limit.allows().is_some()).count();
        assert_eq!(written, 5);
        limit.0.lock().unwrap().since = Instant::now().checked_sub(WINDOW);
        assert_eq!(limit.allows(), Some(95));
        assert_eq!(limit.allows(), Some(0));
    }
}
