//! Group commit: requests that arrive while a transaction is in flight are committed in the next one, and each is
//! answered after its commit. There is no timer: a single request commits at once, and under load many requests wait
//! for one fsync.
//!
//! There is no background worker either. The first request that finds a free lane commits all waiting requests. A
//! caller must therefore not be dropped while it waits: requests run to their end, whatever their clients do.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use crate::store::{self, Patience, without_cancellation};

/// A lane that is busy for longer probably waits for a lock. The other lanes then start without gathering a batch.
const SLOW: Duration = Duration::from_millis(50);

/// A request that can be committed in a batch with others.
pub trait Job: Send {
    /// Whether the job may join the transaction of these earlier jobs.
    fn joins(&self, earlier: &[Self]) -> bool
    where
        Self: Sized;
}

/// Jobs in their order, each with the channel for its answer.
type Waiting<J, A> = VecDeque<(J, oneshot::Sender<store::Result<A>>)>;

/// A queue of jobs with a few lanes. Each lane commits one batch of jobs at a time.
#[derive(Debug)]
pub struct GroupCommit<J, A> {
    queue: Mutex<Queue<J, A>>,
    /// Notified when jobs wait and a lane is free.
    lane_freed: Notify,
    lanes: usize,
    max_batch: usize,
}

#[derive(Debug)]
struct Queue<J, A> {
    waiting: Waiting<J, A>,
    /// When each busy lane started, oldest first.
    busy: VecDeque<Instant>,
    /// Jobs in busy lanes.
    in_flight: usize,
    /// Recent maximum of concurrent jobs, waiting or in flight. It decays by a sixteenth per batch.
    recent_load: usize,
}

/// A busy lane. Dropping it frees the lane, also after a panic.
struct Lane<'a, J, A> {
    group: &'a GroupCommit<J, A>,
    started: Instant,
    jobs: usize,
}

impl<J, A> Drop for Lane<'_, J, A> {
    fn drop(&mut self) {
        let mut queue = self.group.queue();
        if let Some(index) = queue.busy.iter().position(|started| *started == self.started) {
            queue.busy.remove(index);
        }
        queue.in_flight -= self.jobs;
        if !queue.waiting.is_empty() {
            self.group.lane_freed.notify_one();
        }
    }
}

impl<J, A> Queue<J, A> {
    /// Whether a lane may start a batch now. While another lane is busy, it first waits for its share of the recent
    /// load. Otherwise the first request after a batch would be committed alone, and those right behind it in the batch
    /// after: with 64 clients a transaction held 20 reports instead of 32, and throughput fell by a fifth. It does not
    /// wait for a slow lane.
    fn may_start(&self, lanes: usize) -> bool {
        let enough = match self.busy.front() {
            Some(oldest) if oldest.elapsed() < SLOW => self.recent_load.div_ceil(lanes).max(1),
            _ => 1,
        };
        self.busy.len() < lanes && self.waiting.len() >= enough
    }

    /// Whether a free lane waits for more jobs before it starts a batch.
    fn is_gathering(&self, lanes: usize) -> bool {
        self.busy.len() < lanes && !self.waiting.is_empty()
    }
}

impl<J: Job, A> GroupCommit<J, A> {
    /// Makes a queue with this many lanes, and at most `max_batch` jobs in a transaction.
    pub fn new(lanes: usize, max_batch: usize) -> GroupCommit<J, A> {
        let queue = Queue { waiting: VecDeque::new(), busy: VecDeque::new(), in_flight: 0, recent_load: 0 };
        GroupCommit { queue: Mutex::new(queue), lane_freed: Notify::new(), lanes, max_batch }
    }

