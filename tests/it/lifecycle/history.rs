//! History: every execution of a task is an attempt, every transition an event.

use serde_json::{Value, json};

use crate::support::{Fixture, Receiver, Reply, text};

#[tokio::test]
async fn every_execution_is_recorded_as_an_attempt() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    receiver.answer(Reply::status(502));
    let retry = json!({"max_retries": 2, "initial_delay_secs": 4, "jitter_ms": 0});
    let ids = f
        .api
        .create(&json!([{"name": "n", "kind": "k", "timeout": 30, "on_start": receiver.action("/s"), "retry": retry}]))
        .await;
    let path = format!("/task/{}/attempts", ids[0]);
    assert_eq!(f.api.get(&path).await.body, json!([]));
    f.start().await;
    receiver.answer(Reply::ok());
    f.advance(4);
    f.release().await;
    f.start().await;
    f.advance(30);
    f.expire().await;
    f.advance(8);
    f.release().await;
    f.start().await;
    f.advance(1);
    f.api.succeed(&ids[0]).await;

    let instance = f.store.instance().to_string();
    assert_eq!(
        f.api.get(&path).await.body,
        json!([
            {"run": 0, "attempt": 0, "retry_type": null, "instance": instance, "started_at": "2026-01-01T00:00:00.000000Z",
             "ended_at": "2026-01-01T00:00:00.000000Z", "outcome": "retried", "failure_type": "server_error",
             "error": "on_start: answered 502: {}", "http_status": 502, "delay_ms": 4000, "jitter_ms": 0,
             "next_retry_at": "2026-01-01T00:00:04.000000Z",
             "reason": "retry 1 of 2: backoff of 4 s × 2^0, at most 300 s, 0 ms of jitter"},
            {"run": 1, "attempt": 1, "retry_type": "automatic", "instance": instance, "started_at": "2026-01-01T00:00:04.000000Z",
             "ended_at": "2026-01-01T00:00:34.000000Z", "outcome": "retried", "failure_type": "timeout",
             "error": "no heartbeat for 30 s", "http_status": null, "delay_ms": 8000, "jitter_ms": 0,
             "next_retry_at": "2026-01-01T00:00:42.000000Z",
             "reason": "retry 2 of 2: backoff of 4 s × 2^1, at most 300 s, 0 ms of jitter"},
            {"run": 2, "attempt": 2, "retry_type": "automatic", "instance": instance, "started_at": "2026-01-01T00:00:42.000000Z",
             "ended_at": "2026-01-01T00:00:43.000000Z", "outcome": "success", "failure_type": null, "error": null,
             "http_status": null, "delay_ms": null, "jitter_ms": null, "next_retry_at": null,
             "reason": "the worker reported success"},
        ])
    );
    let second = f.api.get(&format!("{path}?page_size=1&page=1")).await.body;
    assert_eq!((second.as_array().unwrap().len(), &second[0]["run"]), (1, &json!(1)));
    let first = f.api.get(&format!("{path}?page_size=2")).await;
    let cursor = first.headers["x-next-cursor"].to_str().unwrap();
    assert_eq!(f.api.get(&format!("{path}?page_size=2&cursor={cursor}")).await.body[0]["run"], 2);
    assert_eq!(f.api.get(&format!("/task/{}/attempts", uuid::Uuid::now_v7())).await.status, 404);
}

#[tokio::test]
async fn every_transition_is_recorded_as_an_event() {
    let f = Fixture::new().await;
    let retry = json!({"max_retries": 1, "initial_delay_secs": 4, "jitter_ms": 0});
    let ids = f
        .api
        .create(&json!([{"id": "a", "name": "n", "kind": "k", "timeout": 30, "retry": retry},
                                   {"name": "c", "kind": "k2", "dependencies": [{"id": "a"}]}]))
        .await;
    f.claim().await;
    f.advance(30);
    f.expire().await;
    f.api.patch(&format!("/task/pause/{}", ids[0]), &json!({})).await;
    f.advance(4);
    f.api.patch(&format!("/task/resume/{}", ids[0]), &json!({})).await;
    f.claim().await;
    f.api.fail(&ids[0]).await;

    let path = format!("/task/{}/events", ids[0]);
    let events = f.api.get(&path).await.body;
    let told: Vec<(Value, Value, String, String, Value, Value)> = events
        .as_array()
        .unwrap()
        .iter()
        .map(|e| {
            (
                e["from"].clone(),
                e["to"].clone(),
                text(&e["cause"]),
                text(&e["actor"]),
                e["run"].clone(),
                e["attempt"].clone(),
            )
        })
        .collect();
    let row = |from: Value, to: &str, cause: &str, actor: &str, run: i32, attempt: i32| {
        (from, json!(to), cause.to_owned(), actor.to_owned(), json!(run), json!(attempt))
    };
    assert_eq!(
        told,
        [
            row(Value::Null, "Pending", "create", "api", 0, 0),
            row(json!("Pending"), "Claimed", "claim", "start", 0, 0),
            row(json!("Claimed"), "Running", "start", "start", 0, 0),
            row(json!("Running"), "RetryPending", "timeout", "timeout", 1, 1),
            row(json!("RetryPending"), "Paused", "pause", "api", 1, 1),
            row(json!("Paused"), "Pending", "resume", "api", 1, 1),
            row(json!("Pending"), "Claimed", "claim", "start", 1, 1),
            row(json!("Claimed"), "Running", "start", "start", 1, 1),
            row(json!("Running"), "Failure", "report", "api", 1, 1),
        ]
    );
    let first = &events[0];
    assert_eq!(
        (&first["task_id"], &first["kind"], &first["at"]),
        (&json!(ids[0]), &json!("k"), &json!("2026-01-01T00:00:00.000000Z"))
    );
    assert_eq!(first["instance"], f.store.instance().to_string());
    let numbers: Vec<i64> = events.as_array().unwrap().iter().map(|e| e["seq"].as_i64().unwrap()).collect();
    assert!(numbers.is_sorted() && numbers.iter().all(|n| *n > 0), "{numbers:?}");

    let child = f.api.get(&format!("/task/{}/events", ids[1])).await.body;
    assert_eq!(
        (&child[1]["to"], &child[1]["cause"], &child[1]["kind"]),
        (&json!("Failure"), &json!("dependency"), &json!("k2"))
    );
    let page = f.api.get(&format!("{path}?page_size=4")).await;
    let cursor = page.headers["x-next-cursor"].to_str().unwrap();
    assert_eq!(f.api.get(&format!("{path}?page_size=4&cursor={cursor}")).await.body[0], events[4]);
    assert_eq!(f.api.get(&format!("/task/{}/events", uuid::Uuid::now_v7())).await.status, 404);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn transitions_of_a_kind_share_event_rows() {
    let f = Fixture::with(&["--webhook-concurrency", "1000"]).await;
    let tasks: Vec<Value> = (0..1000).map(|i| json!({"name": format!("n{i}"), "kind": "k"})).collect();
    let ids = f.api.create(&json!(tasks)).await;
    while f.claim().await > 0 {}
    let rows = f.db.number("select count(*) from event").await;
    assert!(rows <= 40, "3,000 moves in {rows} rows");
    assert_eq!(f.db.number("select max(cardinality(task_ids))::bigint from event").await, 100);
    for id in [&ids[0], &ids[99], &ids[100], &ids[999]] {
        let events = f.api.get(&format!("/task/{id}/events")).await.body;
        assert_eq!(events.as_array().unwrap().len(), 3);
    }
    f.db.assert_counters_match().await;
}
