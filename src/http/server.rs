//! Accepts connections and passes their requests to the router. Replaces `axum::serve`, which sets no time limit on the
//! headers of a request: a client could keep connections open forever. Must not inspect requests.

use std::pin::pin;
use std::sync::Arc;

use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{Api, router};

/// Serves until `stop` is canceled, and returns after the last answer.
pub async fn serve(mut listener: TcpListener, api: Api, stop: CancellationToken) {
    let mut protocol = http1::Builder::new();
    // The limit also closes connections that are idle for as long.
    protocol.timer(TokioTimer::new()).header_read_timeout(api.request_time);
    let service = TowerToHyperService::new(router(Arc::new(api)));
    let connections = TaskTracker::new();
    loop {
        let (stream, _) = tokio::select! {
            accepted = Listener::accept(&mut listener) => accepted,
            () = stop.cancelled() => break,
        };
        // Answers are small: Nagle's algorithm would only delay them.
        let _ = stream.set_nodelay(true);
        let connection = protocol.serve_connection(TokioIo::new(stream), service.clone());
        let stop = stop.clone();
        connections.spawn(async move {
            let mut connection = pin!(connection);
            tokio::select! {
                // The error of a client that disconnects is ignored.
                _ = connection.as_mut() => return,
                () = stop.cancelled() => connection.as_mut().graceful_shutdown(),
            }
            let _ = connection.await;
        });
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}