    /// Commits `job`, in a batch with others where possible, and returns its answer. `commit` answers the jobs of a
    /// batch in their order.
    pub async fn submit<Fut>(&self, job: J, commit: impl Fn(Vec<J>) -> Fut) -> store::Result<A>
    where
        Fut: Future<Output = Vec<store::Result<A>>>,
    {
        let (sender, mut answer) = oneshot::channel();
        // While a lane gathers a batch, one of the waiting callers watches the clock.
        let mut is_timekeeper = {
            let mut queue = self.queue();
            queue.waiting.push_back((job, sender));
            queue.waiting.len() == 1
        };
        loop {
            if let Some((lane, batch)) = self.take_batch() {
                let (jobs, senders): (Vec<J>, Vec<_>) = batch.into_iter().unzip();
                let mut outage = None;
                // Boxed: otherwise every waiting caller would carry the state of `commit`, tens of kilobytes each.
                for (answer, sender) in without_cancellation(Box::pin(commit(jobs))).await.into_iter().zip(senders) {
                    outage = outage.or(answer.as_ref().err().filter(|e| e.is_unavailable()).cloned());
                    let _ = sender.send(answer);
                }
                // Without a database, the waiting jobs fail as well. Otherwise each batch in turn would wait for a
                // connection to find that out.
                if let Some(outage) = outage {
                    for (_, sender) in self.queue().waiting.drain(..) {
                        let _ = sender.send(Err(outage.clone()));
                    }
                }
                drop(lane);
            }
            let watch = is_timekeeper && self.queue().is_gathering(self.lanes);
            tokio::select! {
                biased;
                // The sender is gone if the caller that ran the batch panicked.
                answer = &mut answer => return answer.unwrap_or_else(|_| Err(store::Error::aborted())),
                () = self.lane_freed.notified() => is_timekeeper = true,
                () = tokio::time::sleep(SLOW), if watch => {}
            }
        }
    }

    /// Takes a free lane and a batch: the first waiting job, and every job that may join the jobs before it. The others
    /// keep their order.
    fn take_batch(&self) -> Option<(Lane<'_, J, A>, Waiting<J, A>)> {
        let mut queue = self.queue();
        if !queue.may_start(self.lanes) {
            return None;
        }
        queue.recent_load =
            (queue.waiting.len() + queue.in_flight).max(queue.recent_load - queue.recent_load.div_ceil(16));
        let size = queue.recent_load.div_ceil(self.lanes).min(self.max_batch);
        let mut jobs: Vec<J> = Vec::new();
        let (mut senders, mut left) = (Vec::new(), VecDeque::new());
        while jobs.len() < size
            && let Some((job, sender)) = queue.waiting.pop_front()
        {
            if job.joins(&jobs) {
                jobs.push(job);
                senders.push(sender);
            } else {
                left.push_back((job, sender));
            }
        }
        left.append(&mut queue.waiting);
        queue.waiting = left;
        let started = Instant::now();
        queue.busy.push_back(started);
        queue.in_flight += jobs.len();
        if queue.is_gathering(self.lanes) {
            self.lane_freed.notify_one();
        }
        Some((Lane { group: self, started, jobs: jobs.len() }, jobs.into_iter().zip(senders).collect()))
    }
}

