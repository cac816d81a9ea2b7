//! Just enough HTTP/1.1 to call the service and to be called by it, over connections that stay open. The benchmark shares
//! its cores with what it measures: a general client costs several times as much for each request. Bodies must have a
//! length; nothing here understands chunks, redirects or TLS.

use std::io::{self, Error, ErrorKind};
use std::ops::Range;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use uuid::Uuid;

const MAX_HEADERS: usize = 64;
const READ_AT_ONCE: usize = 16 * 1024;

/// Where requests go, and the headers they all have.
#[derive(Clone, Debug)]
pub struct Peer {
    authority: String,
    headers: String,
}

impl Peer {
    pub fn new(authority: &str, key: Option<&str>) -> Peer {
        let key = key.map(|key| format!("authorization: Bearer {key}\r\n")).unwrap_or_default();
        Peer { authority: authority.to_owned(), headers: format!("host: {authority}\r\n{key}") }
    }

    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// Writes a request into `buffer`, replacing what was there.
    pub fn request(&self, buffer: &mut Vec<u8>, method: &str, path: &str, body: &[u8]) {
        buffer.clear();
        for part in [method, " ", path, " HTTP/1.1\r\n", &self.headers] {
            buffer.extend_from_slice(part.as_bytes());
        }
        if method != "GET" {
            let length = format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len());
            buffer.extend_from_slice(length.as_bytes());
        }
        buffer.extend_from_slice(b"\r\n");
        buffer.extend_from_slice(body);
    }

    pub async fn connect(&self) -> io::Result<Connection> {
        let stream = TcpStream::connect(&self.authority).await?;
        Connection::new(stream)
    }
}

/// The answer to a request; its body is in the connection's buffer.
#[derive(Clone, Debug)]
pub struct HttpAnswer {
    pub status: u16,
    body: Range<usize>,
}

/// A request as the sink sees it.
#[derive(Clone, Debug)]
pub struct Incoming {
    /// The query parameter `handle`, decoded.
    pub handle: Option<String>,
}

/// One connection, either side of it.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
    /// The end of the message that was read last: what follows belongs to the next one.
    consumed: usize,
}

impl Connection {
    pub fn new(stream: TcpStream) -> io::Result<Connection> {
        stream.set_nodelay(true)?;
        Ok(Connection { stream, buffer: Vec::with_capacity(READ_AT_ONCE), consumed: 0 })
    }

    /// Sends a whole request and reads the whole answer.
    pub async fn exchange(&mut self, request: &[u8]) -> io::Result<HttpAnswer> {
        self.write(request).await?;
        let ended = || Error::new(ErrorKind::UnexpectedEof, "the connection was closed before the answer");
        let (status, body) = self.read(parse_answer).await?.ok_or_else(ended)?;
        Ok(HttpAnswer { status, body })
    }

    pub fn body(&self, answer: &HttpAnswer) -> &[u8] {
        &self.buffer[answer.body.clone()]
    }

    /// The next request; `None` when the other side has gone.
    pub async fn incoming(&mut self) -> io::Result<Option<Incoming>> {
        Ok(self.read(parse_request).await?.map(|(handle, _)| Incoming { handle }))
    }

    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await
    }

    /// Reads a message: what `parse` makes of its head, and where its body is. `None` if there is no further one.
    async fn read<T>(
        &mut self,
        parse: fn(&[u8]) -> io::Result<Option<Head<T>>>,
    ) -> io::Result<Option<(T, Range<usize>)>> {
        self.buffer.drain(..self.consumed);
        self.consumed = 0;
        let head = loop {
            if let Some(head) = parse(&self.buffer)? {
                break head;
            }
            if !self.fill().await? {
                return if self.buffer.is_empty() { Ok(None) } else { Err(ErrorKind::UnexpectedEof.into()) };
            }
        };
        let end = head.length + head.body;
        self.buffer.reserve(end.saturating_sub(self.buffer.len()));
        while self.buffer.len() < end {
            if !self.fill().await? {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
        self.consumed = end;
        Ok(Some((head.said, head.length..end)))
    }

    async fn fill(&mut self) -> io::Result<bool> {
        self.buffer.reserve(READ_AT_ONCE);
        Ok(self.stream.read_buf(&mut self.buffer).await? > 0)
    }
}

/// The head of a message: its own length, that of the body after it, and what it said.
struct Head<T> {
    length: usize,
    body: usize,
    said: T,
}

fn parse_answer(bytes: &[u8]) -> io::Result<Option<Head<u16>>> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(length) = response.parse(bytes).map_err(Error::other)? else { return Ok(None) };
    let body = body_length(response.headers)?;
    Ok(Some(Head { length, body, said: response.code.unwrap_or_default() }))
}

