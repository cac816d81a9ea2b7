//! Requests that arrive while a transaction is in flight go together into the next one, and each is answered after the
//! commit that holds it. No timer: alone, a request goes at once; under load, many share one wait for the disk.
//!
//! There is no worker in the background. Whoever finds a lane free does the work of all that wait, its own or not, so a
//! caller must not be dropped while it waits: requests run to their end, whatever their clients do.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use crate::store::{self, Patience, unconditionally};

/// A lane that is at work for longer waits for somebody else, and nobody is to wait with it.
const LONG: Duration = Duration::from_millis(50);

/// What can be done in a group.
pub trait Job: Send {
    /// Whether it may go into one transaction with these, which were there before it.
    fn joins(&self, others: &[Self]) -> bool
    where
        Self: Sized;
}

/// Jobs in their order, and whom to tell what came of each.
type Waiting<J, A> = VecDeque<(J, oneshot::Sender<store::Result<A>>)>;

/// A queue of jobs with a few lanes, each of which does one batch at a time.
#[derive(Debug)]
pub struct GroupCommit<J, A> {
    queue: Mutex<Queue<J, A>>,
    /// Somebody waits, and a lane has become free, or is free and wants more of them.
    lane_freed: Notify,
    lanes: usize,
    most: usize,
}

#[derive(Debug)]
struct Queue<J, A> {
    waiting: Waiting<J, A>,
    /// When the lanes in use began, the first one first, and the jobs in them.
    busy: VecDeque<Instant>,
    in_work: usize,
    /// How many jobs there have been at a time, lately.
    recent_load: usize,
}

/// A lane that is in use until this is dropped, however that comes about.
struct Lane<'a, J, A> {
    of: &'a GroupCommit<J, A>,
    since: Instant,
    jobs: usize,
}

impl<J, A> Drop for Lane<'_, J, A> {
    fn drop(&mut self) {
        let mut queue = self.of.queue();
        if let Some(place) = queue.busy.iter().position(|since| *since == self.since) {
            queue.busy.remove(place);
        }
        queue.in_work -= self.jobs;
        if !queue.waiting.is_empty() {
            self.of.lane_freed.notify_one();
        }
    }
}

impl<J, A> Queue<J, A> {
    /// While one lane is at work the next one begins when its share of the recent load is there. Whoever comes first after a
    /// batch was answered would go alone, and those right behind it with the batch after: with 64 clients a transaction
    /// held 20 reports instead of 32, and a fifth fewer were made. But not if that one takes long.
    fn may_begin(&self, lanes: usize) -> bool {
        let enough = match self.busy.front() {
            Some(first) if first.elapsed() < LONG => self.recent_load.div_ceil(lanes).max(1),
            _ => 1,
        };
        self.busy.len() < lanes && self.waiting.len() >= enough
    }

    /// A lane is free for those who wait, as soon as they are more, or have waited for long.
    fn is_gathering(&self, lanes: usize) -> bool {
        self.busy.len() < lanes && !self.waiting.is_empty()
    }
}

impl<J: Job, A> GroupCommit<J, A> {
    /// `most` jobs go into one batch.
    pub fn new(lanes: usize, most: usize) -> GroupCommit<J, A> {
        let queue = Queue { waiting: VecDeque::new(), busy: VecDeque::new(), in_work: 0, recent_load: 0 };
        GroupCommit { queue: Mutex::new(queue), lane_freed: Notify::new(), lanes, most }
    }

    /// Has `job` done by `work`, alone or with others; `work` answers them in their order.
    pub async fn submit<Fut>(&self, job: J, work: impl Fn(Vec<J>) -> Fut) -> store::Result<A>
    where
        Fut: Future<Output = Vec<store::Result<A>>>,
    {
        let (tell, mut told) = oneshot::channel();
        // Of those who wait while a lane is free one looks at the clock.
        let mut looks = {
            let mut queue = self.queue();
            queue.waiting.push_back((job, tell));
            queue.waiting.len() == 1
        };
        loop {
            if let Some((lane, jobs)) = self.take() {
                let (jobs, tell): (Vec<J>, Vec<_>) = jobs.into_iter().unzip();
                let mut away = None;
                // On the heap: all those who wait would carry its state with them, tens of kilobytes each.
                for (answer, tell) in unconditionally(Box::pin(work(jobs))).await.into_iter().zip(tell) {
                    away = away.or(answer.as_ref().err().filter(|e| e.is_unavailable()).cloned());
                    let _ = tell.send(answer);
                }
                // Where there was no database for these there is none for the next ones, and each would find that out by
                // waiting for a connection, one after the other.
                if let Some(away) = away {
                    for (_, tell) in self.queue().waiting.drain(..) {
                        let _ = tell.send(Err(away.clone()));
                    }
                }
                drop(lane);
            }
            let watch = looks && self.queue().is_gathering(self.lanes);
            tokio::select! {
                biased;
                // Whoever was to do it may have broken down.
                answer = &mut told => return answer.unwrap_or_else(|_| Err(store::Error::broken_off())),
                () = self.lane_freed.notified() => looks = true,
                () = tokio::time::sleep(LONG), if watch => {}
            }
        }
    }

