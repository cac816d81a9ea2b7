//! Authentication: API keys, their scopes, the tokens of handles, and that neither is ever shown.

use std::path::PathBuf;

use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::instance::{Instance, command};
use crate::support::{Answer, Client, Database, Fixture, Receiver, Reply, text};

const KEYS: &str = "reader:key-of-the-reader:read,writer:key-of-the-writer,boss:key-of-the-boss:admin";
const READER: &str = "key-of-the-reader";
const WRITER: &str = "key-of-the-writer";
const BOSS: &str = "key-of-the-boss";

async fn locked() -> Fixture {
    Fixture::with(&["--api-keys", KEYS]).await
}

fn assert_refused(answer: &Answer, status: u16) {
    assert_eq!(answer.status, status, "{}", answer.body);
    assert_eq!(answer.headers["content-type"], "application/problem+json");
    assert_eq!(answer.body["status"], status);
    assert!(answer.body["detail"].as_str().is_some_and(|detail| !detail.is_empty()), "{}", answer.body);
    let challenge = answer.headers.get("www-authenticate").map(|value| value.to_str().unwrap());
    assert_eq!(challenge, (status == 401).then_some("Bearer"));
    assert!(!answer.body.to_string().contains("key-of"), "{}", answer.body);
}

fn tasks() -> Value {
    json!([{"name": "n", "kind": "k", "timeout": 3600}])
}

/// Every operation, with the ids of tasks that do not exist.
fn operations() -> Vec<(Method, String)> {
    let document: Value = serde_json::from_str(include_str!("../../../openapi/openapi.json")).unwrap();
    let mut found = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys() {
            let method = method.to_uppercase().parse().unwrap();
            let number = if path.contains("deliveries") { "1" } else { "01900000-0000-7000-8000-000000000000" };
            found.push((method, path.replace("{id}", number).replace("{batch_id}", number).replace("{kind}", "k")));
        }
    }
    assert!(found.len() > 20);
    found
}

#[tokio::test]
async fn requests_without_a_key_reach_only_health_and_readiness() {
    let f = locked().await;
    let wrong = [f.api.clone(), f.api.key("key-of-the-write"), f.api.with(&[("x-api-key", "writer")]), f.api.key("")];
    for (method, path) in operations() {
        let open = path == "/health" || path == "/ready";
        for client in &wrong {
            let answer = client.call(method.clone(), &path, None).await;
            if open {
                assert_eq!(answer.status, 200, "{path}");
            } else {
                assert_refused(&answer, 401);
            }
        }
    }
    for path in ["/docs", "/docs/", "/docs/index.css", "/openapi.json", "/", "/nothing", "/health/", "//health"] {
        assert_refused(&f.api.get(path).await, 401);
        assert_ne!(f.api.key(READER).get(path).await.status, 401, "{path}");
    }
    assert_refused(&f.api.call(Method::OPTIONS, "/task", None).await, 401);
    assert_eq!(f.api.key(READER).get("/nothing").await.status, 404);
    assert_eq!(f.api.key(WRITER).call(Method::DELETE, "/task", None).await.status, 405);
}

#[tokio::test]
async fn a_key_is_limited_to_its_scope() {
    let f = locked().await;
    let (reader, writer, boss) = (f.api.key(READER), f.api.key(WRITER), f.api.key(BOSS));
    for (method, path) in operations() {
        let reading = method == Method::GET;
        let admin = !reading && (path.starts_with("/retry-policy") || path.contains("redeliver"));
        for (client, allowed) in [(&reader, reading), (&writer, !admin), (&boss, true)] {
            let answer = client.call(method.clone(), &path, None).await;
            if allowed {
                assert!(![401, 403].contains(&answer.status.as_u16()), "{method} {path}: {}", answer.body);
            } else {
                assert_refused(&answer, 403);
            }
        }
    }
    let ids = writer.create(&tasks()).await;
    assert_eq!(reader.status(&ids[0]).await, "Pending");
    assert_eq!(boss.put("/retry-policy/k", &json!({"max_retries": 1})).await.status, 200);
}

