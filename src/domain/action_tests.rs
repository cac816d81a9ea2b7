use super::*;

fn read_start(action: Value) -> Result<Action, Vec<String>> {
    let mut task = json!({});
    task["on_start"] = action;
    read_one(task).map(|task| task.actions.on_start.expect("the action"))
}

fn params(more: Value) -> Value {
    let mut action = webhook("http://worker/start");
    if let (Some(params), Value::Object(more)) = (action["params"].as_object_mut(), more) {
        params.extend(more);
    }
    action
}

/// Refused for one reason, which names this field of the parameters.
fn refuse_param(field: &str, more: Value) {
    let found = read_start(params(more)).expect_err("must be refused");
    assert!(found.len() == 1 && found[0].starts_with(&format!("[0].on_start.params.{field}: ")), "{field}: {found:?}");
}

#[test]
fn an_action_arrives_as_it_was_given() {
    let action = read_start(params(json!({"verb": "Patch", "body": [1, null], "headers": {"X-Mine": "yes\tit is"}})));
    let expected = WebhookParams {
        url: "http://worker/start".into(),
        verb: Verb::Patch,
        body: Some(json!([1, null])),
        headers: BTreeMap::from([("X-Mine".into(), "yes\tit is".into())]),
    };
    assert_eq!(action.unwrap(), Action { kind: ActionKind::Webhook, params: expected });
}

#[test]
fn kind_and_params_are_required() {
    let required = ["[0].on_start.kind: is required", "[0].on_start.params: is required"];
    assert_eq!(read_start(json!({})).unwrap_err(), required);
    assert_eq!(read_start(json!({"kind": null, "params": null})).unwrap_err(), required);
    let inner = ["[0].on_start.params.url: is required", "[0].on_start.params.verb: is required"];
    assert_eq!(read_start(json!({"kind": "Webhook", "params": {}})).unwrap_err(), inner);
    for kind in [json!("webhook"), json!("Mail"), json!(1)] {
        let found = read_start(json!({"kind": kind, "params": params(json!({}))["params"]})).unwrap_err();
        assert!(found.len() == 1 && found[0].starts_with("[0].on_start.kind: must be one of Webhook"), "{found:?}");
    }
    for wrong in [json!(1), json!("x"), json!([]), json!(true)] {
        let found = read_start(json!({"kind": "Webhook", "params": wrong})).unwrap_err();
        assert!(found.len() == 1 && found[0].starts_with("[0].on_start.params: must be an object"), "{found:?}");
    }
}

#[test]
fn verbs() {
    let verbs = [Verb::Get, Verb::Post, Verb::Put, Verb::Patch, Verb::Delete];
    for (word, verb) in ["Get", "Post", "Put", "Patch", "Delete"].into_iter().zip(verbs) {
        assert_eq!(read_start(params(json!({"verb": word}))).unwrap().params.verb, verb);
    }
    for wrong in [json!("GET"), json!("Head"), json!(""), json!(1), json!({})] {
        refuse_param("verb", json!({"verb": wrong}));
    }
}

#[test]
fn urls_are_http_or_https() {
    for url in [
        "http://a",
        "https://a.b:8443/c?d=e#f",
        "HTTP://A/",
        "http://127.0.0.1:1/",
        "http://[::1]/",
        "https://ä.example/",
    ] {
        assert!(read_start(params(json!({"url": url}))).is_ok(), "{url}");
    }
    let long = format!("http://a/{}", "x".repeat(2048 - "http://a/".len()));
    assert!(read_start(params(json!({"url": long}))).is_ok());
    refuse_param("url", json!({"url": long + "x"}));
    for url in ["", "a", "/start", "//a/b", "http://", "https://", "http://a:99999/", "http://[::1/"] {
        refuse_param("url", json!({"url": url}));
    }
    for url in ["ftp://a/", "file:///etc/passwd", "javascript:alert(1)", "data:,x", "ws://a/", "unix:/run/x"] {
        refuse_param("url", json!({"url": url}));
    }
    for wrong in [json!(1), json!(["http://a"]), json!({})] {
        refuse_param("url", json!({"url": wrong}));
    }
}

#[test]
fn headers_have_names_and_visible_values() {
    let accepted =
        json!({"A": "", "x-0!#$%&'*+-.^_`|~": "v", "Authorization": "Bearer a b\tc", "long": "x".repeat(8192)});
    assert_eq!(read_start(params(json!({"headers": accepted}))).unwrap().params.headers.len(), 4);
    for name in ["", "a b", "a:b", "ä", "a\nb", "a/b", "(a)"] {
        refuse_param(&format!("headers.{name}"), json!({"headers": {name: "v"}}));
    }
    for value in [json!("a\nb"), json!("a\r\nX: y"), json!("ä"), json!("\u{7f}"), json!("x".repeat(8193))] {
        refuse_param("headers.a", json!({"headers": {"a": value}}));
    }
    for value in [json!(1), json!(null), json!(["v"]), json!({})] {
        refuse_param("headers.a", json!({"headers": {"a": value}}));
    }
    for wrong in [json!([]), json!("a: b"), json!(1)] {
        refuse_param("headers", json!({"headers": wrong}));
    }
}

#[test]
fn headers_of_the_service_cannot_be_set() {
    let ours = ["Idempotency-Key", "X-Task-Id", "X-Task-Trigger", "X-Task-Attempt", "traceparent"];
    let signature = ["webhook-id", "webhook-timestamp", "webhook-signature"];
    let transport = ["Host", "Content-Length", "Transfer-Encoding", "Connection"];
    for name in ours.into_iter().chain(signature).chain(transport) {
        for name in [name.to_owned(), name.to_uppercase(), name.to_lowercase()] {
            refuse_param(&format!("headers.{name}"), json!({"headers": {name.as_str(): "v"}}));
        }
    }
}

#[test]
fn an_answer_may_hold_an_action() {
    let answer = |value: Value| read_answered_action(value.to_string().as_bytes());
    assert_eq!(answer(webhook("http://w/cancel")).map(|a| a.params.url), Some("http://w/cancel".into()));
    for other in [json!({}), json!({"ok": true}), json!(null), json!([]), webhook("ftp://w/"), webhook("http://w/\0")] {
        assert_eq!(answer(other.clone()), None, "{other}");
    }
    assert_eq!(read_answered_action(b""), None);
    assert_eq!(read_answered_action(b"OK"), None);
    assert_eq!(read_answered_action(b"\xff\xfe{"), None);
}
