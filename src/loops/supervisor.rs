//! Starts and watches everything that runs in the background. A part that ends or panics before the shutdown ends the
//! process with an error.

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

#[derive(Debug, Default)]
pub struct Supervisor {
    parts: JoinSet<&'static str>,
    shutdown: CancellationToken,
}

impl Supervisor {
    /// Returns the token that tells the parts to end.
    pub fn shutdown(&self) -> CancellationToken {
        self.shutdown.clone()
    }

    pub fn spawn(&mut self, name: &'static str, part: impl Future<Output = ()> + Send + 'static) {
        self.parts.spawn(async move {
            part.await;
            name
        });
    }

    /// Waits until a part ends unexpectedly, and says which.
    pub async fn died(&mut self) -> String {
        match self.parts.join_next().await {
            Some(Ok(name)) => format!("the {name} loop ended unexpectedly"),
            Some(Err(error)) => format!("a background part failed: {error}"),
            None => std::future::pending().await,
        }
    }

    /// Tells all parts to end and waits for them.
    pub async fn stop(&mut self) {
        self.shutdown.cancel();
        while self.parts.join_next().await.is_some() {}
    }
}