    /// A lane and what to do in it: the first job, and with it whatever goes with those before it. The others keep their
    /// order.
    fn take(&self) -> Option<(Lane<'_, J, A>, Waiting<J, A>)> {
        let mut queue = self.queue();
        if !queue.may_begin(self.lanes) {
            return None;
        }
        queue.recent_load =
            (queue.waiting.len() + queue.in_work).max(queue.recent_load - queue.recent_load.div_ceil(16));
        let most = queue.recent_load.div_ceil(self.lanes).min(self.most);
        let mut jobs: Vec<J> = Vec::new();
        let (mut tell, mut left) = (Vec::new(), VecDeque::new());
        while jobs.len() < most
            && let Some((job, sender)) = queue.waiting.pop_front()
        {
            if job.joins(&jobs) {
                jobs.push(job);
                tell.push(sender);
            } else {
                left.push_back((job, sender));
            }
        }
        left.append(&mut queue.waiting);
        queue.waiting = left;
        let since = Instant::now();
        queue.busy.push_back(since);
        queue.in_work += jobs.len();
        if queue.is_gathering(self.lanes) {
            self.lane_freed.notify_one();
        }
        Some((Lane { of: self, since, jobs: jobs.len() }, jobs.into_iter().zip(tell).collect()))
    }
}

impl<J, A> GroupCommit<J, A> {
    fn queue(&self) -> MutexGuard<'_, Queue<J, A>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Does all of them in one go. If that fails for another reason than that there is no database, each is done for itself:
/// one that cannot be done must not keep the others. One that needs what somebody else holds is not waited for. It fails
/// as busy, and may go on by itself.
pub async fn isolate_failures<'a, J, A, Fut>(
    jobs: &'a [J],
    work: impl Fn(&'a [J], Patience) -> Fut,
) -> Vec<store::Result<A>>
where
    Fut: Future<Output = store::Result<Vec<A>>>,
{
    let error = match work(jobs, Patience::Brief).await {
        Ok(answers) => return answers.into_iter().map(Ok).collect(),
        Err(error) => error,
    };
    if error.is_unavailable() || jobs.len() == 1 && !error.is_busy() {
        return jobs.iter().map(|_| Err(error.clone())).collect();
    }
    if !error.is_busy() {
        tracing::warn!(%error, jobs = jobs.len(), "changes could not be made together");
    }
    let mut answers: Vec<store::Result<A>> = Vec::with_capacity(jobs.len());
    for job in jobs {
        // Where there is no database for one there is none for the others.
        if let Some(Err(error)) = answers.last()
            && error.is_unavailable()
        {
            let error = error.clone();
            answers.push(Err(error));
            continue;
        }
        let answer = work(std::slice::from_ref(job), Patience::Least).await;
        answers.push(answer.and_then(|mut one| one.pop().ok_or_else(store::Error::broken_off)));
    }
    answers
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join_all;

    use super::*;

    /// A number that goes with others of the same parity, but not with itself.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Number(u32);

    impl Job for Number {
        fn joins(&self, others: &[Number]) -> bool {
            others.iter().all(|other| other.0 % 2 == self.0 % 2 && other != self)
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
    async fn everybody_gets_the_own_answer() {
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
    async fn one_alone_waits_for_nobody() {
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
    async fn the_same_again_goes_into_the_next_batch() {
        let group = GroupCommit::new(1, 10);
        let all = [4, 4, 6, 4].map(|n| group.submit(Number(n), double));
        assert_eq!(numbers(join_all(all).await), [8, 8, 12, 8]);
    }

    #[tokio::test]
    async fn where_there_is_no_database_nobody_waits_for_it_in_turn() {
        let (group, tried) = (GroupCommit::new(1, 10), AtomicUsize::new(0));
        let all = [4; 20].map(|n| {
            group.submit(Number(n), async |jobs: Vec<Number>| {
                tried.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
                jobs.iter().map(|_| Err::<u32, _>(store::Error::broken_off())).collect()
            })
        });
        assert!(join_all(all).await.iter().all(|answer| answer.as_ref().is_err_and(store::Error::is_unavailable)));
        assert_eq!(tried.into_inner(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lane_that_does_not_end_keeps_nobody_from_the_other() {
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
    async fn if_one_breaks_down_the_others_go_on() {
        let group = Arc::new(GroupCommit::new(1, 1));
        let all = (0..20).map(|n| {
            let group = Arc::clone(&group);
            tokio::spawn(async move {
                let work = |jobs: Vec<Number>| {
                    assert!(jobs[0].0 != 7, "it was to be so");
                    double(jobs)
                };
                group.submit(Number(n), work).await
            })
        });
        let mut broken = 0;
        for (n, answer) in (0..).zip(join_all(all).await) {
            match answer {
                Ok(Ok(answer)) => assert_eq!(answer, n * 2),
                // Whose work it was, or who did it.
                Ok(Err(_)) | Err(_) => broken += 1,
            }
        }
        assert!((1..=2).contains(&broken), "{broken}");
    }
}