#[tokio::test]
async fn a_key_is_accepted_in_either_header() {
    let f = locked().await;
    let bearer = format!("bearer {READER}");
    let forms: [&[(&str, &str)]; 3] = [
        &[("authorization", &bearer)],
        &[("x-api-key", READER)],
        &[("authorization", "Basic eDp5"), ("x-api-key", READER)],
    ];
    for headers in forms {
        assert_eq!(f.api.with(headers).get("/task").await.status, 200, "{headers:?}");
    }
    let others: [&[(&str, &str)]; 3] =
        [&[("authorization", READER)], &[("authorization", "Bearer x"), ("x-api-key", READER)], &[("api-key", READER)]];
    for headers in others {
        assert_refused(&f.api.with(headers).get("/task").await, 401);
    }
    assert_refused(&f.api.get(&format!("/task?api_key={READER}")).await, 401);
}

#[tokio::test]
async fn public_paths_are_readable_without_a_key() {
    let f = Fixture::with(&["--api-keys", KEYS, "--public-paths", "/metrics,/docs"]).await;
    for path in ["/metrics", "/docs/", "/docs/index.css"] {
        assert_eq!(f.api.get(path).await.status, 200, "{path}");
    }
    for path in ["/openapi.json", "/task", "/docs/../task", "/metrics/x/../../task"] {
        let answer = f.api.get(path).await;
        assert!([401, 404].contains(&answer.status.as_u16()), "{path}: {}", answer.body);
    }
    assert_refused(&f.api.post("/metrics", &json!({})).await, 401);
}

#[tokio::test]
async fn without_configured_keys_every_operation_is_open() {
    let f = Fixture::new().await;
    for (method, path) in operations() {
        let status = f.api.call(method, &path, None).await.status.as_u16();
        assert!(![401, 403].contains(&status), "{path}");
    }
    assert_eq!(f.api.key("anything").get("/task").await.status, 200);
}

/// A task that is being executed, and the path of its handle.
async fn started(f: &mut Fixture, client: &Client, receiver: &Receiver) -> (String, String) {
    let before = receiver.received().len();
    let retry = json!({"max_retries": 3, "strategy": "immediate", "jitter_ms": 0});
    let task = json!([{"name": "n", "kind": "k", "retry": retry, "on_start": receiver.action("/s")}]);
    let ids = client.create(&task).await;
    f.start().await;
    let handle = receiver.received()[before].handle.clone().unwrap();
    (ids[0].clone(), handle.strip_prefix(f.api.base()).unwrap().to_owned())
}

#[tokio::test]
async fn a_handle_needs_no_key_and_is_valid_for_its_run() {
    let mut f = locked().await;
    let (api, receiver, writer) = (f.api.clone(), Receiver::start().await, f.api.key(WRITER));
    let (id, first) = started(&mut f, &writer, &receiver).await;
    assert!(first.starts_with(&format!("/task/{id}?run=0&token=")), "{first}");
    assert_eq!(api.get(&first).await.body["status"], "Running");
    assert_eq!(api.put(&first, &json!({"new_success": 1})).await.status, 202);
    let failure = json!({"status": "Failure", "failure_reason": "it broke"});
    assert_eq!(api.patch(&first, &failure).await.body["status"], "RetryPending");

    assert_eq!(api.patch(&first, &failure).await.status, 200, "a repetition");
    f.release().await;
    f.start().await;
    for answer in [
        api.patch(&first, &json!({"status": "Success"})).await,
        api.patch(&first, &json!({"priority": 5})).await,
        api.put(&first, &json!({})).await,
        api.get(&first).await,
    ] {
        assert_eq!((answer.status.as_u16(), &answer.body["current_run"]), (409, &json!(1)), "{}", answer.body);
    }
    assert_eq!(api.patch(&first, &failure).await.status, 200, "still a repetition");
    let in_body = json!({"status": "Success", "run": 1});
    assert_eq!(api.patch(&first, &in_body).await.status, 400, "the run in the body is not that of the token");

    let second = receiver.received().pop().unwrap().handle.unwrap();
    let second = second.strip_prefix(api.base()).unwrap();
    assert_eq!(api.patch(second, &json!({"status": "Success"})).await.body["status"], "Success");
    assert_eq!(api.patch(second, &json!({"status": "Success"})).await.status, 200);
    assert_eq!(api.put(second, &json!({})).await.status, 409);
    assert_eq!(api.get(second).await.body["status"], "Success");
}

