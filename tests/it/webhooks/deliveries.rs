//! Deliveries of notifications: at least once, with backoff, until their attempts are used up, and again on request.

use serde_json::{Value, json};

use crate::support::{Fixture, Receiver, Reply};

fn hooks(receiver: &Receiver) -> Value {
    let with_body = json!({"kind": "Webhook", "params": {
        "url": format!("{}/ok", receiver.url), "verb": "Post", "body": {"mine": 1}}});
    json!([{"name": "n", "kind": "k", "metadata": {"m": [1.50]}, "on_success": [with_body, receiver.action("/ok2")],
            "on_failure": [receiver.action("/failed")], "retry": {"max_retries": 1, "jitter_ms": 0}}])
}

#[tokio::test]
async fn a_success_notification_carries_the_state_of_the_task() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let ids = f.api.create(&hooks(&receiver)).await;
    f.claim().await;
    f.api.succeed(&ids[0]).await;
    assert_eq!(f.deliver().await, 2);
    let told = receiver.at("/ok").pop().unwrap();
    assert_eq!(told.key(), format!("{}:end:success:0", ids[0]));
    assert_eq!(receiver.at("/ok2").pop().unwrap().key(), format!("{}:end:success:0:1", ids[0]));
    assert_eq!(told.body["mine"], 1);
    let state = &told.body["reprise"];
    let id = ids[0].as_str();
    assert_eq!(
        (&state["task_id"], &state["status"], &state["trigger"]),
        (&json!(id), &json!("Success"), &json!("end"))
    );
    assert_eq!((&state["attempt"], &state["run"], &state["max_retries"]), (&json!(0), &json!(0), &json!(1)));
    assert_eq!((&state["will_retry"], &state["ended_at"]), (&json!(false), &json!("2026-01-01T00:00:00.000000Z")));
    assert_eq!((&state["name"], &state["kind"], &state["scope"]), (&json!("n"), &json!("k"), &Value::Null));
    assert_eq!(state["metadata"], json!({"m": [1.50]}));
    for field in ["batch_id", "next_retry_at", "failure_type", "failure_reason"] {
        assert!(state.get(field).is_some(), "{field}");
    }
    let list = f.api.get(&format!("/webhook-deliveries?task_id={id}")).await.body;
    assert_eq!(list.as_array().unwrap().len(), 2);
    assert_eq!(
        (&list[0]["status"], &list[0]["attempts"], &list[0]["last_status"]),
        (&json!("success"), &json!(1), &json!(200))
    );
    assert_eq!(list[0]["next_attempt_at"], Value::Null);
    assert_eq!(f.deliver().await, 0, "it is sent once");
}

#[tokio::test]
async fn a_notification_carries_the_metadata_of_the_report_and_the_scope_of_the_batch() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let task = json!({"name": "n", "kind": "k", "metadata": {"a": 1, "b": 1}, "on_success": [receiver.action("/ok")]});
    let created = f.api.post("/task", &json!({"tasks": [task], "scope": "nightly"})).await;
    f.claim().await;
    let path = format!("/task/{}", created.body[0]["id"].as_str().unwrap());
    assert_eq!(f.api.patch(&path, &json!({"status": "Success", "metadata": {"b": 2}})).await.status, 200);
    f.deliver().await;
    let state = receiver.at("/ok").pop().unwrap().body["reprise"].clone();
    assert_eq!((&state["scope"], &state["metadata"]), (&json!("nightly"), &json!({"a": 1, "b": 2})));
}

#[tokio::test]
async fn a_delivery_from_before_the_upgrade_keeps_its_key_and_its_state() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let ids = f.api.create(&hooks(&receiver)).await;
    f.claim().await;
    f.api.succeed(&ids[0]).await;
    // As the previous version inserts them.
    f.db.execute("update outbox set position = default, state = '{\"attempt\": 0, \"run\": 0}'").await;
    assert_eq!(f.deliver().await, 2);
    for path in ["/ok", "/ok2"] {
        let told = receiver.at(path).pop().unwrap();
        assert_eq!((told.key(), told.header("x-task-attempt")), (format!("{}:end:success:0", ids[0]), "0"));
        assert_eq!(told.body["reprise"], json!({"attempt": 0, "run": 0}));
    }
}

#[tokio::test]
async fn a_failure_notification_is_sent_only_for_the_final_failure() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let ids = f.api.create(&hooks(&receiver)).await;
    f.claim().await;
    f.api.fail(&ids[0]).await;
    assert_eq!(f.deliver().await, 0, "the task will be retried");
    f.advance(5);
    f.release().await;
    f.claim().await;
    f.api.fail(&ids[0]).await;
    assert_eq!(f.deliver().await, 1);
    let told = receiver.at("/failed").pop().unwrap();
    assert_eq!(told.key(), format!("{}:end:failure:1", ids[0]));
    let state = &told.body["reprise"];
    assert_eq!((&state["failure_reason"], &state["failure_type"]), (&json!("it broke"), &json!("unknown")));
}

