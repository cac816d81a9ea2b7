//! Waits until a task has a status or a batch is complete, before the usual answer is read.

use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Error, Result, Service};
use crate::store::unless_canceled;
use crate::store::waiters::{Awaited, MOST_WAITERS};
use crate::wake::Hints;

/// The right to read the answer after a wait. Requests that were answered together read one after the other, a few at a
/// time, so that other requests find free connections.
#[derive(Debug)]
pub struct AnswerPermit(#[allow(dead_code, reason = "held until the answer is read")] Option<OwnedSemaphorePermit>);

impl Service {
    /// Waits until the condition holds or cannot hold any more, the time is over or the service ends. With a `run`, a
    /// task at another run ends the wait, too. Fails if too many requests wait already.
    pub async fn wait(
        &self,
        awaited: Awaited,
        run: Option<i32>,
        time: Duration,
        ending: &CancellationToken,
    ) -> Result<AnswerPermit> {
        if time.is_zero() || ending.is_cancelled() {
            return Ok(AnswerPermit(None));
        }
        let deadline = Instant::now() + time;
        let waiters = self.store.waiters();
        let too_many = || Error::TooManyWaiters(MOST_WAITERS);
        let mut waiter = waiters.register(awaited).ok_or_else(too_many)?;
        if self.store.is_settled(awaited, run).await? {
            return Ok(AnswerPermit(None));
        }
        // The loop sleeps while no request waits.
        self.store.wake().notify_local(Hints::WAITERS);
        let answered = ending.run_until_cancelled(tokio::time::timeout_at(deadline, waiter.answered()));
        unless_canceled(answered).await?;
        drop(waiter);
        let permit = unless_canceled(self.lanes.answers.clone().acquire_owned()).await?;
        Ok(AnswerPermit(permit.ok()))
    }
}
