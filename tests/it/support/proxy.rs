//! A TCP proxy between an instance and its PostgreSQL that breaks connections as networks do. A fault concerns all
//! present connections, some of them, the one that next says a given text, or new ones. `heal` ends delays and stalls
//! and lets new connections work; a connection that was forgotten, or that lost an answer, stays as it is.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf, split};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Database, eventually};

/// How long the server keeps a forgotten connection after its client has closed it: keep-alive ends it then.
const SERVER_NOTICES: Duration = Duration::from_secs(20);

/// The message with which a client checks whether the connection still works.
const PING: &[u8] = b"S\0\0\0\x04";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Accepts everything, passes nothing on and never closes.
    Forget,
    /// Holds everything back until the proxy is healed.
    Stall,
    /// Closes both ends.
    Cut,
    /// Passes everything on, each time that much later.
    Delay(Duration),
    /// Passes requests on and drops the answers: the client does not hear of a commit.
    Swallow,
}

impl Fault {
    /// Whether a connection with this fault works again when the proxy is healed.
    fn passes(self) -> bool {
        matches!(self, Fault::Stall | Fault::Delay(_))
    }
}

#[derive(Clone)]
pub struct Proxy {
    pub url: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    lines: Mutex<Vec<Arc<Line>>>,
    /// Faults of the connection on which a client sends one of these texts next.
    traps: Mutex<Vec<(&'static str, Fault)>>,
    /// The fault of new connections.
    new: Mutex<Option<Fault>>,
}

/// One connection.
struct Line {
    fault: watch::Sender<Option<Fault>>,
    /// The fault that the connection suffers after so many more statements.
    fuse: Mutex<Option<(usize, Fault)>>,
    /// Both ends are closed, or to be closed.
    over: CancellationToken,
}

impl Line {
    /// Nothing comes through any more, whatever is healed.
    fn is_lost(&self) -> bool {
        self.fault.borrow().is_some_and(|fault| !fault.passes())
    }

    /// One more statement.
    fn burn(&self) {
        let mut fuse = self.fuse.lock().unwrap();
        match fuse.as_mut() {
            Some((0, fault)) => {
                self.suffer(*fault);
                *fuse = None;
            }
            Some((left, _)) => *left -= 1,
            None => {}
        }
    }

    fn suffer(&self, fault: Fault) {
        self.fault.send_if_modified(|present| {
            // A lost connection stays lost.
            let changes = present.is_none_or(Fault::passes);
            if changes {
                *present = Some(fault);
            }
            changes
        });
        if fault == Fault::Cut {
            self.over.cancel();
        }
    }
}

/// Where the server listens.
#[derive(Clone)]
enum Target {
    Socket(String),
    Address(String),
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

impl Target {
    fn of(url: &url::Url) -> Target {
        let port = url.port().unwrap_or(5432);
        match url.query_pairs().find(|(name, _)| name == "host") {
            Some((_, dir)) => Target::Socket(format!("{dir}/.s.PGSQL.{port}")),
            None => Target::Address(format!("{}:{port}", url.host_str().unwrap_or("localhost"))),
        }
    }

    async fn connect(&self) -> std::io::Result<Box<dyn Stream>> {
        Ok(match self {
            Target::Socket(path) => Box::new(UnixStream::connect(path).await?),
            Target::Address(address) => Box::new(TcpStream::connect(address).await?),
        })
    }
}

impl Proxy {
    pub async fn start(db: &Database) -> Proxy {
        let mut url = url::Url::parse(&db.url).unwrap();
        let target = Target::of(&url);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        url.set_host(Some("127.0.0.1")).unwrap();
        url.set_port(Some(listener.local_addr().unwrap().port())).unwrap();
        url.query_pairs_mut().clear().append_pair("sslmode", "disable");
        let state = Arc::new(State::default());
        let proxy = Proxy { url: url.into(), state: Arc::clone(&state) };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let line = state.accept();
                tokio::spawn(serve(line, Arc::clone(&state), client, target.clone()));
            }
        });
        proxy
    }

    /// The connection on which a client next prepares a statement with this text falls silent.
    pub fn trap(&self, text: &'static str) {
        self.break_saying(Fault::Forget, text);
    }

    pub async fn trapped(&self) {
        eventually("a connection to be trapped", async || self.state.traps.lock().unwrap().is_empty().then_some(()))
            .await;
    }

    /// All connections that there are fall silent; new ones work.
    pub fn forget_all(&self) {
        self.break_all(Fault::Forget);
    }

    /// All connections that there are; new ones work.
    pub fn break_all(&self, fault: Fault) {
        self.break_some(fault, || true);
    }

    /// Breaks the present connections that `chosen` selects.
    pub fn break_some(&self, fault: Fault, mut chosen: impl FnMut() -> bool) {
        for line in self.lines() {
            if chosen() {
                line.suffer(fault);
            }
        }
    }

    /// The next connection on which a client says this, before it is passed on.
    pub fn break_saying(&self, fault: Fault, text: &'static str) {
        self.state.traps.lock().unwrap().push((text, fault));
    }

    /// Each connection that there is, when its client has said that many more statements and says the next one.
    pub fn break_each_after(&self, fault: Fault, statements: usize) {
        for line in self.lines() {
            *line.fuse.lock().unwrap() = Some((statements, fault));
        }
    }

    /// All connections that are opened from now on, until the proxy is healed.
    pub fn break_new(&self, fault: Fault) {
        *self.state.new.lock().unwrap() = Some(fault);
    }

    /// Everything, until the proxy is healed.
    pub fn break_network(&self, fault: Fault) {
        self.break_new(fault);
        self.break_all(fault);
    }

    /// Ends stalls, delays and traps, and lets new connections work.
    pub fn heal(&self) {
        *self.state.new.lock().unwrap() = None;
        self.state.traps.lock().unwrap().clear();
        for line in self.lines() {
            *line.fuse.lock().unwrap() = None;
            line.fault.send_if_modified(|fault| {
                let passes = fault.is_some_and(Fault::passes);
                if passes {
                    *fault = None;
                }
                passes
            });
        }
    }

    /// Connections that are open on the client's side.
    pub fn open(&self) -> usize {
        self.lines().len()
    }

    fn lines(&self) -> Vec<Arc<Line>> {
        self.state.lines.lock().unwrap().clone()
    }
}

