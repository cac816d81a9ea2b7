//! Claimed tasks in the order in which their `on_start` is to be called.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::domain::webhook::Action;
use crate::store::tasks::transitions::Claimed;
use crate::webhook::HostPermit;

/// A claimed task and what to call for it.
pub(super) struct QueuedCall {
    pub claimed: Claimed,
    pub action: Action,
    /// Among the calls to its receiver, once it has one.
    pub place: Option<HostPermit>,
}

/// Claimed tasks in the order in which they are to be called.
#[derive(Clone, Default)]
pub(super) struct CallQueue(Arc<CallQueueInner>);

#[derive(Default)]
struct CallQueueInner {
    waiting: Mutex<VecDeque<QueuedCall>>,
    added: Notify,
    /// How many stand aside until their receiver has a place for them.
    aside: AtomicUsize,
}

impl CallQueue {
    pub fn push(&self, queued: QueuedCall) {
        self.waiting().push_back(queued);
        self.0.added.notify_one();
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<QueuedCall>> {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn len(&self) -> usize {
        self.waiting().len()
    }

    pub fn take(&self, count: usize) -> Vec<QueuedCall> {
        let mut waiting = self.waiting();
        let count = count.min(waiting.len());
        waiting.drain(..count).collect()
    }

    pub fn aside(&self) -> usize {
        self.0.aside.load(Ordering::Acquire)
    }

    pub fn step_aside(&self) {
        self.0.aside.fetch_add(1, Ordering::AcqRel);
    }

    /// It has been its turn before: it is the next one.
    pub fn come_back(&self, queued: QueuedCall) {
        self.0.aside.fetch_sub(1, Ordering::AcqRel);
        self.waiting().push_front(queued);
    }

    pub async fn not_empty(&self) {
        while self.len() == 0 {
            self.0.added.notified().await;
        }
    }
}
