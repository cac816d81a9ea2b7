//! Keeps the leases of claimed tasks, and gives back at shutdown what was not started.

use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::NAME;
use super::held::HeldClaims;
use crate::store::tasks::{lease, transitions};
use crate::store::{self, Actor, Patience, Session, Store};

/// Keeps the leases of what is held, and gives back at the end what was not started.
pub struct Keeper {
    pub(super) store: Store,
    pub(super) held: HeldClaims,
    pub(super) tracker: TaskTracker,
    pub(super) lease: Duration,
}

impl Keeper {
    /// Renews at a third of the lease, so that one lost renewal does no harm.
    pub async fn run(&self, shutdown: CancellationToken) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(self.lease / 3) => {}
                () = shutdown.cancelled() => return,
            }
            if let Err(error) = self.renew().await {
                tracing::warn!(%error, "leases were not renewed");
            }
        }
    }

    pub async fn renew(&self) -> store::Result<()> {
        let held = self.held.all();
        if held.is_empty() {
            return Ok(());
        }
        let (held, lease, at) = (held.as_slice(), self.lease, Instant::now());
        let renew = |session: Session| async move { lease::renew(&session, held, lease).await };
        let kept = self.store.retrying(Patience::Brief, renew).await?;
        self.held.keep(held, &kept, None, at + lease);
        Ok(())
    }

    /// Ends in good order, once the loop and the caller have ended: what was not called goes back into the queue, and
    /// the calls under way get `grace` to be answered. Their leases are still renewed meanwhile.
    pub async fn drain(&self, grace: Duration) {
        let unstarted = self.held.drop_uncalled();
        if !unstarted.is_empty() {
            let unstarted = unstarted.as_slice();
            let write = |session: Session| async move {
                let mut tx = session.begin(Actor::Loop(NAME)).await?;
                let count = transitions::give_back(&mut tx, unstarted).await?;
                tx.commit().await?;
                Ok(count)
            };
            let given_back = match self.store.retrying(Patience::Brief, write).await {
                Err(error) if error.is_busy() => self.store.retrying(Patience::Least, write).await,
                result => result,
            };
            match given_back {
                Ok(count) => tracing::info!(count, "unstarted tasks given back"),
                Err(error) => tracing::warn!(%error, "unstarted tasks not given back: their leases will end"),
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
            tracing::warn!(calls = self.tracker.len(), "calls are still unanswered: their leases will end");
        }
    }
}
