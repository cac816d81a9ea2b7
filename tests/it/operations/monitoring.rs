//! What operators monitor: health, readiness, metrics, and the description of the API.

use serde_json::{Value, json};

use crate::support::fixture::config;
use crate::support::{Fixture, Receiver, Reply};

#[tokio::test]
async fn readiness_fails_without_a_database_and_health_does_not() {
    let f = Fixture::new().await;
    let health = f.api.get("/health").await;
    assert_eq!(health.status, 200);
    let instance = f.store.instance().to_string();
    let expected =
        [("status", "ok"), ("version", env!("CARGO_PKG_VERSION")), ("instance", &instance), ("database", "ok")];
    for (field, value) in expected {
        assert_eq!(health.body[field], value, "{}", health.body);
    }
    assert!(health.body["pool_size"].as_u64() >= health.body["pool_idle"].as_u64(), "{}", health.body);
    let ready = f.api.get("/ready").await;
    assert_eq!((ready.status.as_u16(), ready.body), (200, json!({"status": "ready"})));
    f.store.close();
    let answer = f.api.get("/ready").await;
    assert_eq!(answer.status, 503);
    let health = f.api.get("/health").await;
    assert_eq!(
        (health.status.as_u16(), &health.body["database"]),
        (200, &json!("unreachable")),
        "the process is alive"
    );
    assert!(answer.headers.contains_key("retry-after"));
    assert_eq!(answer.headers["content-type"], "application/problem+json");
    assert_eq!(f.api.post("/task", &json!([{"name": "n", "kind": "k"}])).await.status, 503);
}

#[tokio::test]
async fn metrics_count_transitions_retries_and_calls() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    receiver.answer(Reply::status(500));
    let ids = f
        .api
        .create(&json!([
            {"name": "a", "kind": "k", "on_start": receiver.action("/s"), "retry": {"max_retries": 1, "jitter_ms": 0}},
            {"name": "b", "kind": "k", "timeout": 1, "on_failure": [receiver.action("/f")]},
        ]))
        .await;
    f.start().await;
    f.advance(10);
    f.expire().await;
    f.release().await;
    f.start().await;
    assert_eq!(f.api.status(&ids[0]).await, "Failure");
    let page = f.api.get("/metrics").await;
    let Value::String(text) = page.body else { panic!("not text") };
    for line in [
        "reprise_tasks{status=\"failure\"} 2",
        "reprise_tasks{status=\"pending\"} 0",
        "reprise_outbox_depth 1",
        "reprise_outbox_oldest_age_seconds",
        "reprise_tasks_created_total",
        "task_retry_total{trigger=\"webhook_failure\",attempt=\"1\"}",
        "task_retry_exhausted_total",
        "reprise_task_timeouts_total",
        "reprise_transitions_total{from=\"claimed\",to=\"retry_pending\"}",
        "reprise_webhook_calls_total{trigger=\"start\",outcome=\"server_error\"}",
        "reprise_webhook_duration_seconds_bucket",
        "reprise_pool_connections{state=\"used\"}",
        "reprise_http_request_duration_seconds_count",
    ] {
        assert!(text.contains(line), "{line} in\n{text}");
    }
}

#[test]
fn the_operating_guide_lists_every_metric() {
    let (described, manual) =
        (include_str!("../../../src/telemetry/mod.rs"), include_str!("../../../docs/operating.md"));
    let names = described.split('"').filter(|word| word.starts_with("reprise_") || word.starts_with("task_"));
    let names: Vec<&str> = names.collect();
    assert!(names.len() > 20);
    for name in names {
        assert!(manual.contains(&format!("`{name}`")), "{name} is not in docs/operating.md");
    }
}

#[tokio::test]
async fn the_openapi_document_is_served_and_current() {
    let committed = include_str!("../../../openapi/openapi.json");
    assert!(
        committed == reprise::http::document_text(&config(&[]).limits()),
        "openapi/openapi.json is old: run `reprise openapi > openapi/openapi.json`"
    );
    let f = Fixture::new().await;
    let served = f.api.get("/openapi.json").await.body;
    assert_eq!(served, serde_json::from_str::<Value>(committed).unwrap());
    let docs = f.api.get("/docs/").await;
    assert_eq!(docs.status, 200);
    assert!(docs.body.as_str().unwrap().contains("swagger-ui"));
}

#[tokio::test]
async fn responses_carry_a_request_id() {
    let f = Fixture::new().await;
    assert!(f.api.get("/health").await.headers.contains_key("x-request-id"));
    let own =
        reqwest::Client::new().get(format!("{}/health", f.api.base())).header("x-request-id", "mine").send().await;
    assert_eq!(own.unwrap().headers()["x-request-id"], "mine");
}
