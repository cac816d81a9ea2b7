//! Something between the service and its database that forgets connections without closing them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixStream};

use super::{Database, eventually};

#[derive(Clone)]
pub struct Proxy {
    pub url: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    opened: AtomicUsize,
    /// Connections up to this one have fallen silent.
    silent_up_to: AtomicUsize,
    /// The connection that is to say this next falls silent before it is passed on.
    trap: Mutex<Option<&'static str>>,
}

/// One connection.
struct Line {
    number: usize,
    silent: AtomicBool,
    state: Arc<State>,
}

impl Proxy {
    pub async fn start(db: &Database) -> Proxy {
        let mut url = url::Url::parse(&db.url).unwrap();
        let dir = url.query_pairs().find(|(name, _)| name == "host").expect("a socket").1.into_owned();
        let socket = format!("{dir}/.s.PGSQL.{}", url.port().unwrap_or(5432));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        url.set_host(Some("127.0.0.1")).unwrap();
        url.set_port(Some(listener.local_addr().unwrap().port())).unwrap();
        url.query_pairs_mut().clear().append_pair("sslmode", "disable");
        let state = Arc::new(State::default());
        let proxy = Proxy { url: url.into(), state: Arc::clone(&state) };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let number = state.opened.fetch_add(1, Ordering::SeqCst) + 1;
                let line = Arc::new(Line { number, silent: AtomicBool::new(false), state: Arc::clone(&state) });
                let Ok(server) = UnixStream::connect(&socket).await else { continue };
                let (from_client, to_client) = client.into_split();
                let (from_server, to_server) = server.into_split();
                tokio::spawn(pass(Arc::clone(&line), from_client, to_server));
                tokio::spawn(pass(line, from_server, to_client));
            }
        });
        proxy
    }

    /// The connection on which somebody prepares a statement with this in it falls silent.
    pub fn trap(&self, text: &'static str) {
        *self.state.trap.lock().unwrap() = Some(text);
    }

    pub async fn trapped(&self) {
        eventually("somebody to be trapped", async || self.state.trap.lock().unwrap().is_none().then_some(())).await;
    }

    /// All connections that there are fall silent; new ones work.
    pub fn forget_all(&self) {
        self.state.silent_up_to.store(self.state.opened.load(Ordering::SeqCst), Ordering::SeqCst);
    }
}

impl Line {
    fn falls_silent(&self, said: &[u8]) -> bool {
        let mut trap = self.state.trap.lock().unwrap();
        if trap.is_some_and(|text| said.windows(text.len()).any(|part| part == text.as_bytes())) {
            *trap = None;
            self.silent.store(true, Ordering::SeqCst);
        }
        self.silent.load(Ordering::SeqCst) || self.number <= self.state.silent_up_to.load(Ordering::SeqCst)
    }
}

async fn pass(line: Arc<Line>, mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
    let mut buffer = vec![0; 65_536];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        if line.falls_silent(&buffer[..length]) {
            // Nothing is passed on any more, and nobody is told.
            std::future::pending::<()>().await;
        }
        if to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}