#[tokio::test]
async fn a_token_is_valid_for_its_task_and_run_only() {
    let mut f = locked().await;
    let (api, receiver, writer) = (f.api.clone(), Receiver::start().await, f.api.key(WRITER));
    let (id, path) = started(&mut f, &writer, &receiver).await;
    let (other, other_path) = started(&mut f, &writer, &receiver).await;
    let token = path.rsplit('=').next().unwrap();
    assert_ne!(token, other_path.rsplit('=').next().unwrap());
    let wrong = [
        format!("/task/{other}?run=0&token={token}"),
        format!("/task/{id}?run=1&token={token}"),
        format!("/task/{id}?token={token}"),
        format!("/task/{id}?run=0&token="),
        format!("/task/{id}?run=0&token={}", "0".repeat(64)),
        format!("/task/{id}?run=x&token={token}"),
        format!("/task/x?run=0&token={token}"),
        format!("/task/{id}?run=1&run=0&token={token}"),
    ];
    for path in &wrong {
        for client in [&api, &f.api.key(BOSS)] {
            for method in [Method::GET, Method::PUT, Method::PATCH] {
                assert_refused(&client.call(method, path, None).await, 401);
            }
        }
    }
    assert_eq!(api.put(&format!("/task/{id}?run=0&run=1&token={token}"), &json!({})).await.status, 400);
    let query = format!("run=0&token={token}");
    for (method, path) in [
        (Method::DELETE, format!("/task/{id}")),
        (Method::PATCH, format!("/task/pause/{id}")),
        (Method::POST, format!("/task/{id}/retry")),
        (Method::GET, format!("/task/{id}/events")),
        (Method::GET, "/task".into()),
        (Method::POST, "/task".into()),
    ] {
        assert_refused(&api.call(method, &format!("{path}?{query}"), None).await, 401);
    }
    // The token is enough, whatever key is sent with it.
    assert_eq!(f.api.key(READER).put(&path, &json!({})).await.status, 202);
    assert_eq!(f.api.key("unknown").put(&path, &json!({})).await.status, 202);
}

#[tokio::test]
async fn tokens_are_checked_without_configured_keys_and_shared_by_instances() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let api = f.api.clone();
    let (id, path) = started(&mut f, &api, &receiver).await;
    assert_refused(&api.put(&format!("/task/{id}?run=0&token=wrong"), &json!({})).await, 401);
    assert_eq!(api.put(&format!("/task/{id}?run=0"), &json!({})).await.status, 202, "no token is needed");
    let second = Database { url: f.db.url.clone(), pool: sqlx::PgPool::connect_lazy(&f.db.url).unwrap() };
    let second = Fixture::on(second, &["--api-keys", KEYS]).await;
    assert_eq!(second.api.put(&path, &json!({})).await.status, 202, "another instance knows the token");
    assert_eq!(f.db.number("select count(*) from secret").await, 1);
}

#[tokio::test]
async fn the_audit_trail_names_the_key() {
    let mut f = locked().await;
    let (receiver, writer, boss) = (Receiver::start().await, f.api.key(WRITER), f.api.key(BOSS));
    let (id, path) = started(&mut f, &writer, &receiver).await;
    receiver.answer(Reply::ok());
    assert_eq!(f.api.patch(&path, &json!({"status": "Success"})).await.status, 200);
    let ids = writer.create(&json!([{"name": "a", "kind": "k"}, {"name": "b", "kind": "k"}])).await;
    let batch = text(&boss.task(&ids[0]).await["batch_id"]);
    let path = |verb: &str| format!("/task/{verb}/{}", ids[0]);
    assert_eq!(boss.patch(&path("pause"), &json!({})).await.status, 200);
    assert_eq!(writer.patch(&path("resume"), &json!({})).await.status, 200);
    assert_eq!(boss.delete(&format!("/task/{}", ids[0])).await.status, 200);
    let retry = format!("/task/{}/retry", ids[0]);
    assert_eq!(writer.post(&retry, &json!({})).await.status, 200);
    assert_eq!(boss.delete(&format!("/batch/{batch}")).await.status, 200);
    assert_eq!(writer.post(&retry, &json!({"requested_by": "ann"})).await.status, 200);
    let actors = async |id: &str| -> Vec<String> {
        let events = boss.get(&format!("/task/{id}/events")).await.body;
        events.as_array().unwrap().iter().map(|event| text(&event["actor"])).collect()
    };
    assert_eq!(actors(&id).await, ["writer", "start", "start", "api"], "a handle has no name");
    assert_eq!(actors(&ids[0]).await, ["writer", "boss", "writer", "boss", "writer", "boss", "ann"]);
    assert_eq!(actors(&ids[1]).await, ["writer", "boss"]);
}

