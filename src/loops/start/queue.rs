//! The claimed tasks whose `on_start` is still to be called, in queue order. The loop adds them, the caller takes them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::domain::webhook::Action;
use crate::store::tasks::transitions::Claimed;
use crate::webhook::HostPermit;

/// A claimed task and its `on_start`.
pub(super) struct QueuedCall {
    pub claimed: Claimed,
    pub action: Action,
    /// The permit for a call to the receiver, once it is acquired.
    pub host_permit: Option<HostPermit>,
}

/// The queue of calls. Clones share it.
#[derive(Clone, Default)]
pub(super) struct CallQueue(Arc<CallQueueInner>);

#[derive(Default)]
struct CallQueueInner {
    waiting: Mutex<VecDeque<QueuedCall>>,
    added: Notify,
    /// Calls that are out of the queue until they can be made: see [`CallQueue::set_aside`].
    set_aside: AtomicUsize,
}

impl CallQueue {
    /// Adds a call to the end of the queue.
    pub fn push(&self, queued: QueuedCall) {
        self.waiting().push_back(queued);
        self.0.added.notify_one();
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<QueuedCall>> {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of calls in the queue, without those set aside.
    pub fn len(&self) -> usize {
        self.waiting().len()
    }

    /// Takes up to `count` calls from the front of the queue.
    pub fn take(&self, count: usize) -> Vec<QueuedCall> {
        let mut waiting = self.waiting();
        let count = count.min(waiting.len());
        waiting.drain(..count).collect()
    }

    /// Returns the number of calls that are set aside.
    pub fn set_aside_count(&self) -> usize {
        self.0.set_aside.load(Ordering::Acquire)
    }

    /// Counts a call that the caller took and cannot make yet, because it waits for a host permit or for a locked row.
    pub fn set_aside(&self) {
        self.0.set_aside.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns a call that was set aside to the front of the queue, because its turn has already come.
    pub fn put_back(&self, queued: QueuedCall) {
        self.0.set_aside.fetch_sub(1, Ordering::AcqRel);
        self.waiting().push_front(queued);
    }

    /// Waits until the queue has a call.
    pub async fn not_empty(&self) {
        while self.len() == 0 {
            self.0.added.notified().await;
        }
    }
}