#[tokio::test]
async fn a_failed_delivery_is_retried_until_its_attempts_are_used_up() {
    let mut f = Fixture::with(&["--webhook-max-attempts", "3", "--webhook-retry-base-ms", "1000"]).await;
    let receiver = Receiver::start().await;
    receiver.answer(Reply::status(500));
    let ids = f.api.create(&json!([{"name": "n", "kind": "k", "on_success": [receiver.action("/ok")]}])).await;
    f.claim().await;
    f.api.succeed(&ids[0]).await;
    assert_eq!(f.deliver().await, 1);
    assert_eq!(f.deliver().await, 0, "not at once");
    let list = f.api.get("/webhook-deliveries?status=pending").await.body;
    assert_eq!((&list[0]["attempts"], &list[0]["last_status"]), (&json!(1), &json!(500)));
    assert!(list[0]["last_error"].as_str().unwrap().starts_with("answered 500"));
    f.advance_ms(1100);
    assert_eq!(f.deliver().await, 1);
    f.advance_ms(1100);
    assert_eq!(f.deliver().await, 0, "the delay has doubled");
    f.advance_ms(1100);
    assert_eq!(f.deliver().await, 1);
    let list = f.api.get("/webhook-deliveries?status=exhausted").await.body;
    let id = list[0]["id"].as_i64().unwrap();
    assert_eq!(list[0]["attempts"], 3);
    f.advance(86_400);
    assert_eq!(f.deliver().await, 0, "given up");
    let page = f.api.get("/metrics").await.body;
    assert!(page.as_str().unwrap().contains("\nreprise_webhook_exhausted_total "));

    receiver.answer(Reply::ok());
    let revived = f.api.post(&format!("/webhook-deliveries/{id}/redeliver"), &json!({})).await;
    assert_eq!((revived.status.as_u16(), &revived.body["status"]), (200, &json!("pending")));
    assert_eq!(f.deliver().await, 1);
    let keys = receiver.keys();
    assert!(keys.iter().all(|key| *key == keys[0]), "always the same key: {keys:?}");
    assert_eq!(f.api.get("/webhook-deliveries?status=success").await.body[0]["id"], id);
    assert_eq!(f.api.post("/webhook-deliveries/999999/redeliver", &json!({})).await.status, 404);
    assert_eq!(f.api.post("/webhook-deliveries/x/redeliver", &json!({})).await.status, 400);
}

#[tokio::test]
async fn a_notification_with_an_expired_lease_is_sent_again() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let ids = f.api.create(&json!([{"name": "n", "kind": "k", "on_success": [receiver.action("/ok")]}])).await;
    f.claim().await;
    f.api.succeed(&ids[0]).await;
    let lease = std::time::Duration::from_secs(40);
    let leasing = f.store.retrying(reprise::store::Patience::Brief, |session| async move {
        let mut tx = session.begin(reprise::store::Actor::Api).await?;
        let leased = reprise::store::outbox::delivery::lease(&mut tx, 10, lease).await?;
        tx.commit().await?;
        Ok(leased)
    });
    assert_eq!(leasing.await.unwrap().0.len(), 1);
    assert_eq!(f.deliver().await, 0, "it is leased");
    f.advance(41);
    assert_eq!(f.deliver().await, 1);
}

#[tokio::test]
async fn a_batch_sends_its_notification_once_no_task_is_alive() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let body = json!({"scope": "s", "metadata": {"m": 1}, "on_batch_complete": [receiver.action("/done"), receiver.action("/done2")],
        "tasks": [{"id": "a", "name": "a", "kind": "k"}, {"name": "b", "kind": "k", "dependencies": [{"id": "a"}]},
                  {"name": "c", "kind": "k"}]});
    let answer = f.api.post("/task", &body).await;
    let batch = answer.headers["x-batch-id"].to_str().unwrap().to_owned();
    let ids = answer.body;
    f.claim().await;
    f.api.fail(ids[0]["id"].as_str().unwrap()).await;
    assert_eq!(f.deliver().await, 0);
    assert_eq!(f.api.get(&format!("/batch/{batch}")).await.body["completed_at"], Value::Null);
    f.api.succeed(ids[2]["id"].as_str().unwrap()).await;
    assert_eq!(f.deliver().await, 2);
    let told = receiver.at("/done").pop().unwrap();
    assert_eq!(told.key(), format!("batch:{batch}:complete:0"));
    assert_eq!(receiver.at("/done2").pop().unwrap().key(), format!("batch:{batch}:complete:0:1"));
    let state = &told.body["reprise"];
    assert_eq!((&state["batch_id"], &state["success"], &state["failure"]), (&json!(batch), &json!(1), &json!(2)));
    assert_eq!((&state["scope"], &state["metadata"]), (&json!("s"), &json!({"m": 1})));
    let counts = &state["status_counts"];
    assert_eq!((&counts["success"], &counts["failure"], &counts["running"]), (&json!(1), &json!(2), &json!(0)));
    let list = f.api.get(&format!("/webhook-deliveries?batch_id={batch}")).await.body;
    assert_eq!(
        (&list[0]["task_id"], &list[0]["trigger"], &list[0]["condition"]),
        (&Value::Null, &json!("batch"), &json!("complete"))
    );
    let shown = f.api.get(&format!("/batch/{batch}")).await.body;
    assert_eq!((&shown["scope"], &shown["metadata"]), (&json!("s"), &json!({"m": 1})));
    assert!(shown["completed_at"].is_string());
}
