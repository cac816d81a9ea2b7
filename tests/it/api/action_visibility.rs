//! Which callers see the actions of a task, and the secrets in their headers.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{Client, Fixture, Receiver, action};

const KEYS: &str = "reader:key-of-the-reader:read,writer:key-of-the-writer,boss:key-of-the-boss:admin";

fn tasks(receiver: &Receiver, count: usize) -> Value {
    let mut action = receiver.action("/start");
    action["params"]["headers"] = json!({"Authorization": "Bearer s3cret", "x-api-KEY": "s3cret", "X-Plain": "plain"});
    json!(vec![json!({"name": "n", "kind": "k", "on_start": action, "on_success": [action]}); count])
}

fn headers(task: &Value) -> &Value {
    &action(task, "Start")["params"]["headers"]
}

fn hidden() -> Value {
    json!({"Authorization": "***", "X-Plain": "plain", "x-api-KEY": "***"})
}

#[tokio::test]
async fn secret_headers_are_shown_to_admins_only() {
    let mut f = Fixture::with(&["--api-keys", KEYS]).await;
    let receiver = Receiver::start().await;
    let (reader, writer) = (f.api.key("key-of-the-reader"), f.api.key("key-of-the-writer"));
    let boss = f.api.key("key-of-the-boss");
    let ids = writer.create(&tasks(&receiver, 1)).await;
    let path = format!("/task/{}", ids[0]);
    for client in [&reader, &writer] {
        let task = client.get(&path).await.body;
        assert_eq!(headers(&task), &hidden());
        assert!(!task.to_string().contains("s3cret"), "{task}");
    }
    assert_eq!(headers(&boss.get(&path).await.body)["Authorization"], "Bearer s3cret");
    let ask = async |client: &Client, method: Method, path: &str| -> Value {
        let body = (method == Method::PATCH || method == Method::POST).then(|| json!({}));
        let answer = client.call(method, path, body.as_ref()).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        answer.body
    };
    let steps = [
        (Method::PATCH, path.clone()),
        (Method::PATCH, format!("/task/pause/{}", ids[0])),
        (Method::PATCH, format!("/task/resume/{}", ids[0])),
        (Method::DELETE, path.clone()),
        (Method::POST, format!("{path}/retry")),
    ];
    for (method, path) in steps {
        let answer = ask(&writer, method.clone(), &path).await;
        let task = if path.ends_with("/retry") { &answer["task"] } else { &answer };
        assert_eq!(headers(task), &hidden(), "{method} {path}");
    }
    f.start().await;
    let call = receiver.received().remove(0);
    assert_eq!((call.header("authorization"), call.header("x-api-key")), ("Bearer s3cret", "s3cret"));

    let handle = call.handle.unwrap();
    let at = handle.strip_prefix(f.api.base()).unwrap();
    assert_eq!(ask(&f.api, Method::GET, at).await["actions"], json!([]), "a handle sees no actions");
    assert_eq!(ask(&f.api, Method::PATCH, at).await["actions"], json!([]));
    assert_eq!(headers(&ask(&reader, Method::GET, at).await), &hidden(), "a key beside it shows what the key may see");
}

#[tokio::test]
async fn without_keys_every_caller_but_a_handle_sees_secret_headers() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let ids = f.api.create(&tasks(&receiver, 1)).await;
    f.start().await;
    assert_eq!(headers(&f.api.task(&ids[0]).await)["x-api-KEY"], "s3cret");
    let handle = receiver.received().remove(0).handle.unwrap();
    let at = handle.strip_prefix(f.api.base()).unwrap();
    assert_eq!(f.api.get(at).await.body["actions"], json!([]));
}