impl<J, A> GroupCommit<J, A> {
    fn queue(&self) -> MutexGuard<'_, Queue<J, A>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Commits a batch of jobs in one transaction. If that fails although the database is available, commits each job by
/// itself, so that one bad job does not fail the others. A job that meets a lock of another transaction then fails as
/// busy almost at once; its caller may retry it outside the lanes.
pub async fn isolate_failures<'a, J, A, Fut>(
    jobs: &'a [J],
    commit: impl Fn(&'a [J], Patience) -> Fut,
) -> Vec<store::Result<A>>
where
    Fut: Future<Output = store::Result<Vec<A>>>,
{
    let error = match commit(jobs, Patience::Brief).await {
        Ok(answers) => return answers.into_iter().map(Ok).collect(),
        Err(error) => error,
    };
    if error.is_unavailable() || jobs.len() == 1 && !error.is_busy() {
        return jobs.iter().map(|_| Err(error.clone())).collect();
    }
    if !error.is_busy() {
        tracing::warn!(%error, jobs = jobs.len(), "group commit failed; committing each job by itself");
    }
    let mut answers: Vec<store::Result<A>> = Vec::with_capacity(jobs.len());
    for job in jobs {
        // Once the database is unavailable, the remaining jobs fail without trying it.
        if let Some(Err(error)) = answers.last()
            && error.is_unavailable()
        {
            let error = error.clone();
            answers.push(Err(error));
            continue;
        }
        let answer = commit(std::slice::from_ref(job), Patience::Least).await;
        answers.push(answer.and_then(|mut one| one.pop().ok_or_else(store::Error::aborted)));
    }
    answers
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join_all;

    use super::*;

    /// A number that joins others of the same parity, but not itself.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Number(u32);

    impl Job for Number {
        fn joins(&self, earlier: &[Number]) -> bool {
            earlier.iter().all(|other| other.0 % 2 == self.0 % 2 && other != self)
        }
    }

    async fn double(jobs: Vec<Number>) -> Vec<store::Result<u32>> {
        tokio::task::yield_now().await;
        jobs.iter().map(|job| Ok(job.0 * 2)).collect()
    }

    fn numbers(answers: Vec<store::Result<u32>>) -> Vec<u32> {
        answers.into_iter().map(Result::unwrap).collect()
    }

    #[tokio::test]
    async fn every_caller_gets_its_own_answer() {
        let group = GroupCommit::new(1, 10);
        let batches = AtomicUsize::new(0);
        let all = (0..100).map(|n| {
            group.submit(Number(n), |jobs: Vec<Number>| {
                assert!(jobs.len() <= 10 && jobs.iter().all(|job| job.0 % 2 == jobs[0].0 % 2), "{jobs:?}");
                batches.fetch_add(1, Ordering::Relaxed);
                double(jobs)
            })
        });
        assert_eq!(numbers(join_all(all).await), (0..100).map(|n| n * 2).collect::<Vec<_>>());
        let batches = batches.load(Ordering::Relaxed);
        assert!(batches < 20, "{batches} batches");
    }

    #[tokio::test]
    async fn a_single_job_commits_at_once() {
        let group = GroupCommit::new(2, 10);
        for n in 0..3 {
            let answer = group.submit(Number(n), |jobs: Vec<Number>| {
                assert_eq!(jobs.len(), 1);
                double(jobs)
            });
            assert_eq!(answer.await.unwrap(), n * 2);
        }
    }

    #[tokio::test]
    async fn a_job_that_cannot_join_is_committed_in_the_next_batch() {
        let group = GroupCommit::new(1, 10);
        let all = [4, 4, 6, 4].map(|n| group.submit(Number(n), double));
        assert_eq!(numbers(join_all(all).await), [8, 8, 12, 8]);
    }

    #[tokio::test]
    async fn an_outage_fails_all_waiting_jobs_at_once() {
        let (group, tried) = (GroupCommit::new(1, 10), AtomicUsize::new(0));
        let all = [4; 20].map(|n| {
            group.submit(Number(n), async |jobs: Vec<Number>| {
                tried.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
                jobs.iter().map(|_| Err::<u32, _>(store::Error::aborted())).collect()
            })
        });
        assert!(join_all(all).await.iter().all(|answer| answer.as_ref().is_err_and(store::Error::is_unavailable)));
        assert_eq!(tried.into_inner(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stuck_lane_does_not_hold_up_the_other() {
        let group = Arc::new(GroupCommit::new(2, 200));
        let recent_load = (0..64).map(|n| group.submit(Number(n * 2), double));
        assert_eq!(join_all(recent_load).await.len(), 64);
        let stuck = Arc::clone(&group);
        let stuck =
            tokio::spawn(async move { stuck.submit(Number(1000), async |_| std::future::pending().await).await });
        tokio::task::yield_now().await;
        assert_eq!(group.queue().busy.len(), 1);
        for _ in 0..3 {
            let few = join_all((0..10).map(|n| group.submit(Number(n * 2), double)));
            let done = tokio::time::timeout(Duration::from_secs(1), few).await.expect("a lane is free");
            assert_eq!(numbers(done), (0..10).map(|n| n * 4).collect::<Vec<_>>());
        }
        stuck.abort();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn a_panic_does_not_stop_the_other_jobs() {
        let group = Arc::new(GroupCommit::new(1, 1));
        let all = (0..20).map(|n| {
            let group = Arc::clone(&group);
            tokio::spawn(async move {
                let work = |jobs: Vec<Number>| {
                    assert!(jobs[0].0 != 7, "this job panics on purpose");
                    double(jobs)
                };
                group.submit(Number(n), work).await
            })
        });
        let mut failed = 0;
        for (n, answer) in (0..).zip(join_all(all).await) {
            match answer {
                Ok(Ok(answer)) => assert_eq!(answer, n * 2),
                // The caller of the job, and the caller that ran its batch.
                Ok(Err(_)) | Err(_) => failed += 1,
            }
        }
        assert!((1..=2).contains(&failed), "{failed}");
    }
}
