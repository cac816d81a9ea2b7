//! Hints that a loop has new work: at once to the loops of this process, and through PostgreSQL's NOTIFY to the
//! other instances. Only hints: a lost one costs at most a poll interval, so they are sent after the commit,
//! outside its transaction, and many together as one.

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
    /// A new deadline: for this process alone, the others have nothing to gain by looking.
    pub const TIMEOUT: Hints = Hints(8);
    /// Counters were put aside: for this process alone.
    pub const COUNTERS: Hints = Hints(16);
    const HERE: u8 = Hints::TIMEOUT.0 | Hints::COUNTERS.0;
    const EACH: [Hints; 5] = [Hints::START, Hints::RETRY, Hints::DELIVER, Hints::TIMEOUT, Hints::COUNTERS];

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

#[derive(Clone, Debug, Default)]
pub struct Wake(Arc<WakeInner>);

#[derive(Debug, Default)]
struct WakeInner {
    loops: [Notify; 5],
    outgoing: AtomicU8,
    send: Notify,
}

impl Wake {
    /// New work was committed here: for the loops of this process, and the news for the others.
    pub fn everyone(&self, hints: Hints) {
        if hints.is_empty() {
            return;
        }
        self.here(hints);
        let news = hints.0 & !Hints::HERE;
        if news != 0 {
            self.0.outgoing.fetch_or(news, Ordering::AcqRel);
            self.0.send.notify_one();
        }
    }

    /// Another instance has committed new work.
    pub fn here(&self, hints: Hints) {
        for (one, notify) in Hints::EACH.iter().zip(&self.0.loops) {
            if hints.0 & one.0 != 0 {
                notify.notify_one();
            }
        }
    }

    /// Completes when the loop has been hinted at since this was last awaited: `notify_one` keeps a permit,
    /// so a hint that comes while the loop is at work is not lost.
    pub async fn hinted(&self, which: Hints) {
        for (one, notify) in Hints::EACH.iter().zip(&self.0.loops) {
            if *one == which {
                return notify.notified().await;
            }
        }
        std::future::pending::<()>().await;
    }

    /// Waits until there is something to tell the other instances, and takes it.
    pub async fn outgoing(&self) -> Hints {
        loop {
            let hints = Hints(self.0.outgoing.swap(0, Ordering::AcqRel));
            if !hints.is_empty() {
                return hints;
            }
            self.0.send.notified().await;
        }
    }
}
