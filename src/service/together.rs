//! Requests that arrive while a transaction is in flight go together into the next one, and each is answered after the
//! commit that holds it. No timer: alone, a request goes at once; under load, many share one wait for the disk.
//!
//! There is no worker in the background. Whoever finds a lane free does the work of all that wait, its own or not, so a
//! caller must not be dropped while it waits: requests run to their end (`Api::unbroken`).

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::{Semaphore, oneshot};

use crate::store;

/// What can be done together.
pub trait Job: Send {
    /// Whether it may go into one transaction with these, which were there before it.
    fn joins(&self, others: &[Self]) -> bool
    where
        Self: Sized;
}

/// A queue of jobs with a few lanes, each of which does one batch at a time.
#[derive(Debug)]
pub struct Together<J, A> {
    waiting: Mutex<VecDeque<(J, oneshot::Sender<A>)>>,
    lanes: Semaphore,
    most: usize,
}

impl<J: Job, A> Together<J, A> {
    /// `most` jobs go into one batch.
    pub fn new(lanes: usize, most: usize) -> Together<J, A> {
        Together { waiting: Mutex::default(), lanes: Semaphore::new(lanes), most }
    }

    /// Has `job` done by `work`, alone or with others; `work` answers them in their order. `None` if whoever was to do it
    /// broke down.
    pub async fn submit<Fut>(&self, job: J, work: impl Fn(Vec<J>) -> Fut) -> Option<A>
    where
        Fut: Future<Output = Vec<A>>,
    {
        let (tell, mut told) = oneshot::channel();
        self.waiting().push_back((job, tell));
        loop {
            let lane = tokio::select! {
                biased;
                answer = &mut told => return answer.ok(),
                lane = self.lanes.acquire() => lane.ok()?,
            };
            let (jobs, tell): (Vec<J>, Vec<oneshot::Sender<A>>) = self.take().into_iter().unzip();
            if !jobs.is_empty() {
                for (answer, tell) in work(jobs).await.into_iter().zip(tell) {
                    let _ = tell.send(answer);
                }
            }
            drop(lane);
        }
    }

    /// The first, and with it whatever goes with those before it. The others keep their order.
    fn take(&self) -> Vec<(J, oneshot::Sender<A>)> {
        let mut waiting = self.waiting();
        let mut jobs: Vec<J> = Vec::new();
        let (mut tell, mut left) = (Vec::new(), VecDeque::new());
        while jobs.len() < self.most
            && let Some((job, sender)) = waiting.pop_front()
        {
            if job.joins(&jobs) {
                jobs.push(job);
                tell.push(sender);
            } else {
                left.push_back((job, sender));
            }
        }
        left.append(&mut waiting);
        *waiting = left;
        jobs.into_iter().zip(tell).collect()
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<(J, oneshot::Sender<A>)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Does all of them together. If that fails for another reason than that there is no database, each is done for itself:
/// one that cannot be done must not keep the others.
pub async fn one_fails_alone<'a, J, A, Fut>(jobs: &'a [J], work: impl Fn(&'a [J]) -> Fut) -> Vec<store::Result<A>>
where
    Fut: Future<Output = store::Result<Vec<A>>>,
{
    let error = match work(jobs).await {
        Ok(answers) => return answers.into_iter().map(Ok).collect(),
        Err(error) => error,
    };
    if error.is_unavailable() || jobs.len() == 1 {
        let mut answers: Vec<_> = jobs.iter().skip(1).map(|_| Err(error.copy())).collect();
        answers.push(Err(error));
        return answers;
    }
    tracing::warn!(%error, jobs = jobs.len(), "changes could not be made together");
    let mut answers = Vec::with_capacity(jobs.len());
    for job in jobs {
        let answer = work(std::slice::from_ref(job)).await;
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

    async fn double(jobs: Vec<Number>) -> Vec<u32> {
        tokio::task::yield_now().await;
        jobs.iter().map(|job| job.0 * 2).collect()
    }

    #[tokio::test]
    async fn everybody_gets_the_own_answer() {
        let together = Together::new(1, 10);
        let batches = AtomicUsize::new(0);
        let all = (0..100).map(|n| {
            together.submit(Number(n), |jobs: Vec<Number>| {
                assert!(jobs.len() <= 10 && jobs.iter().all(|job| job.0 % 2 == jobs[0].0 % 2), "{jobs:?}");
                batches.fetch_add(1, Ordering::Relaxed);
                double(jobs)
            })
        });
        let answers: Vec<Option<u32>> = join_all(all).await;
        assert_eq!(answers, (0..100).map(|n| Some(n * 2)).collect::<Vec<_>>());
        let batches = batches.load(Ordering::Relaxed);
        assert!(batches < 20, "{batches} batches");
    }

    #[tokio::test]
    async fn one_alone_waits_for_nobody() {
        let together = Together::new(2, 10);
        for n in 0..3 {
            let answer = together.submit(Number(n), |jobs: Vec<Number>| {
                assert_eq!(jobs.len(), 1);
                double(jobs)
            });
            assert_eq!(answer.await, Some(n * 2));
        }
    }

    #[tokio::test]
    async fn the_same_again_goes_into_the_next_batch() {
        let together = Together::new(1, 10);
        let all = [4, 4, 6, 4].map(|n| together.submit(Number(n), double));
        assert_eq!(join_all(all).await, [Some(8), Some(8), Some(12), Some(8)]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn if_one_breaks_down_the_others_go_on() {
        let together = Arc::new(Together::new(1, 1));
        let all = (0..20).map(|n| {
            let together = Arc::clone(&together);
            tokio::spawn(async move {
                let work = |jobs: Vec<Number>| {
                    assert!(jobs[0].0 != 7, "it was to be so");
                    double(jobs)
                };
                together.submit(Number(n), work).await
            })
        });
        let mut broken = 0;
        for (n, answer) in (0..).zip(join_all(all).await) {
            match answer {
                Ok(Some(answer)) => assert_eq!(answer, n * 2),
                // Whose work it was, or who did it.
                Ok(None) | Err(_) => broken += 1,
            }
        }
        assert!((1..=2).contains(&broken), "{broken}");
    }
}
