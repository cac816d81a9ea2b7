//! Exchanges wake-ups between instances: one part sends them, one receives them.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::store::Store;

/// The pause between two notifications. They are hints, so one says as much as a hundred.
const PAUSE: Duration = Duration::from_millis(5);

/// Tells the other instances about work that this one has committed.
pub async fn tell(store: Store, shutdown: CancellationToken) {
    loop {
        let hints = tokio::select! {
            hints = store.wake().outgoing() => hints,
            () = shutdown.cancelled() => return,
        };
        if let Err(error) = store.notify(hints).await {
            tracing::debug!(%error, "wake-up not sent to other instances");
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Receives wake-ups from the other instances and hints the loops of this one, unless a pooler prevents `LISTEN`.
pub async fn listen(store: Store, shutdown: CancellationToken) {
    loop {
        tokio::select! {
            () = listen_until_error(&store) => {}
            () = shutdown.cancelled() => return,
        }
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

async fn listen_until_error(store: &Store) {
    match store.can_listen().await {
        Ok(true) => {}
        Ok(false) => {
            tracing::info!("LISTEN does not work through this pooler; work of other instances is found by polling");
            return std::future::pending().await;
        }
        Err(error) => return tracing::debug!(%error, "not listening to other instances yet"),
    }
    let mut listener = match store.listen().await {
        Ok(listener) => listener,
        Err(error) => return tracing::debug!(%error, "not listening to other instances yet"),
    };
    loop {
        // A timeout means that no instance has sent anything, or that the connection is dead.
        let result = match tokio::time::timeout(store.limit(), listener.hinted()).await {
            Ok(hinted) => hinted.map(|hints| store.wake().notify_local(hints)),
            Err(_) => listener.check().await,
        };
        if let Err(error) = result {
            return tracing::debug!(%error, "listening to other instances failed");
        }
    }
}
