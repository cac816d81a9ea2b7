//! The worker of the benchmark: it receives `on_start`, answers at once with an empty 200, and reports Success on the
//! task's handle over persistent connections.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use tokio::net::TcpListener;
use tokio::sync::Mutex;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::{AbortHandle, JoinSet};
use uuid::Uuid;

use super::wire::{Connection, Peer};

/// Concurrent reports.
const REPORTERS: usize = 64;
const SUCCESS: &[u8] = br#"{"status":"Success"}"#;

/// A task whose Success was reported.
#[derive(Clone, Copy, Debug)]
pub struct Worked {
    pub id: Uuid,
    /// When its `on_start` arrived.
    pub called: Instant,
    /// When its Success was sent.
    pub reported: Instant,
    /// When its Success was answered.
    pub done: Instant,
}

pub struct Sink {
    pub url: String,
    worked: Mutex<UnboundedReceiver<Result<Worked, String>>>,
    listening: AbortHandle,
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

/// A call whose Success is still to be reported.
struct Called {
    handle: String,
    at: Instant,
}

impl Sink {
    pub async fn start(address: SocketAddr) -> Result<Sink, String> {
        let cannot = |error: io::Error| format!("--sink {address}: cannot listen: {error}");
        let listener = TcpListener::bind(address).await.map_err(cannot)?;
        let url = format!("http://{}/", listener.local_addr().map_err(cannot)?);
        let (sender, worked) = unbounded_channel();
        let listening = tokio::spawn(listen(listener, sender)).abort_handle();
        Ok(Sink { url, worked: Mutex::new(worked), listening })
    }

    /// Waits for the next reported task, in the order of the answers.
    pub async fn next(&self) -> Result<Worked, String> {
        self.worked.lock().await.recv().await.unwrap_or_else(|| Err("the sink has ended".into()))
    }

    /// Discards reported tasks that no workload has waited for.
    pub async fn clear(&self) {
        let mut worked = self.worked.lock().await;
        while worked.try_recv().is_ok() {}
    }
}

/// Accepts calls and runs the reporters. All of its tasks are in one set, so they end with this function.
async fn listen(listener: TcpListener, sender: UnboundedSender<Result<Worked, String>>) {
    let mut running = JoinSet::new();
    let (call, calls) = unbounded_channel();
    let calls = Arc::new(Mutex::new(calls));
    for _ in 0..REPORTERS {
        running.spawn(report(Arc::clone(&calls), sender.clone()));
    }
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let call = call.clone();
                running.spawn(async move {
                    if let Ok(connection) = Connection::new(stream) {
                        // The service notices a broken connection.
                        let _ = receive(connection, call).await;
                    }
                });
            }
            Err(error) => {
                let _ = sender.send(Err(format!("--sink: cannot accept connections: {error}")));
                return;
            }
        }
        while running.try_join_next().is_some() {}
    }
}

async fn receive(mut connection: Connection, call: UnboundedSender<Called>) -> io::Result<()> {
    while let Some(incoming) = connection.incoming().await? {
        let at = Instant::now();
        connection.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await?;
        if let Some(handle) = incoming.handle {
            let _ = call.send(Called { handle, at });
        }
    }
    Ok(())
}

async fn report(calls: Arc<Mutex<UnboundedReceiver<Called>>>, sender: UnboundedSender<Result<Worked, String>>) {
    let mut reporter = Reporter::default();
    loop {
        let called = calls.lock().await.recv().await;
        let Some(called) = called else { return };
        let _ = sender.send(reporter.report(&called).await);
    }
}

/// A client that reports tasks. It keeps its connection while all handles point to the same service.
#[derive(Default)]
struct Reporter {
    open: Option<(Peer, Connection)>,
    buffer: Vec<u8>,
}

impl Reporter {
    async fn report(&mut self, called: &Called) -> Result<Worked, String> {
        let handle = &called.handle;
        let invalid = || format!("not a handle: {handle}");
        let rest = handle.strip_prefix("http://").ok_or_else(invalid)?;
        let (authority, path) = rest.split_at(rest.find('/').ok_or_else(invalid)?);
        let id = path.rsplit('/').next().and_then(|last| Uuid::try_parse(last.get(..36)?).ok()).ok_or_else(invalid)?;
        if self.open.as_ref().is_some_and(|(peer, _)| peer.authority() != authority) {
            self.open = None;
        }
        // The service may have closed an idle connection.
        let may_be_closed = self.open.is_some();
        let reported = Instant::now();
        let sent = match self.send(authority, path).await {
            Err(_) if may_be_closed => self.send(authority, path).await,
            sent => sent,
        };
        match sent.map_err(|error| format!("PATCH {path}: {error}"))? {
            (200, _) => Ok(Worked { id, called: called.at, reported, done: Instant::now() }),
            (status, body) => Err(format!("PATCH {path}: {status} {body}")),
        }
    }

    /// Sends Success and returns the status and, unless it is 200, the body of the answer.
    async fn send(&mut self, authority: &str, path: &str) -> io::Result<(u16, String)> {
        let (peer, mut connection) = if let Some(open) = self.open.take() {
            open
        } else {
            let peer = Peer::new(authority, None);
            let connection = peer.connect().await?;
            (peer, connection)
        };
        peer.request(&mut self.buffer, "PATCH", path, SUCCESS);
        let answer = connection.exchange(&self.buffer).await?;
        let body = if answer.status == 200 { &[][..] } else { connection.body(&answer) };
        let body = String::from_utf8_lossy(body).into_owned();
        self.open = Some((peer, connection));
        Ok((answer.status, body))
    }
}
