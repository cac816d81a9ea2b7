//! Hosts that requests may name: without keys only those of the service, so that no web page can reach it through a
//! browser.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::Fixture;

async fn status(f: &Fixture, head: &str) -> u16 {
    let mut stream = TcpStream::connect(f.api.base().strip_prefix("http://").unwrap()).await.unwrap();
    stream.write_all(format!("{head}\r\nconnection: close\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_else(|| panic!("{answer}"));
    assert!(status < 400 || answer.contains("application/problem+json"), "{answer}");
    status
}

#[tokio::test]
async fn without_keys_a_request_for_a_foreign_host_is_refused() {
    let f = Fixture::with(&["--host-url", "https://tasks.example.org/reprise"]).await;
    for host in ["localhost", "LocalHost:1234", "127.0.0.1:80", "127.9.9.9", "[::1]:8085", "tasks.example.org"] {
        assert_eq!(status(&f, &format!("GET /task HTTP/1.1\r\nhost: {host}")).await, 200, "{host}");
    }
    for host in ["evil.example.org", "evil.example.org:8085", "10.0.0.1", "localhost.evil.org", "x"] {
        for path in ["/task", "/docs/", "/metrics", "/openapi.json", "/nothing"] {
            assert_eq!(status(&f, &format!("GET {path} HTTP/1.1\r\nhost: {host}")).await, 421, "{host} {path}");
        }
        for path in ["/health", "/ready"] {
            assert_eq!(status(&f, &format!("GET {path} HTTP/1.1\r\nhost: {host}")).await, 200, "{host} {path}");
        }
    }
    assert_eq!(status(&f, "GET /task HTTP/1.0").await, 200);
    assert_eq!(status(&f, "GET /task HTTP/1.1").await, 400);
    assert_eq!(status(&f, "GET http://evil.example.org/task HTTP/1.1\r\nhost: localhost").await, 421);
    assert_eq!(status(&f, "GET /task HTTP/1.1\r\nhost: localhost\r\nhost: evil.example.org").await, 421);
}

#[tokio::test]
async fn with_keys_any_host_is_accepted() {
    let f = Fixture::with(&["--api-keys", "reader:key-of-the-reader:read"]).await;
    assert_eq!(status(&f, "GET /task HTTP/1.1\r\nhost: anything\r\nx-api-key: key-of-the-reader").await, 200);
    assert_eq!(status(&f, "GET /task HTTP/1.1\r\nhost: anything").await, 401);
}
