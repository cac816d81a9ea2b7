//! The load generator: clients that send requests one after the other, each over its own connection. An unexpected
//! answer ends the measurement, because a rate that counts refused requests means nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::progress::Progress;
use super::wire::{Connection, Peer};

/// The requests of a workload and the answers it expects.
pub trait Requests: Send + Sync + 'static {
    /// Writes request number `i` into the buffer.
    fn write(&self, i: usize, peer: &Peer, buffer: &mut Vec<u8>);

    /// The status of a successful answer.
    fn expected(&self) -> u16;

    /// Reads the body of a successful answer.
    fn answered(&self, _i: usize, _body: &[u8]) {}
}

/// The durations of requests.
#[derive(Clone, Debug, Default)]
pub struct Latencies(Vec<Duration>);

impl Latencies {
    pub fn add(&mut self, one: Duration) {
        self.0.push(one);
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn extend(&mut self, other: &Latencies) {
        self.0.extend_from_slice(&other.0);
    }

    /// Returns the smallest value that a share `q` of all values does not exceed.
    pub fn quantile(&self, q: f64) -> Option<Duration> {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a rank"
        )]
        let rank = (sorted.len() as f64 * q).ceil() as usize;
        sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied()
    }
}

#[derive(Clone, Debug, Default)]
pub struct Measured {
    pub elapsed: Duration,
    pub latencies: Latencies,
}

/// Sends each request of `range` once, over `clients` connections that are opened before the clock starts.
pub async fn run(
    peer: &Peer,
    clients: usize,
    range: std::ops::Range<usize>,
    requests: &Arc<impl Requests>,
    progress: &Progress,
) -> Result<Measured, String> {
    let mut connections = Vec::new();
    for _ in 0..clients.min(range.len()) {
        connections.push(peer.connect().await.map_err(|error| format!("{}: {error}", peer.authority()))?);
    }
    let next = Arc::new(AtomicUsize::new(range.start));
    let started = Instant::now();
    let mut running = JoinSet::new();
    for connection in connections {
        let client = LoadClient { peer: peer.clone(), connection, next: Arc::clone(&next), end: range.end };
        running.spawn(client.run(Arc::clone(requests), progress.clone()));
    }
    let mut latencies = Latencies::default();
    while let Some(ended) = running.join_next().await {
        // After an error, dropping the set stops the other clients.
        latencies.extend(&ended.map_err(|error| error.to_string())??);
    }
    Ok(Measured { elapsed: started.elapsed(), latencies })
}

struct LoadClient {
    peer: Peer,
    connection: Connection,
    next: Arc<AtomicUsize>,
    end: usize,
}

impl LoadClient {
    async fn run(mut self, requests: Arc<impl Requests>, progress: Progress) -> Result<Latencies, String> {
        let (mut latencies, mut buffer) = (Latencies::default(), Vec::new());
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= self.end {
                return Ok(latencies);
            }
            requests.write(i, &self.peer, &mut buffer);
            let sent = Instant::now();
            let answer =
                self.connection.exchange(&buffer).await.map_err(|error| failed(&buffer, &error.to_string()))?;
            latencies.add(sent.elapsed());
            let body = self.connection.body(&answer);
            if answer.status != requests.expected() {
                return Err(failed(&buffer, &format!("{} {}", answer.status, String::from_utf8_lossy(body))));
            }
            requests.answered(i, body);
            progress.step();
        }
    }
}

/// Formats an error with the first line of the request and the first 300 characters of `what`.
fn failed(request: &[u8], what: &str) -> String {
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let what: String = what.chars().take(300).collect();
    format!("{}: {what}", String::from_utf8_lossy(line))
}

/// Sends one request over a new connection, outside of any measurement.
pub async fn once(peer: &Peer, method: &str, path: &str, body: &[u8]) -> Result<(u16, Vec<u8>), String> {
    let mut buffer = Vec::new();
    peer.request(&mut buffer, method, path, body);
    let failed = |error: std::io::Error| failed(&buffer, &error.to_string());
    let mut connection = peer.connect().await.map_err(failed)?;
    let answer = connection.exchange(&buffer).await.map_err(failed)?;
    Ok((answer.status, connection.body(&answer).to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_measured_values() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.quantile(0.5), None);
        for ms in (1..=1000).rev() {
            latencies.add(Duration::from_millis(ms));
        }
        let ms = |q| latencies.quantile(q).unwrap().as_millis();
        assert_eq!((ms(0.5), ms(0.99), ms(0.999), ms(1.0), ms(0.0)), (500, 990, 999, 1000, 1));
    }
}
