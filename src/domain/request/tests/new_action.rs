use super::*;
use crate::domain::view::TaskAction;

fn read_start(action: Value) -> Result<Action, Vec<FieldProblem>> {
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

/// Checks that the action is refused for one reason, which names this field of the parameters.
fn refuse_param(field: &str, more: Value) {
    let found = read_start(params(more)).expect_err("must be refused");
    assert!(found.len() == 1 && found[0].starts_with(&format!("[0].on_start.params.{field}: ")), "{field}: {found:?}");
}

#[test]
fn an_action_is_read_as_given() {
    let action = read_start(params(json!({"verb": "Patch", "body": [1, null], "headers": {"X-Mine": "yes\tit is"}})));
    let expected = WebhookParams {
        url: "http://worker/start".into(),
        verb: Verb::Patch,
        body: Some(serde_json::from_str("[1,null]").unwrap()),
        headers: BTreeMap::from([("X-Mine".into(), "yes\tit is".into())]),
    };
    assert_eq!(action.unwrap(), Action { kind: ActionKind::Webhook, params: expected });
}

#[test]
fn an_action_requires_kind_and_params() {
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
fn verbs_are_read_in_any_letter_case() {
    let verbs = [Verb::Get, Verb::Post, Verb::Put, Verb::Patch, Verb::Delete];
    for (word, verb) in ["Get", "Post", "Put", "Patch", "Delete"].into_iter().zip(verbs) {
        for word in [word.to_owned(), word.to_uppercase(), word.to_lowercase()] {
            assert_eq!(read_start(params(json!({"verb": word}))).unwrap().params.verb, verb);
        }
    }
    for wrong in [json!("Head"), json!(""), json!(1), json!({})] {
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
fn headers_have_valid_names_and_visible_values() {
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
fn reserved_headers_are_refused() {
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
fn an_answer_may_contain_an_action() {
    let answer = |value: Value| read_answered_action(value.to_string().as_bytes());
    let mut action = webhook("http://w/cancel");
    assert_eq!(answer(action.clone()).unwrap().unwrap().params.url, "http://w/cancel");
    action["note"] = json!("mine\0");
    action["params"]["note"] = json!({"deep": "\0"});
    action["params"]["verb"] = json!("delete");
    assert_eq!(answer(action).unwrap().unwrap().params.verb, Verb::Delete, "unknown keys are ignored");
    for other in [json!({}), json!({"ok": true}), json!(null), json!([]), json!("kind"), json!({"task": {"kind": "k"}})]
    {
        assert_eq!(answer(other.clone()), Ok(None), "{other}");
    }
    for other in ["", "OK", "{\"kind\":", "<html>kind</html>"] {
        assert_eq!(read_answered_action(other.as_bytes()), Ok(None), "{other}");
    }
    assert_eq!(read_answered_action(b"\xff\xfe{"), Ok(None));
}

#[test]
fn an_invalid_action_of_an_answer_is_refused_with_the_reason() {
    let cases = [
        (json!({"url": "http://w/cancel"}), "answer.kind: is required; answer.params: is required"),
        (json!({"kind": "Mail"}), "answer.kind: must be one of Webhook, not \"Mail\"; answer.params: is required"),
        (webhook("ftp://w/"), "answer.params.url: must start with http:// or https://"),
        (webhook("http://w/\0"), "answer.params.url: must not contain NUL characters"),
        (
            params(json!({"verb": "Head"})),
            "answer.params.verb: must be one of Get, Post, Put, Patch, Delete, not \"Head\"",
        ),
        (params(json!({"body": ["\0"]})), "answer.params.body[0]: must not contain NUL characters"),
        (
            json!({"ok": true, "action": webhook("http://w/")}),
            "answer.action: looks like an action, but the answer itself must be the action",
        ),
        (json!([1, webhook("http://w/")]), "answer[1]: looks like an action, but the answer itself must be the action"),
    ];
    for (answer, reason) in cases {
        assert_eq!(read_answered_action(answer.to_string().as_bytes()), Err(reason.to_owned()), "{answer}");
    }
    let whole = params(json!({"body": "x".repeat(1000)})).to_string();
    let reason = read_answered_action(&whole.as_bytes()[..500]).unwrap_err();
    assert!(reason.starts_with("answer: is not valid JSON: EOF"), "cut off: {reason}");
}

#[test]
fn the_body_of_an_action_stays_text() {
    let read = |body: &str| {
        let text = params(json!({"body": "here"})).to_string().replace("\"here\"", body);
        let batch = format!("[{{\"name\": \"n\", \"kind\": \"k\", \"on_start\": {text}}}]");
        let mut batch = read_batch(batch.as_bytes(), &LIMITS)?;
        Ok::<_, Vec<FieldProblem>>(batch.tasks.remove(0).actions.on_start.unwrap().params.body)
    };
    let kept = [
        ("1.50", "1.50"),
        (
            "{ \"b\" : [ 1e5 , 12345678901234567890123 ] ,\n\"a\": \" \\\" \\\\\" }",
            "{\"b\":[1e5,12345678901234567890123],\"a\":\" \\\" \\\\\"}",
        ),
        ("\"\\u00e9\"", "\"\\u00e9\""),
        ("[]", "[]"),
    ];
    for (sent, text) in kept {
        assert_eq!(read(sent).unwrap().unwrap().get(), text);
    }
    assert_eq!(read("null"), Ok(None));
    for wrong in ["\"\\ud800\"", "1e999", "\"\\u0000\"", "{\"\\u0000\": 1}"] {
        let found = read(wrong).unwrap_err();
        assert!(found.len() == 1 && found[0].starts_with("[0].on_start.params.body"), "{wrong}: {found:?}");
    }
    let nested = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
    assert!(read(&nested(120)).is_ok());
    let found = read(&nested(121)).unwrap_err();
    assert!(found[0].message.contains("nested deeper than 120 levels"), "{found:?}");
    assert!(read(&nested(100_000)).is_err());
}

#[test]
fn values_of_secret_headers_are_hidden() {
    let names = [
        "Authorization",
        "proxy-authorization",
        "COOKIE",
        "Set-Cookie",
        "X-Api-Key",
        "token-of",
        "Secretary",
        "x-PASSWORD",
    ];
    let plain = ["Accept", "X-Mine", "Authorization-Not"];
    let headers: Value = names
        .iter()
        .chain(&plain)
        .map(|name| ((*name).to_owned(), json!("v")))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let action = params(json!({"headers": headers}));
    let lists = json!({"on_start": action, "on_success": [action], "on_failure": [action], "on_retry": [action]});
    let mut actions = read_one(lists).unwrap().actions;
    actions.cancel = actions.on_start.clone();
    let mut count = 0;
    for mut action in TaskAction::list(actions) {
        count += 1;
        action.params.hide_secrets();
        for (name, value) in action.params.headers {
            assert_eq!(value, if names.contains(&name.as_str()) { "***" } else { "v" }, "{name}");
        }
    }
    assert_eq!(count, 5);
}

#[test]
fn the_size_of_actions_and_tasks_is_limited() {
    let limits = RequestLimits { action_bytes: 300, task_bytes: 1000, metadata_bytes: 900, ..LIMITS };
    let bare = params(json!({"body": ""})).to_string().len();
    let action = |size: usize| params(json!({"body": "x".repeat(size - bare)}));
    let found = |body: Value| read_batch(body.to_string().as_bytes(), &limits).err().unwrap_or_default();
    let task = |more: Value| json!([task_with(json!({})), task_with(more)]);
    let too_large =
        |path: &str, size: usize| vec![format!("{path}: must have at most 300 bytes, not {size} (MAX_ACTION_BYTES)")];
    assert!(found(task(json!({"on_start": action(300)}))).is_empty());
    assert_eq!(found(task(json!({"on_start": action(301)}))), too_large("[1].on_start", 301));
    assert_eq!(found(task(json!({"on_success": [action(300), action(400)]}))), too_large("[1].on_success[1]", 400));
    let batch = |size| json!({"tasks": [], "on_batch_complete": [action(200), action(size)]});
    assert!(found(batch(300)).is_empty());
    assert_eq!(found(batch(301)), too_large("on_batch_complete[1]", 301));
    let spaced = format!("[{}]", serde_json::to_string_pretty(&task_with(json!({"on_start": action(300)}))).unwrap());
    assert!(read_batch(spaced.as_bytes(), &limits).is_ok(), "whitespace does not count");

    let large = task(json!({"on_failure": [action(300), action(300), action(300)], "on_start": action(200)}));
    let size = large[1].to_string().len();
    assert_eq!(found(large), [format!("[1]: must have at most 1000 bytes, not {size} (MAX_TASK_BYTES)")]);
    let both = task(json!({"on_start": action(1000)}));
    let size = both[1].to_string().len();
    let expected = [
        format!("[1]: must have at most 1000 bytes, not {size} (MAX_TASK_BYTES)"),
        too_large("[1].on_start", 1000).remove(0),
    ];
    assert_eq!(found(both), expected);
    // A short number can be long as jsonb.
    let numbers =
        task(json!({"metadata": {"a": 1e300, "b": 1e300}, "on_start": action(300), "fair_key": "x".repeat(100)}));
    let size = numbers[1].to_string().len() + 2 * (301 - 6);
    let expected = if numbers[1].to_string().contains("1e300") { size + 2 } else { size };
    assert_eq!(found(numbers), [format!("[1]: must have at most 1000 bytes, not {expected} (MAX_TASK_BYTES)")]);
    let rest = found(json!({"tasks": [], "scope": "x".repeat(2000)}));
    assert!(
        rest.len() == 1
            && rest[0].message.contains("other than tasks and on_batch_complete")
            && rest[0].message.contains("MAX_TASK_BYTES"),
        "{rest:?}"
    );
}