fn parse_request(bytes: &[u8]) -> io::Result<Option<Head<Option<String>>>> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let httparse::Status::Complete(length) = request.parse(bytes).map_err(Error::other)? else { return Ok(None) };
    let query = request.path.and_then(|path| path.split_once('?')).map_or("", |(_, query)| query);
    let handle = url::form_urlencoded::parse(query.as_bytes()).find(|(name, _)| name == "handle");
    let said = handle.map(|(_, handle)| handle.into_owned());
    Ok(Some(Head { length, body: body_length(request.headers)?, said }))
}

fn body_length(headers: &[httparse::Header<'_>]) -> io::Result<usize> {
    let named = |name: &str| headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
    if named("transfer-encoding").is_some() {
        return Err(Error::new(ErrorKind::Unsupported, "a body without a content-length is not understood"));
    }
    let Some(header) = named("content-length") else { return Ok(0) };
    let length = std::str::from_utf8(header.value).ok().and_then(|text| text.trim().parse().ok());
    length.ok_or_else(|| Error::new(ErrorKind::InvalidData, "the content-length is not a number"))
}

/// The uuids that are values of `name` in a JSON text, in their order. Much cheaper than reading it as JSON.
pub fn uuids(json: &[u8], name: &str) -> Vec<Uuid> {
    let start = format!("\"{name}\":\"");
    let start = start.as_bytes();
    let mut found = Vec::new();
    let mut rest = json;
    while let Some(at) = rest.windows(start.len()).position(|window| window == start) {
        rest = &rest[at + start.len()..];
        found.extend(rest.get(..36).and_then(|text| Uuid::try_parse_ascii(text).ok()));
    }
    found
}

/// The first of them.
pub fn first_uuid(json: &[u8], name: &str) -> Option<Uuid> {
    // It stands in the first of many objects.
    uuids(&json[..json.len().min(1024)], name).first().copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[test]
    fn uuids_are_found_by_the_whole_name() {
        let (a, b) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let text = format!(r#"[{{"id":"{a}","batch_id":"{b}"}},{{"id":"{b}","x":null}}]"#);
        assert_eq!(uuids(text.as_bytes(), "id"), [a, b]);
        assert_eq!(uuids(text.as_bytes(), "batch_id"), [b]);
        assert!(uuids(br#"{"id":"short"#, "id").is_empty());
    }

    #[tokio::test]
    async fn messages_are_read_one_by_one_however_they_arrive() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peer = Peer::new(&listener.local_addr().unwrap().to_string(), Some("k"));
        let mut here = peer.connect().await.unwrap();
        let mut there = Connection::new(listener.accept().await.unwrap().0).unwrap();

        let mut both = Vec::new();
        peer.request(&mut both, "POST", "/a?handle=http%3A%2F%2Fh%2Ftask%2F1%3Frun%3D0%26token%3Dt", b"{}");
        let mut second = Vec::new();
        peer.request(&mut second, "GET", "/b", b"");
        assert!(String::from_utf8_lossy(&second).contains("authorization: Bearer k\r\n"));
        both.extend_from_slice(&second[..10]);
        here.write(&both).await.unwrap();
        let first = there.incoming().await.unwrap().unwrap();
        assert_eq!(first.handle.as_deref(), Some("http://h/task/1?run=0&token=t"));
        here.write(&second[10..]).await.unwrap();
        assert_eq!(there.incoming().await.unwrap().unwrap().handle, None);

        there.write(b"HTTP/1.1 201 Created\r\nContent-Length: 5\r\n\r\nhello").await.unwrap();
        let answer = here.exchange(b"").await.unwrap();
        assert_eq!((answer.status, here.body(&answer)), (201, &b"hello"[..]));
        there.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await.unwrap();
        assert_eq!(here.exchange(b"").await.unwrap_err().kind(), ErrorKind::Unsupported);
        drop(here);
        assert!(there.incoming().await.unwrap().is_none());
    }
}
