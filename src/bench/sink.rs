//! The worker of the benchmark: it is called with `on_start`, answers at once with an empty 200, and reports Success on the
//! handle it was given, over a few connections that stay open.

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

/// Reports under way at the same time.
const REPORTERS: usize = 64;
const SUCCESS: &[u8] = br#"{"status":"Success"}"#;

/// A task that was started and reported.
#[derive(Clone, Copy, Debug)]
pub struct Worked {
    pub id: Uuid,
    /// Its `on_start` had arrived.
    pub called: Instant,
    /// Its Success was sent.
    pub reported: Instant,
    /// … and answered.
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

/// A call that is to be reported.
struct Called {
    handle: String,
    at: Instant,
}

impl Sink {
    pub async fn start(address: SocketAddr) -> Result<Sink, String> {
        let cannot = |error: io::Error| format!("the sink cannot listen on {address}: {error}");
        let listener = TcpListener::bind(address).await.map_err(cannot)?;
        let url = format!("http://{}/", listener.local_addr().map_err(cannot)?);
        let (tell, worked) = unbounded_channel();
        let listening = tokio::spawn(listen(listener, tell)).abort_handle();
        Ok(Sink { url, worked: Mutex::new(worked), listening })
    }

    /// The next task that was reported, in the order of the answers.
    pub async fn next(&self) -> Result<Worked, String> {
        self.worked.lock().await.recv().await.unwrap_or_else(|| Err("the sink has ended".into()))
    }

    /// Forgets what nobody waited for.
    pub async fn clear(&self) {
        let mut worked = self.worked.lock().await;
        while worked.try_recv().is_ok() {}
    }
}

/// Everything ends with it: what it has started is in its set.
async fn listen(listener: TcpListener, tell: UnboundedSender<Result<Worked, String>>) {
    let mut running = JoinSet::new();
    let (call, calls) = unbounded_channel();
    let calls = Arc::new(Mutex::new(calls));
    for _ in 0..REPORTERS {
        running.spawn(report(Arc::clone(&calls), tell.clone()));
    }
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let call = call.clone();
                running.spawn(async move {
                    if let Ok(connection) = Connection::new(stream) {
                        // A connection that breaks is the caller's to notice.
                        let _ = receive(connection, call).await;
                    }
                });
            }
            Err(error) => {
                let _ = tell.send(Err(format!("the sink accepts no connections: {error}")));
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

async fn report(calls: Arc<Mutex<UnboundedReceiver<Called>>>, tell: UnboundedSender<Result<Worked, String>>) {
    let mut reporter = Reporter::default();
    loop {
        let called = calls.lock().await.recv().await;
        let Some(called) = called else { return };
        let _ = tell.send(reporter.report(&called).await);
    }
}

/// Keeps its connection for as long as handles lead to the same place.
#[derive(Default)]
struct Reporter {
    open: Option<(Peer, Connection)>,
    buffer: Vec<u8>,
}

impl Reporter {
    async fn report(&mut self, called: &Called) -> Result<Worked, String> {
        let handle = &called.handle;
        let strange = || format!("not a handle: {handle}");
        let rest = handle.strip_prefix("http://").ok_or_else(strange)?;
        let (authority, path) = rest.split_at(rest.find('/').ok_or_else(strange)?);
        let id = path.rsplit('/').next().and_then(|last| Uuid::try_parse(last.get(..36)?).ok()).ok_or_else(strange)?;
        if self.open.as_ref().is_some_and(|(peer, _)| peer.authority() != authority) {
            self.open = None;
        }
        // The service may have closed a connection that was idle.
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

    /// The status and, where it is not the expected one, what was said.
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
        let said = if answer.status == 200 { &[][..] } else { connection.body(&answer) };
        let said = String::from_utf8_lossy(said).into_owned();
        self.open = Some((peer, connection));
        Ok((answer.status, said))
    }
}
