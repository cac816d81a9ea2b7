//! Carries wake-ups between instances: one part tells the others, one listens to them.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::store::Store;

/// At most one notification in this time: they are hints, and one says as much as a hundred.
const PAUSE: Duration = Duration::from_millis(5);

/// Tells the other instances what was committed here.
pub async fn tell(store: Store, shutdown: CancellationToken) {
    loop {
        let hints = tokio::select! {
            hints = store.wake().outgoing() => hints,
            () = shutdown.cancelled() => return,
        };
        if let Err(error) = store.notify(hints).await {
            tracing::debug!(%error, "other instances were not told");
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Passes on what the other instances tell, if it can be heard.
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
            tracing::info!("a pooler keeps other instances from being heard: their work is found by polling");
            return std::future::pending().await;
        }
        Err(error) => return tracing::debug!(%error, "cannot listen to other instances yet"),
    }
    let mut listener = match store.listen().await {
        Ok(listener) => listener,
        Err(error) => return tracing::debug!(%error, "cannot listen to other instances yet"),
    };
    loop {
        // Nobody says anything, or the connection has fallen silent.
        let heard = match tokio::time::timeout(store.limit(), listener.hinted()).await {
            Ok(hinted) => hinted.map(|hints| store.wake().notify_local(hints)),
            Err(_) => listener.check().await,
        };
        if let Err(error) = heard {
            return tracing::debug!(%error, "lost the other instances");
        }
    }
}