#[tokio::test]
async fn a_request_that_arrives_too_slowly_is_refused() {
    let f = Fixture::with(&["--request-timeout-secs", "1"]).await;
    let send = async |bytes: &str| -> String {
        let mut stream = tokio::net::TcpStream::connect(f.api.base().strip_prefix("http://").unwrap()).await.unwrap();
        stream.write_all(bytes.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    };
    let answer = send("POST /task HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n[").await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert!(answer.contains("application/problem+json") && answer.contains("REQUEST_TIMEOUT_SECS"), "{answer}");
    let answer = send("POST /task HTTP/1.1\r\nhost:").await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "closed: {answer}");
}

struct File(PathBuf);

impl File {
    fn new(name: &str, text: &str) -> File {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        File(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn bad_key_settings_are_refused_with_one_line_that_shows_no_key() {
    let file = File::new("bad-keys", "writer:key-of-the-writer\nkey-of-somebody");
    let cases: [(&[(&str, &str)], &str); 6] = [
        (&[("BIND_ADDR", "0.0.0.0")], "reprise: BIND_ADDR=0.0.0.0: must be a loopback address"),
        (&[("BIND_ADDR", "::"), ("API_KEYS", "")], "reprise: BIND_ADDR=::: must be a loopback address"),
        (&[("API_KEYS", "writer:key-of-the-writer:root")], "reprise: API_KEYS: entry 1 must be name:key"),
        (&[("API_KEYS_FILE", file.path())], &format!("reprise: API_KEYS_FILE={}: entry 2 must be", file.path())),
        (
            &[("API_KEYS", KEYS), ("API_KEYS_FILE", "/f")],
            "reprise: API_KEYS_FILE=/f: must not be set together with API_KEYS",
        ),
        (&[("PUBLIC_PATHS", "/task")], "reprise: PUBLIC_PATHS=/task: must be some of"),
    ];
    for (settings, line) in cases {
        let output =
            command(&[("PORT", "0"), ("DATABASE_URL", "postgres://localhost:1/x")]).envs(settings.to_vec()).output();
        let output = output.unwrap();
        assert!(!output.status.success());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let lines: Vec<&str> = said.lines().filter(|line| !line.contains(" WARN ")).collect();
        assert_eq!(lines.len(), 1, "{said}");
        assert!(lines[0].starts_with(line), "{said}");
        assert!(!said.contains("key-of"), "{said}");
    }
    let help = command(&[("API_KEYS", KEYS)]).arg("--help").output().unwrap();
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    assert!(help.contains("API_KEYS_FILE") && !help.contains("key-of"), "{help}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_and_tokens_never_reach_the_logs() {
    let db = Database::new().await;
    let (keys, log) =
        (File::new("keys", "writer:key-of-the-writer\nboss:key-of-the-boss:admin\n"), File::new("log", ""));
    let mut start = command(&[
        ("DATABASE_URL", &db.url),
        ("PORT", "0"),
        ("BIND_ADDR", "0.0.0.0"),
        ("API_KEYS_FILE", keys.path()),
        ("RUST_LOG", "trace"),
        ("WEBHOOK_ALLOW", crate::support::LOOPBACK),
    ]);
    start.stderr(std::fs::OpenOptions::new().append(true).open(&log.0).unwrap());
    let instance = tokio::task::spawn_blocking(move || Instance::spawn(start)).await.unwrap();
    assert_refused(&instance.api.get("/task").await, 401);
    assert_refused(&instance.api.key("key-of-nobody").get("/task").await, 401);
    let (writer, receiver) = (instance.api.key(WRITER), Receiver::start().await);
    let ids = writer.create(&json!([{"name": "n", "kind": "k", "on_start": receiver.action("/s")}])).await;
    writer.wait_for(&ids[0], "Running").await;
    let handle = receiver.received()[0].handle.clone().unwrap();
    let token = handle.rsplit('=').next().unwrap().to_owned();
    let path = format!("/task/{}?run=0&token={token}", ids[0]);
    assert_eq!(instance.api.put(&path, &json!({})).await.status, 202);
    assert_refused(&instance.api.put(&path.replace("run=0", "run=7"), &json!({})).await, 401);
    assert!(instance.terminate().success());
    let said = std::fs::read_to_string(&log.0).unwrap();
    assert!(said.contains("caller=writer") || said.contains("caller=\"writer\""), "the log names the caller");
    for secret in ["key-of", token.as_str()] {
        let at = said.find(secret);
        assert!(at.is_none(), "{}", &said[at.unwrap().saturating_sub(500)..]);
    }
}
