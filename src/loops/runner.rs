//! Runs a loop: calls `tick`, again at once if there is more to do. Otherwise sleeps until the next due time, a
//! wake-up, the poll interval or the shutdown, whichever comes first.

use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::store::{self, Store};
use crate::wake::{Hints, Wake};

const LONGEST_BACKOFF: Duration = Duration::from_secs(5);

/// A loop of the service.
pub trait Loop: Send + Sync + 'static {
    const NAME: &'static str;

    /// The longest sleep between two ticks.
    fn interval(&self) -> Duration;

    /// The hint that wakes the loop before its interval is over.
    fn hint(&self) -> Option<Hints> {
        None
    }

    /// The time limit of a tick, after which the runner cancels it. A tick may run several transactions or repeat one.
    /// If it takes longer than two of them may, it has lost its database.
    fn limit(&self, store: &Store) -> Duration {
        store.limit() * 2
    }

    /// Does a bounded amount of work.
    fn tick(&self) -> impl Future<Output = store::Result<Tick>> + Send;
}

/// The result of a tick.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tick {
    pub processed: u64,
    /// The batch was full, so there is probably more to do.
    pub more: bool,
    /// Seconds until the next work is due; negative if it is overdue.
    pub due_in: Option<f64>,
}

/// Runs a loop until the shutdown.
pub async fn run<L: Loop>(this: L, store: Store, shutdown: CancellationToken) {
    let limit = this.limit(&store);
    let mut failures = 0u32;
    while !shutdown.is_cancelled() {
        let started = Instant::now();
        // The shutdown does not cancel a tick, which must be able to hand over the work it has claimed.
        let result = tokio::time::timeout(limit, this.tick()).await;
        metrics::histogram!("reprise_loop_tick_duration_seconds", "loop" => L::NAME)
            .record(started.elapsed().as_secs_f64());
        let sleep = match result {
            Ok(Ok(tick)) => {
                metrics::counter!("reprise_loop_ticks_total", "loop" => L::NAME, "outcome" => "ok").increment(1);
                metrics::counter!("reprise_loop_processed_total", "loop" => L::NAME).increment(tick.processed);
                let lag = tick.due_in.map_or(0.0, |due| (-due).max(0.0));
                metrics::gauge!("reprise_loop_lag_seconds", "loop" => L::NAME).set(lag);
                if failures > 0 {
                    tracing::info!(loop.name = L::NAME, failures, "loop recovered");
                    failures = 0;
                }
                if tick.more {
                    continue;
                }
                until_due(tick.due_in, this.interval())
            }
            failed => {
                metrics::counter!("reprise_loop_ticks_total", "loop" => L::NAME, "outcome" => "error").increment(1);
                if failures == 0 {
                    let error = match failed {
                        Ok(Err(error)) => error.to_string(),
                        _ => store::Error::timed_out(limit).to_string(),
                    };
                    tracing::warn!(loop.name = L::NAME, %error, "loop tick failed");
                }
                failures += 1;
                let backoff = Duration::from_millis(100 << failures.min(6)).min(LONGEST_BACKOFF);
                backoff.mul_f64(rand::random_range(0.5..1.0))
            }
        };
        tokio::select! {
            () = tokio::time::sleep(sleep) => {}
            () = hinted(store.wake(), this.hint()), if failures == 0 => {}
            () = shutdown.cancelled() => return,
        }
    }
}

async fn hinted(wake: &Wake, hint: Option<Hints>) {
    match hint {
        Some(hint) => wake.hinted(hint).await,
        None => std::future::pending().await,
    }
}

/// Returns how long to sleep. Work that is overdue and was not done is locked by another transaction, so the loop tries
/// again soon, but not at once.
fn until_due(due_in: Option<f64>, interval: Duration) -> Duration {
    match due_in {
        Some(secs) if secs <= 0.0 => Duration::from_millis(20).min(interval),
        Some(secs) if secs < interval.as_secs_f64() => Duration::from_secs_f64(secs) + Duration::from_micros(500),
        _ => interval,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::domain::retry::RetryLimits;

    /// A loop whose only tick takes a minute.
    struct Slow {
        limit: Option<Duration>,
        ended: CancellationToken,
    }

    impl Loop for Slow {
        const NAME: &'static str = "slow";

        fn interval(&self) -> Duration {
            Duration::from_secs(1)
        }

        fn limit(&self, store: &Store) -> Duration {
            self.limit.unwrap_or(store.limit() * 2)
        }

        async fn tick(&self) -> store::Result<Tick> {
            tokio::time::sleep(Duration::from_secs(60)).await;
            self.ended.cancel();
            Ok(Tick::default())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_loop_may_have_a_longer_limit_than_transactions() {
        let store = Store::new("postgres://nowhere", 1, Clock::Database, RetryLimits::default()).unwrap();
        let store = store.with_limit(Duration::from_secs(10));
        for (limit, ends) in [(Some(Duration::from_secs(90)), true), (None, false)] {
            let ended = CancellationToken::new();
            let slow = run(Slow { limit, ended: ended.clone() }, store.clone(), ended);
            assert_eq!(tokio::time::timeout(Duration::from_secs(3600), slow).await.is_ok(), ends, "{limit:?}");
        }
    }

    #[test]
    fn sleeps_until_the_next_due_time_or_the_interval() {
        let second = Duration::from_secs(1);
        assert_eq!(until_due(None, second), second);
        assert_eq!(until_due(Some(7.0), second), second);
        assert!(until_due(Some(0.25), second) >= Duration::from_millis(250));
        assert!(until_due(Some(0.25), second) < Duration::from_millis(252));
        assert_eq!(until_due(Some(-5.0), second), Duration::from_millis(20));
    }
}
