//! Default retry policies per kind, and the statistics of retries.

use serde_json::{Value, json};

use crate::support::{Database, Fixture};

#[tokio::test]
async fn a_default_policy_applies_unless_the_task_overrides_it() {
    let f = Fixture::new().await;
    let put =
        f.api.put("/retry-policy/mail", &json!({"max_retries": 2, "strategy": "fixed_delay", "delay_secs": 9})).await;
    assert_eq!(put.status, 200, "{}", put.body);
    assert_eq!(
        (&put.body["kind"], &put.body["retry"]["delay_secs"], &put.body["retry"]["jitter_ms"]),
        (&json!("mail"), &json!(9), &json!(500))
    );
    let ids = f
        .api
        .create(&json!([
            {"name": "default", "kind": "mail"}, {"name": "own", "kind": "mail", "retry": {"max_retries": 5}},
            {"name": "none", "kind": "mail", "retry": null}, {"name": "other", "kind": "fax"},
        ]))
        .await;
    let shown = async |id: &String| {
        let task = f.api.task(id).await;
        (task["retry"]["max_retries"].clone(), task["retry_source"].clone())
    };
    assert_eq!(shown(&ids[0]).await, (json!(2), json!("kind")));
    assert_eq!(shown(&ids[1]).await, (json!(5), json!("task")));
    assert_eq!(shown(&ids[2]).await, (Value::Null, Value::Null));
    assert_eq!(shown(&ids[3]).await, (Value::Null, Value::Null));

    // Existing tasks keep their policy.
    f.api.put("/retry-policy/mail", &json!({"max_retries": 7})).await;
    assert_eq!(shown(&ids[0]).await.0, 2);
    let later = f.api.create(&json!([{"name": "later", "kind": "mail"}])).await;
    assert_eq!(shown(&later[0]).await.0, 7, "in effect at once where it was set");
    assert_eq!(f.api.get("/retry-policy").await.body.as_array().unwrap().len(), 1);
    assert_eq!(f.api.delete("/retry-policy/mail").await.status, 204);
    assert_eq!(f.api.delete("/retry-policy/mail").await.status, 404);
    let last = f.api.create(&json!([{"name": "last", "kind": "mail"}])).await;
    assert_eq!(shown(&last[0]).await.0, Value::Null);
    for bad in [
        json!({}),
        json!({"max_retries": 0}),
        json!({"max_retries": 1, "x": 1}),
        json!([]),
        json!({"max_retries": 1, "delay_secs": 4}),
    ] {
        assert_eq!(f.api.put("/retry-policy/mail", &bad).await.status, 400, "{bad}");
    }
    assert_eq!(f.api.put(&format!("/retry-policy/{}", "x".repeat(101)), &json!({"max_retries": 1})).await.status, 400);
    let odd = f.api.put("/retry-policy/a%2Fb%20c", &json!({"max_retries": 1})).await;
    assert_eq!(odd.body["kind"], "a/b c");
}

#[tokio::test]
async fn a_default_policy_reaches_the_other_instances() {
    let db = Database::new().await;
    let other =
        Fixture::on(Database { url: db.url.clone(), pool: sqlx::PgPool::connect_lazy(&db.url).unwrap() }, &[]).await;
    let f = Fixture::on(db, &[]).await;
    // The other instance has cached that there is none.
    other.api.create(&json!([{"name": "n", "kind": "mail"}])).await;
    f.api.put("/retry-policy/mail", &json!({"max_retries": 2})).await;
    crate::support::eventually("the default to arrive", async || {
        let ids = other.api.create(&json!([{"name": "n", "kind": "mail"}])).await;
        (other.api.task(&ids[0]).await["retry_source"] == "kind").then_some(())
    })
    .await;
}

#[tokio::test]
async fn retry_statistics_are_grouped_by_attempt_kind_and_failure_type() {
    let f = Fixture::new().await;
    let retry = json!({"max_retries": 1, "initial_delay_secs": 1, "jitter_ms": 0});
    let ids = f
        .api
        .create(&json!([
            {"name": "recovers", "kind": "a", "retry": retry}, {"name": "exhausts", "kind": "a", "retry": retry},
            {"name": "is final", "kind": "b", "retry": retry}, {"name": "just works", "kind": "b", "retry": retry},
            {"name": "is deferred", "kind": "b", "retry": retry}, {"name": "has none", "kind": "b"},
        ]))
        .await;
    let report =
        async |i: usize, body: Value| assert_eq!(f.api.patch(&format!("/task/{}", ids[i]), &body).await.status, 200);
    let failure = |t: &str| json!({"status": "Failure", "failure_reason": "x", "failure_type": t});
    f.claim().await;
    report(0, failure("network_error")).await;
    report(1, failure("server_error")).await;
    report(2, failure("validation_error")).await;
    report(3, json!({"status": "Success"})).await;
    report(4, json!({"status": "Failure", "failure_reason": "x", "failure_type": "rate_limit", "retry_after_secs": 5}))
        .await;
    report(5, failure("unknown")).await;
    f.advance(10);
    f.release().await;
    f.claim().await;
    report(0, json!({"status": "Success"})).await;
    report(1, failure("server_error")).await;
    report(4, json!({"status": "Success"})).await;

    let stats = f.api.get("/stats/retries").await.body;
    assert_eq!(
        (&stats["scheduled"], &stats["succeeded_after_retry"], &stats["exhausted"]),
        (&json!(2), &json!(1), &json!(1))
    );
    assert_eq!((&stats["final"], &stats["deferred"], &stats["success_rate"]), (&json!(1), &json!(1), &json!(0.5)));
    assert_eq!(
        stats["by_attempt"],
        json!([{"attempt": 0, "succeeded": 2, "failed": 4, "success_rate": 2.0 / 6.0},
               {"attempt": 1, "succeeded": 1, "failed": 1, "success_rate": 0.5}])
    );
    assert_eq!(
        stats["by_kind"][0],
        json!({"kind": "a", "scheduled": 2, "succeeded_after_retry": 1, "exhausted": 1, "final": 0,
                                           "deferred": 0, "success_rate": 0.5})
    );
    let types: Vec<&str> =
        stats["by_failure_type"].as_array().unwrap().iter().map(|t| t["failure_type"].as_str().unwrap()).collect();
    assert_eq!(types, ["network_error", "rate_limit", "server_error", "validation_error"]);
    let of_b = f.api.get("/stats/retries?kind=b").await.body;
    assert_eq!((&of_b["scheduled"], &of_b["final"], &of_b["success_rate"]), (&json!(0), &json!(1), &Value::Null));
    assert_eq!(f.api.get("/stats/retries?since=2026-01-01T00:30:00Z").await.body["scheduled"], 2, "from the hour on");
    assert_eq!(f.api.get("/stats/retries?since=2026-01-01T01:00:00Z").await.body["scheduled"], 0);
    assert_eq!(f.api.get("/stats/retries?since=x").await.status, 400);
}
