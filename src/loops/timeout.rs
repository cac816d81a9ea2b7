//! Running tasks without a sign of life fail; claims whose instance died go back into the queue.

use std::time::Duration;

use super::runner::{Loop, Tick};
use crate::domain::lifecycle::{Event, decide};
use crate::domain::status::Status;
use crate::domain::task::Task;
use crate::store::{self, Actor, Store, dead_ends, lock, progress, stats, transitions};
use crate::wake::Hints;

const LIMIT: i64 = 500;

pub struct Timeout {
    pub store: Store,
    pub interval: Duration,
}

impl Loop for Timeout {
    const NAME: &'static str = "timeout";

    fn interval(&self) -> Duration {
        self.interval
    }

    fn hint(&self) -> Option<Hints> {
        Some(Hints::TIMEOUT)
    }

    async fn tick(&self) -> store::Result<Tick> {
        self.store.retrying(|| self.expire()).await
    }
}

impl Timeout {
    async fn expire(&self) -> store::Result<Tick> {
        let mut tx = self.store.begin(Actor::Loop(Self::NAME)).await?;
        let event = |task: &Task| if task.status == Status::Claimed { Event::LeaseRanOut } else { Event::TimedOut };
        let locked = lock::timed_out(&mut tx, LIMIT).await?;
        let locked = dead_ends::widen(&mut tx, locked, |task, moment| decide(task, &event(task), moment)).await?;
        let (mut decided, mut alive) = (Vec::new(), Vec::new());
        for task in &locked.tasks {
            let event = event(task);
            if task.has_sign_of_life(locked.moment.now) {
                alive.push(task.id);
            }
            if let Ok(Some(transition)) = decide(task, &event, locked.moment) {
                tracing::info!(task.id = %task.id, batch.id = %task.batch_id, run = task.run, ?event, "task overdue");
                decided.push(transition);
            }
        }
        transitions::apply(&mut tx, &decided, locked.moment).await?;
        if !alive.is_empty() {
            progress::put_off(&mut tx, &alive).await?;
        }
        let due_in = stats::next_timeout(&mut tx).await?;
        tx.commit().await?;
        let more = locked.tasks.len() as u64 >= LIMIT.cast_unsigned();
        Ok(Tick { processed: decided.len() as u64, more, due_in })
    }
}