impl State {
    fn accept(&self) -> Arc<Line> {
        // Under the lock, so that breaking new connections and then all present ones misses none.
        let mut lines = self.lines.lock().unwrap();
        let fault = *self.new.lock().unwrap();
        let (fault, over) = (watch::Sender::new(fault), CancellationToken::new());
        let line = Arc::new(Line { fault, fuse: Mutex::default(), over });
        lines.push(Arc::clone(&line));
        line
    }

    /// Applies the traps and the fuse of a connection to what its client sends.
    fn heard(&self, line: &Line, said: &[u8]) {
        if line.is_lost() {
            return;
        }
        if !said.is_empty() && said != PING {
            line.burn();
        }
        let mut traps = self.traps.lock().unwrap();
        let says = |text: &str| said.windows(text.len()).any(|part| part == text.as_bytes());
        if let Some(found) = traps.iter().position(|(text, _)| says(text)) {
            line.suffer(traps.remove(found).1);
        }
    }
}

/// Until the connection is over.
async fn serve(line: Arc<Line>, state: Arc<State>, client: TcpStream, target: Target) {
    let _ = client.set_nodelay(true);
    tokio::select! {
        () = exchange(&line, &state, client, &target) => {}
        () = line.over.cancelled() => {}
    }
    state.lines.lock().unwrap().retain(|other| !Arc::ptr_eq(other, &line));
}

async fn exchange(line: &Line, state: &State, mut client: TcpStream, target: &Target) {
    let mut fault = line.fault.subscribe();
    // A connection that is not let through opens none at the server.
    loop {
        let present = *fault.borrow_and_update();
        match present {
            Some(Fault::Forget) => return discard(&mut client).await,
            Some(Fault::Cut) => return,
            Some(Fault::Stall) => fault.changed().await.unwrap(),
            Some(Fault::Delay(_) | Fault::Swallow) | None => break,
        }
    }
    let Ok(server) = target.connect().await else { return };
    let ((from_client, to_client), (from_server, to_server)) = (split(client), split(server));
    let requests = async {
        pass(line, Some(state), from_client, to_server).await;
        if line.is_lost() {
            // The client has closed a connection that the server takes for open.
            tokio::time::sleep(SERVER_NOTICES).await;
            line.over.cancel();
        }
    };
    tokio::join!(requests, pass(line, None, from_server, to_client));
}

/// Passes on the bytes of one direction. Requests are checked against the traps of `state`.
async fn pass<S: Stream>(line: &Line, state: Option<&State>, mut from: ReadHalf<S>, mut to: WriteHalf<impl Stream>) {
    let mut fault = line.fault.subscribe();
    let mut buffer = vec![0; 65_536];
    loop {
        // An error is an end, too.
        let length = from.read(&mut buffer).await.unwrap_or(0);
        if let Some(state) = state {
            state.heard(line, &buffer[..length]);
        }
        let silent = loop {
            let present = *fault.borrow_and_update();
            match present {
                None => break false,
                Some(Fault::Delay(by)) => {
                    tokio::time::sleep(by).await;
                    break false;
                }
                Some(Fault::Stall) => fault.changed().await.unwrap(),
                Some(Fault::Swallow) => break state.is_none(),
                Some(Fault::Forget | Fault::Cut) => break true,
            }
        };
        match (length, silent) {
            // The client is not told that the server has closed; that the client has closed ends the other direction.
            (0, true) if state.is_none() => std::future::pending().await,
            (0, true) => return,
            (0, false) => {
                let _ = to.shutdown().await;
                return;
            }
            (_, true) => {}
            (_, false) => {
                if to.write_all(&buffer[..length]).await.is_err() {
                    return;
                }
            }
        }
    }
}

async fn discard(client: &mut TcpStream) {
    let mut buffer = vec![0; 65_536];
    while let Ok(1..) = client.read(&mut buffer).await {}
}
