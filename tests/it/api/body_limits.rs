//! Limits on the size of requests: of actions, tasks and metadata, and of all bodies that are read at once.

use futures_util::FutureExt;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{Fixture, Receiver, text};

fn body_of(bytes: usize) -> Value {
    json!({"kind": "Webhook", "params": {"url": "http://127.0.0.1:9/", "verb": "Post", "body": "x".repeat(bytes)}})
}

#[tokio::test]
async fn oversized_actions_and_tasks_are_refused() {
    let f = Fixture::new().await;
    let refused = async |body: Value| -> Vec<String> {
        let answer = f.api.post("/task", &body).await;
        assert_eq!(answer.status, 400, "{}", answer.body);
        answer.body["details"].as_array().unwrap().iter().map(text).collect()
    };
    let large = body_of(300_000);
    let size = large.to_string().len();
    let line = |path: &str| format!("{path}: must have at most 262144 bytes, not {size} (MAX_ACTION_BYTES)");
    let tasks = json!([{"name": "n", "kind": "k"}, {"name": "n", "kind": "k", "on_start": large}]);
    assert_eq!(refused(tasks).await, [line("[1].on_start")]);
    let tasks = json!({"tasks": [{"name": "n", "kind": "k", "on_retry": [body_of(1), large]}]});
    assert_eq!(refused(tasks).await, [line("tasks[0].on_retry[1]")]);
    assert_eq!(refused(json!({"tasks": [], "on_batch_complete": [large]})).await, [line("on_batch_complete[0]")]);
    let task = json!({"name": "n", "kind": "k", "on_success": vec![body_of(250_000); 5]});
    let size = task.to_string().len();
    let line = format!("[0]: must have at most 1048576 bytes, not {size} (MAX_TASK_BYTES)");
    assert_eq!(refused(json!([task])).await, [line]);
    f.api.create(&json!([{"name": "n", "kind": "k", "on_success": vec![body_of(250_000); 4]}])).await;

    let small = Fixture::with(&["--max-action-bytes", "1024", "--max-task-bytes", "2048"]).await;
    let answer = small.api.post("/task", &json!([{"name": "n", "kind": "k", "on_start": body_of(1024)}])).await;
    assert!(text(&answer.body["detail"]).ends_with("(MAX_ACTION_BYTES)"), "{}", answer.body);
    let answer =
        small.api.post("/task", &json!([{"name": "n", "kind": "k", "metadata": {"a": "x".repeat(2048)}}])).await;
    assert!(text(&answer.body["detail"]).ends_with("(MAX_TASK_BYTES)"), "{}", answer.body);
}

#[tokio::test]
async fn metadata_is_measured_as_it_is_stored() {
    let f = Fixture::new().await;
    let numbers = |count: usize| json!(vec![1e308; count]);
    let refused = |metadata: Value| json!([{"name": "n", "kind": "k", "metadata": metadata}]);
    let answer = f.api.post("/task", &refused(json!({"a": numbers(220)}))).await;
    assert_eq!(answer.status, 400);
    assert_eq!(text(&answer.body["detail"]), "[0].metadata: must have at most 65536 bytes, not 68207");
    let answer = f.api.post("/task", &json!({"tasks": [], "metadata": {"a": numbers(220)}})).await;
    assert_eq!(text(&answer.body["detail"]), "metadata: must have at most 65536 bytes, not 68207");

    let ids = f.api.create(&refused(json!({"a": numbers(110)}))).await;
    let stored = "select max(octet_length(replace(metadata::text, ' ', '')))::bigint from task_spec";
    assert_eq!(f.db.number(stored).await, 110 * 310 + 7);
    let patch = format!("/task/{}", ids[0]);
    let answer = f.api.patch(&patch, &json!({"metadata": {"b": numbers(110)}})).await;
    assert_eq!(answer.status, 400, "the merged metadata is too large");
    assert_eq!(f.api.patch(&patch, &json!({"metadata": {"a": numbers(1), "b": numbers(110)}})).await.status, 200);
}

/// Announces a POST of 128 KiB, whose body is sent later.
async fn announce(f: &Fixture) -> TcpStream {
    let mut stream = TcpStream::connect(f.api.base().strip_prefix("http://").unwrap()).await.unwrap();
    let head = "POST /task HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 131072\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

/// The server asks for the body when it has room for it.
async fn asked(stream: &mut TcpStream) {
    let mut answer = [0; 25];
    stream.read_exact(&mut answer).await.unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 100 Continue"), "{}", String::from_utf8_lossy(&answer));
}

#[tokio::test]
async fn large_request_bodies_share_a_memory_budget() {
    let f = Fixture::with(&["--max-body-bytes", "131072"]).await;
    let mut first = Vec::new();
    for _ in 0..2 {
        let mut stream = announce(&f).await;
        asked(&mut stream).await;
        first.push(stream);
    }
    let mut third = announce(&f).await;
    let mut ready = Box::pin(asked(&mut third));
    // Small requests need no budget, nor do requests above the limit, which are refused.
    for _ in 0..20 {
        f.api.create(&json!([{"name": "n", "kind": "k"}])).await;
        assert!(ready.as_mut().now_or_never().is_none(), "the budget is used up");
    }
    let answer = f.api.post("/task", &json!([{"name": "x".repeat(200_000), "kind": "k"}])).await;
    assert_eq!(answer.status, 413);
    let body = format!("[{}]", " ".repeat(131_070));
    first[0].write_all(body.as_bytes()).await.unwrap();
    ready.await;
    let mut answer = [0; 12];
    first[0].read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 204");
    // A client that disconnects frees its part of the budget.
    let mut fourth = announce(&f).await;
    drop(first.remove(1));
    asked(&mut fourth).await;
}

#[tokio::test]
async fn a_report_body_above_2_mib_is_refused() {
    let f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let ids = f.api.create(&json!([{"name": "n", "kind": "k", "on_start": receiver.action("/s")}])).await;
    let answer = f.api.patch(&format!("/task/{}", ids[0]), &json!({"failure_reason": "x".repeat(3_000_000)})).await;
    assert_eq!(answer.status, 413, "{}", answer.body);
    assert_eq!(text(&answer.body["detail"]), "body: must have at most 2097152 bytes");
}
