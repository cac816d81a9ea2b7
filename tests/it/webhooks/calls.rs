//! The content of outgoing calls, and how answers of receivers are recorded and logged.

use axum::Router;
use axum::http::StatusCode;
use serde_json::{Value, json};
use standardwebhooks::Webhook;
use tokio::net::TcpListener;

use crate::support::instance::{Instance, command};
use crate::support::receiver::Received;
use crate::support::{Database, Fixture, LOOPBACK, Receiver, Reply, text};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

fn action(receiver: &Receiver, path: &str, verb: &str, body: Option<Value>) -> Value {
    let mut action = receiver.action(path);
    action["params"]["verb"] = json!(verb);
    action["params"]["body"] = body.unwrap_or_default();
    action
}

fn verify(call: &Received) {
    let mut headers = reqwest::header::HeaderMap::new();
    for name in ["webhook-id", "webhook-timestamp", "webhook-signature"] {
        headers.insert(name, call.header(name).parse().unwrap());
    }
    Webhook::new(SECRET).unwrap().verify(&call.raw, &headers).unwrap();
}

#[tokio::test]
async fn webhook_bodies_keep_their_numbers_and_field_order() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let text = r#"{"z":1.50,"a":[123456789012345678901234567890, 1e5],"reprise":"mine","é":"\u00e9"}"#;
    let (start, end) = (format!("{}/start", receiver.url), format!("{}/end", receiver.url));
    let action = |url: &str| format!(r#"{{"kind":"Webhook","params":{{"url":"{url}","verb":"POST","body":{text}}}}}"#);
    let tasks = format!(r#"[{{"name":"n","kind":"k","on_start":{},"on_success":[{}]}}]"#, action(&start), action(&end));
    let answer = f.api.send(reqwest::Method::POST, "/task", Some(tasks)).await.unwrap();
    assert_eq!(answer.status, 201, "{}", answer.body);
    let id = crate::support::text(&answer.body[0]["id"]);
    f.start().await;
    let compact = text.replace(", ", ",");
    assert_eq!(String::from_utf8(receiver.at("/start")[0].raw.clone()).unwrap(), compact);
    let shown = f.api.task(&id).await;
    assert_eq!(crate::support::action(&shown, "Start")["params"]["body"], serde_json::from_str::<Value>(text).unwrap());
    assert_eq!(crate::support::action(&shown, "Start")["params"]["verb"], "Post");
    f.api.succeed(&id).await;
    f.deliver().await;
    let sent = String::from_utf8(receiver.at("/end")[0].raw.clone()).unwrap();
    assert!(
        sent.starts_with(r#"{"z":1.50,"a":[123456789012345678901234567890,1e5],"é":"\u00e9","reprise":{"#),
        "{sent}"
    );
    assert_eq!(receiver.at("/end")[0].body["reprise"]["status"], "Success");
}

#[tokio::test]
async fn get_calls_have_no_body_and_other_signed_calls_always_have_one() {
    for secret in [None, Some(SECRET)] {
        let args: Vec<&str> = secret.iter().flat_map(|secret| ["--webhook-signing-secrets", *secret]).collect();
        let mut f = Fixture::with(&args).await;
        let receiver = Receiver::start().await;
        let mut tasks = Vec::new();
        for verb in ["Get", "Post", "Put", "Patch", "Delete"] {
            for body in [None, Some(json!({"a": 1}))] {
                let path = format!("/{verb}/{}", body.is_some());
                let on_success = [action(&receiver, &format!("{path}/end"), verb, body.clone())];
                tasks.push(json!({"name": "n", "kind": "k", "on_start": action(&receiver, &path, verb, body),
                                  "on_success": on_success}));
            }
        }
        let ids = f.api.create(&json!(tasks)).await;
        f.claim().await;
        while f.db.number("select count(*) from task where status = 'running'").await < 10 {
            f.write_answers().await;
        }
        for id in &ids {
            assert_eq!(f.api.succeed(id).await.status, 200);
        }
        f.deliver().await;
        let calls = receiver.received();
        assert_eq!(calls.len(), 20);
        for call in calls {
            let has_body = call.path.contains("/true");
            let raw = String::from_utf8(call.raw.clone()).unwrap();
            let is_json = call.header("content-type") == "application/json";
            match (call.method.as_str(), call.path.ends_with("/end")) {
                ("GET", _) => assert!(raw.is_empty() && !call.headers.contains_key("content-type"), "{call:?}"),
                (_, true) => assert!(is_json && call.body["reprise"]["status"] == "Success", "{call:?}"),
                (_, false) if has_body => assert!(is_json && raw == r#"{"a":1}"#, "{call:?}"),
                (_, false) if secret.is_some() => assert!(is_json && raw == "{}", "{call:?}"),
                (_, false) => assert!(raw.is_empty(), "{call:?}"),
            }
            if secret.is_some() {
                verify(&call);
            }
        }
    }
}

#[tokio::test]
async fn a_batch_notification_carries_its_body_and_the_batch() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let complete = action(&receiver, "/batch", "put", Some(json!([1, {"b": 2, "a": 1}])));
    let answer =
        f.api.post("/task", &json!({"tasks": [{"name": "n", "kind": "k"}], "on_batch_complete": [complete]})).await;
    assert_eq!(answer.status, 201, "{}", answer.body);
    f.claim().await;
    f.api.succeed(&text(&answer.body[0]["id"])).await;
    f.deliver().await;
    let call = receiver.at("/batch").remove(0);
    assert_eq!((call.method.as_str(), &call.body["body"]), ("PUT", &json!([1, {"a": 1, "b": 2}])));
    assert_eq!(call.body["reprise"]["trigger"], "batch");
}

/// Runs the real binary until its first task has this status; returns its log lines and the task.
async fn logged(tasks: &Value, until: &str) -> (Vec<String>, Value) {
    let db = Database::new().await;
    let log = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("said-{}", uuid::Uuid::now_v7()));
    let mut start = command(&[("DATABASE_URL", &db.url), ("PORT", "0"), ("WEBHOOK_ALLOW", LOOPBACK)]);
    start.stderr(std::fs::File::create(&log).unwrap());
    let instance = tokio::task::spawn_blocking(move || Instance::spawn(start)).await.unwrap();
    let ids = instance.api.create(tasks).await;
    let task = instance.api.wait_for(&ids[0], until).await;
    assert!(instance.terminate().success());
    let said = std::fs::read_to_string(&log).unwrap();
    std::fs::remove_file(log).unwrap();
    (said.lines().map(String::from).collect(), task)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_characters_of_an_answer_never_reach_the_log() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let evil = "no\r\n2026-01-01T00:00:00Z  INFO all is well\u{1b}[2J\u{9b}31m\0\u{7}";
    let router = Router::new().fallback(move || async move { (StatusCode::UNPROCESSABLE_ENTITY, evil) });
    tokio::spawn(axum::serve(listener, router).into_future());
    let tasks = json!([{"name": "n", "kind": "k",
                        "on_start": {"kind": "Webhook", "params": {"url": url, "verb": "Post"}}}]);
    let (lines, task) = logged(&tasks, "Failure").await;
    let reason = text(&task["failure_reason"]);
    assert_eq!(reason, "on_start: answered 422: no  2026-01-01T00:00:00Z  INFO all is well [2J 31m");
    let line = lines.iter().find(|line| line.contains("on_start failed")).unwrap();
    assert!(line.contains("all is well"), "{line}");
    assert!(!lines.iter().any(|line| line.starts_with("2026-01-01T00:00:00Z")), "{lines:?}");
    assert!(!lines.iter().any(|line| line.chars().any(char::is_control)), "{lines:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalid_cancel_action_is_logged_as_a_warning() {
    let receiver = Receiver::start().await;
    let body = json!({"kind": "Webhook", "params": {"url": "ftp://w/", "verb": "POST", "note": 1}});
    receiver.answer(Reply { body, ..Reply::ok() });
    let tasks = json!([{"name": "n", "kind": "k", "on_start": receiver.action("/s")}]);
    let (lines, task) = logged(&tasks, "Running").await;
    assert_eq!(*crate::support::action(&task, "Cancel"), Value::Null);
    let line = lines.iter().find(|line| line.contains("cancel action")).unwrap_or_else(|| panic!("{lines:?}"));
    let reason = "reason=answer.params.url: must start with http:// or https://";
    assert!(line.contains("WARN") && line.contains(&text(&task["id"])) && line.contains("run=0"), "{line}");
    assert!(line.contains(reason), "{line}");
}
