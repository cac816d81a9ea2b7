//! Hints that a loop has new work: directly to the loops of this process, and through PostgreSQL's NOTIFY to the other
//! instances. A lost hint delays work by a poll interval at most. Hints are therefore sent after the commit, outside
//! its transaction, and many are merged into one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use tokio::sync::Notify;

/// A set of loops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hints(u8);

impl Hints {
    pub const START: Hints = Hints(1);
    pub const RETRY: Hints = Hints(2);
    pub const DELIVER: Hints = Hints(4);
    /// A new deadline, for this process only: the other instances gain nothing by looking.
    pub const TIMEOUT: Hints = Hints(8);
    /// Deferred changes of counters, for this process only.
    pub const COUNTERS: Hints = Hints(16);
    /// A request that waits for a task or a batch, for this process only.
    pub const WAITERS: Hints = Hints(32);
    /// Hints that are not sent to other instances.
    const LOCAL: u8 = Hints::TIMEOUT.0 | Hints::COUNTERS.0 | Hints::WAITERS.0;
    const ALL: [Hints; 6] =
        [Hints::START, Hints::RETRY, Hints::DELIVER, Hints::TIMEOUT, Hints::COUNTERS, Hints::WAITERS];

    pub fn add(&mut self, other: Hints) {
        self.0 |= other.0;
    }

    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub const fn bits(self) -> u8 {
        self.0
    }

    pub const fn from_bits(bits: u8) -> Hints {
        Hints(bits)
    }
}

/// Wakes the loops of this process and collects the hints for other instances.
#[derive(Clone, Debug, Default)]
pub struct Wake(Arc<WakeInner>);

#[derive(Debug, Default)]
struct WakeInner {
    loops: [Notify; 6],
    /// Bits of the hints that are not sent yet.
    outgoing: AtomicU8,
    has_outgoing: Notify,
}

impl Wake {
    /// Hints at work that this process has committed, to its own loops and to the other instances.
    pub fn notify_all(&self, hints: Hints) {
        if hints.is_empty() {
            return;
        }
        self.notify_local(hints);
        let outgoing = hints.0 & !Hints::LOCAL;
        if outgoing != 0 {
            self.0.outgoing.fetch_or(outgoing, Ordering::AcqRel);
            self.0.has_outgoing.notify_one();
        }
    }

    /// Hints at work to the loops of this process.
    pub fn notify_local(&self, hints: Hints) {
        for (one, notify) in Hints::ALL.iter().zip(&self.0.loops) {
            if hints.0 & one.0 != 0 {
                notify.notify_one();
            }
        }
    }

    /// Waits for a hint for this loop. `notify_one` keeps a permit, so a hint that arrives while the loop is busy is
    /// not lost.
    pub async fn hinted(&self, which: Hints) {
        for (one, notify) in Hints::ALL.iter().zip(&self.0.loops) {
            if *one == which {
                return notify.notified().await;
            }
        }
        std::future::pending::<()>().await;
    }

    /// Waits for hints for the other instances, and takes them.
    pub async fn outgoing(&self) -> Hints {
        loop {
            let hints = Hints(self.0.outgoing.swap(0, Ordering::AcqRel));
            if !hints.is_empty() {
                return hints;
            }
            self.0.has_outgoing.notified().await;
        }
    }
}
