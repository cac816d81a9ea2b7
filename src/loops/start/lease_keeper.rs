//! Renews the leases of all held claims from the claim until the answer is written. At shutdown, returns the tasks that
//! were not called to the queue of the database.

use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::NAME;
use super::held::HeldClaims;
use crate::store::tasks::{lease, transitions};
use crate::store::{self, Actor, Patience, Session, Store};

/// Renews the leases of the claims that this instance holds.
pub struct LeaseKeeper {
    pub(super) store: Store,
    pub(super) held: HeldClaims,
    pub(super) tracker: TaskTracker,
    pub(super) lease: Duration,
}

impl LeaseKeeper {
    /// Renews all leases at each third of their length, so that one failed renewal does no harm.
    pub async fn run(&self, shutdown: CancellationToken) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(self.lease / 3) => {}
                () = shutdown.cancelled() => return,
            }
            if let Err(error) = self.renew().await {
                tracing::warn!(%error, "leases not renewed");
            }
        }
    }

    /// Renews the leases of all held claims once.
    pub async fn renew(&self) -> store::Result<()> {
        let held = self.held.all();
        if held.is_empty() {
            return Ok(());
        }
        let (held, lease, at) = (held.as_slice(), self.lease, Instant::now());
        let renew = |session: Session| async move { lease::renew(&session, held, lease).await };
        let kept = self.store.retrying(Patience::Brief, renew).await?;
        self.held.update(held, &kept, None, at + lease);
        Ok(())
    }

    /// Completes the shutdown after the loop and the caller have ended. Returns uncalled tasks to the queue and waits
    /// up to `grace` for the calls in progress, whose leases it still renews.
    pub async fn drain(&self, grace: Duration) {
        let uncalled = self.held.remove_uncalled();
        if !uncalled.is_empty() {
            let uncalled = uncalled.as_slice();
            let write = |session: Session| async move {
                let mut tx = session.begin(Actor::Loop(NAME)).await?;
                let count = transitions::give_back(&mut tx, uncalled).await?;
                tx.commit().await?;
                Ok(count)
            };
            let given_back = match self.store.retrying(Patience::Brief, write).await {
                Err(error) if error.is_busy() => self.store.retrying(Patience::Least, write).await,
                result => result,
            };
            match given_back {
                Ok(count) => tracing::info!(count, "unstarted tasks returned to the queue"),
                // The timeout loop returns them when their leases end.
                Err(error) => {
                    tracing::warn!(%error, count = uncalled.len(), "unstarted tasks not returned to the queue");
                }
            }
        }
        self.tracker.close();
        let waiting = async {
            let renewing = async {
                loop {
                    tokio::time::sleep(self.lease / 3).await;
                    let _ = self.renew().await;
                }
            };
            tokio::select! {
                () = self.tracker.wait() => {}
                () = renewing => {}
            }
        };
        if tokio::time::timeout(grace, waiting).await.is_err() {
            // The timeout loop of another instance takes over when the leases end.
            tracing::warn!(calls = self.tracker.len(), "calls unanswered at shutdown");
        }
    }
}
