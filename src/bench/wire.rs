//! Just enough HTTP/1.1 to call the service and to be called by it, over persistent connections. The benchmark shares
//! its cores with the service, and a general client costs several times as much for each request. Bodies must have a
//! `content-length`; chunks, redirects and TLS are not supported.

use std::io::{self, Error, ErrorKind};
use std::ops::Range;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use uuid::Uuid;

const MAX_HEADERS: usize = 64;
const READ_AT_ONCE: usize = 16 * 1024;

/// The address of a service and the headers of all requests to it.
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

    /// Writes a request into `buffer` and replaces its content.
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

/// The answer to a request. Its body is in the buffer of the connection.
#[derive(Clone, Debug)]
pub struct HttpAnswer {
    pub status: u16,
    body: Range<usize>,
}

/// A request that the sink received.
#[derive(Clone, Debug)]
pub struct Incoming {
    /// The query parameter `handle`, decoded.
    pub handle: Option<String>,
}

/// A connection, on the side of the client or of the server.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
    /// The end of the last message in the buffer. The bytes after it belong to the next message.
    consumed: usize,
}

impl Connection {
    pub fn new(stream: TcpStream) -> io::Result<Connection> {
        stream.set_nodelay(true)?;
        Ok(Connection { stream, buffer: Vec::with_capacity(READ_AT_ONCE), consumed: 0 })
    }

    /// Sends a request and reads the complete answer.
    pub async fn exchange(&mut self, request: &[u8]) -> io::Result<HttpAnswer> {
        self.write(request).await?;
        let ended = || Error::new(ErrorKind::UnexpectedEof, "the connection was closed before the answer");
        let (status, body) = self.read(parse_answer).await?.ok_or_else(ended)?;
        Ok(HttpAnswer { status, body })
    }

    pub fn body(&self, answer: &HttpAnswer) -> &[u8] {
        &self.buffer[answer.body.clone()]
    }

    /// Reads the next request; `None` after the client has closed the connection.
    pub async fn incoming(&mut self) -> io::Result<Option<Incoming>> {
        Ok(self.read(parse_request).await?.map(|(handle, _)| Incoming { handle }))
    }

    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await
    }

    /// Reads a message and returns its parsed head and the range of its body; `None` at the end of the connection.
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
        Ok(Some((head.value, head.length..end)))
    }

    async fn fill(&mut self) -> io::Result<bool> {
        self.buffer.reserve(READ_AT_ONCE);
        Ok(self.stream.read_buf(&mut self.buffer).await? > 0)
    }
}

/// The head of a message: its length, the length of the body after it, and the value parsed from it.
struct Head<T> {
    length: usize,
    body: usize,
    value: T,
}

fn parse_answer(bytes: &[u8]) -> io::Result<Option<Head<u16>>> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(length) = response.parse(bytes).map_err(Error::other)? else { return Ok(None) };
    let body = body_length(response.headers)?;
    Ok(Some(Head { length, body, value: response.code.unwrap_or_default() }))
}

fn parse_request(bytes: &[u8]) -> io::Result<Option<Head<Option<String>>>> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let httparse::Status::Complete(length) = request.parse(bytes).map_err(Error::other)? else { return Ok(None) };
    let query = request.path.and_then(|path| path.split_once('?')).map_or("", |(_, query)| query);
    let handle = url::form_urlencoded::parse(query.as_bytes()).find(|(name, _)| name == "handle");
    let value = handle.map(|(_, handle)| handle.into_owned());
    Ok(Some(Head { length, body: body_length(request.headers)?, value }))
}

fn body_length(headers: &[httparse::Header<'_>]) -> io::Result<usize> {
    let named = |name: &str| headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
    if named("transfer-encoding").is_some() {
        return Err(Error::new(ErrorKind::Unsupported, "bodies without a content-length are not supported"));
    }
    let Some(header) = named("content-length") else { return Ok(0) };
    let length = std::str::from_utf8(header.value).ok().and_then(|text| text.trim().parse().ok());
    length.ok_or_else(|| Error::new(ErrorKind::InvalidData, "the content-length is not a number"))
}

/// Returns the uuids that are values of `name` in a JSON text, in their order. This is much cheaper than parsing it.
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

/// Returns the first uuid that is a value of `name` in a JSON text.
pub fn first_uuid(json: &[u8], name: &str) -> Option<Uuid> {
    // It is in the first object.
    uuids(&json[..json.len().min(1024)], name).first().copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[test]
    fn uuids_are_found_by_the_exact_field_name() {
        let (a, b) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let text = format!(r#"[{{"id":"{a}","batch_id":"{b}"}},{{"id":"{b}","x":null}}]"#);
        assert_eq!(uuids(text.as_bytes(), "id"), [a, b]);
        assert_eq!(uuids(text.as_bytes(), "batch_id"), [b]);
        assert!(uuids(br#"{"id":"short"#, "id").is_empty());
    }

    #[tokio::test]
    async fn split_and_joined_messages_are_read_one_by_one() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peer = Peer::new(&listener.local_addr().unwrap().to_string(), Some("k"));
        let mut client = peer.connect().await.unwrap();
        let mut server = Connection::new(listener.accept().await.unwrap().0).unwrap();

        let mut both = Vec::new();
        peer.request(&mut both, "POST", "/a?handle=http%3A%2F%2Fh%2Ftask%2F1%3Frun%3D0%26token%3Dt", b"{}");
        let mut second = Vec::new();
        peer.request(&mut second, "GET", "/b", b"");
        assert!(String::from_utf8_lossy(&second).contains("authorization: Bearer k\r\n"));
        both.extend_from_slice(&second[..10]);
        client.write(&both).await.unwrap();
        let first = server.incoming().await.unwrap().unwrap();
        assert_eq!(first.handle.as_deref(), Some("http://h/task/1?run=0&token=t"));
        client.write(&second[10..]).await.unwrap();
        assert_eq!(server.incoming().await.unwrap().unwrap().handle, None);

        server.write(b"HTTP/1.1 201 Created\r\nContent-Length: 5\r\n\r\nhello").await.unwrap();
        let answer = client.exchange(b"").await.unwrap();
        assert_eq!((answer.status, client.body(&answer)), (201, &b"hello"[..]));
        server.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await.unwrap();
        assert_eq!(client.exchange(b"").await.unwrap_err().kind(), ErrorKind::Unsupported);
        drop(client);
        assert!(server.incoming().await.unwrap().is_none());
    }
}
