//! Automatic retries: a failed task is retried on the schedule of its policy, and its children wait for its final end.

use serde_json::{Value, json};

use crate::support::{Fixture, Receiver, Reply};

fn policy(extra: &Value) -> Value {
    let mut policy = json!({"max_retries": 3, "initial_delay_secs": 10, "backoff_multiplier": 2.0, "jitter_ms": 0});
    policy.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    policy
}

fn parent_and_child(retry: &Value) -> Value {
    json!([
        {"id": "p", "name": "parent", "kind": "k", "timeout": 30, "retry": retry},
        {"id": "c", "name": "child", "kind": "k", "dependencies": [{"id": "p"}]},
    ])
}

#[tokio::test]
async fn a_task_is_retried_on_the_schedule_of_its_policy() {
    let f = Fixture::new().await;
    let ids = f.api.create(&parent_and_child(&policy(&json!({})))).await;
    let (parent, child) = (&ids[0], &ids[1]);
    assert_eq!(f.claim().await, 1);
    let running = f.api.task(parent).await;
    assert_eq!((&running["status"], &running["attempt"]), (&json!("Running"), &json!(0)));
    f.api.put(&format!("/task/{parent}"), &json!({"new_success": 2, "new_failures": 1})).await;

    f.advance(29);
    assert_eq!(f.expire().await, 0, "not yet");
    f.advance(1);
    assert_eq!(f.expire().await, 1);
    let first = f.api.task(parent).await;
    assert_eq!(first["status"], "RetryPending");
    assert_eq!((&first["attempt"], &first["run"]), (&json!(1), &json!(1)));
    assert_eq!(first["next_retry_at"], "2026-01-01T00:00:40.000000Z");
    assert_eq!((&first["failure_type"], &first["ended_at"]), (&json!("timeout"), &Value::Null));
    assert_eq!(f.api.status(child).await, "Waiting");

    f.advance(9);
    assert_eq!(f.release().await, 0, "not yet");
    f.advance(1);
    assert_eq!(f.release().await, 1);
    let pending = f.api.task(parent).await;
    assert_eq!(pending["status"], "Pending");
    for field in ["started_at", "ended_at", "failure_reason", "failure_type", "next_retry_at"] {
        assert_eq!(pending[field], Value::Null, "{field} is reset");
    }
    assert_eq!(pending["last_updated"], "2026-01-01T00:00:40.000000Z");
    assert_eq!((&pending["success"], &pending["failures"]), (&json!(2), &json!(1)), "counters are kept");
    assert_eq!(pending["attempt"], 1, "so is the attempt");

    f.claim().await;
    f.advance(30);
    f.expire().await;
    let second = f.api.task(parent).await;
    assert_eq!((&second["status"], &second["attempt"]), (&json!("RetryPending"), &json!(2)));
    assert_eq!(second["next_retry_at"], "2026-01-01T00:01:30.000000Z", "twice the delay");
    assert_eq!(f.api.status(child).await, "Waiting");

    f.advance(20);
    f.release().await;
    f.claim().await;
    assert_eq!(f.api.status(child).await, "Waiting");
    let done = f.api.succeed(parent).await;
    assert_eq!((&done.body["status"], &done.body["attempt"]), (&json!("Success"), &json!(2)));
    assert_eq!(f.api.status(child).await, "Pending", "only now");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_task_fails_once_its_retries_are_used_up() {
    let f = Fixture::new().await;
    let ids = f.api.create(&parent_and_child(&policy(&json!({"max_retries": 1})))).await;
    f.claim().await;
    assert_eq!(f.api.fail(&ids[0]).await.body["status"], "RetryPending");
    f.advance(10);
    f.release().await;
    f.claim().await;
    let failed = f.api.fail(&ids[0]).await.body;
    assert_eq!((&failed["status"], &failed["attempt"], &failed["run"]), (&json!("Failure"), &json!(1), &json!(1)));
    let child = f.api.task(&ids[1]).await;
    assert_eq!((&child["status"], &child["failure_type"]), (&json!("Failure"), &json!("dependency")));
    assert_eq!(
        f.db.number("select count(*) from attempt where outcome = 'failed' and reason like '%used up%'").await,
        1
    );
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn retry_on_limits_which_failures_are_retried() {
    let f = Fixture::new().await;
    let only_timeout = policy(&json!({"retry_on": ["timeout"]}));
    let ids = f
        .api
        .create(&json!([
            {"name": "reported", "kind": "k", "retry": only_timeout},
            {"name": "timed out", "kind": "k", "timeout": 5, "retry": only_timeout},
            {"name": "final", "kind": "k", "retry": policy(&json!({}))},
            {"name": "without", "kind": "k"},
        ]))
        .await;
    f.claim().await;
    assert_eq!(f.api.fail(&ids[0]).await.body["status"], "Failure");
    f.advance(5);
    f.expire().await;
    assert_eq!(f.api.status(&ids[1]).await, "RetryPending");
    let body = json!({"status": "failure", "failure_reason": "bad input", "failure_type": "validation_error"});
    let task = f.api.patch(&format!("/task/{}", ids[2]), &body).await.body;
    assert_eq!((&task["status"], &task["attempt"]), (&json!("Failure"), &json!(0)), "a final type is not retried");
    assert_eq!(f.api.fail(&ids[3]).await.body["status"], "Failure");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_failed_on_start_is_retried_with_a_new_key() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    receiver.answer(Reply::status(500));
    let task = json!([{"name": "n", "kind": "k", "on_start": receiver.action("/start"), "retry": policy(&json!({}))}]);
    let ids = f.api.create(&task).await;
    f.start().await;
    let task = f.api.task(&ids[0]).await;
    assert_eq!((&task["status"], &task["failure_type"]), (&json!("RetryPending"), &json!("server_error")));
    assert_eq!(task["failure_reason"], "on_start: answered 500: {}");

    receiver.answer(Reply::ok());
    f.advance(10);
    f.release().await;
    f.start().await;
    assert_eq!(f.api.status(&ids[0]).await, "Running");
    let id = &ids[0];
    assert_eq!(receiver.keys(), [format!("{id}:start:success:0"), format!("{id}:start:success:1")]);
    let calls = receiver.received();
    assert_eq!((calls[0].header("x-task-attempt"), calls[1].header("x-task-attempt")), ("0", "1"));
    assert!(calls[1].handle.as_ref().unwrap().contains(&format!("/task/{id}?run=1&token=")));
}

#[tokio::test]
async fn a_report_for_a_stale_run_is_refused_unless_it_is_a_repetition() {
    let f = Fixture::new().await;
    let ids = f.api.create(&parent_and_child(&policy(&json!({})))).await;
    let path = format!("/task/{}", ids[0]);
    let failure = json!({"status": "Failure", "failure_reason": "x"});
    f.claim().await;
    assert_eq!(f.api.patch(&format!("{path}?run=0"), &failure).await.body["status"], "RetryPending");

    let before = f.api.task(&ids[0]).await;
    for again in [format!("{path}?run=0"), path.clone()] {
        let answer = f.api.patch(&again, &failure).await;
        assert_eq!((answer.status.as_u16(), &answer.body["status"]), (200, &json!("RetryPending")), "{again}");
    }
    assert_eq!(f.api.task(&ids[0]).await, before, "repetitions change nothing");
    for stale in [format!("{path}?run=0"), path.clone()] {
        let answer = f.api.patch(&stale, &json!({"status": "Success"})).await;
        assert_eq!((answer.status.as_u16(), &answer.body["current_status"]), (409, &json!("RetryPending")), "{stale}");
    }
    assert_eq!(f.api.put(&format!("{path}?run=0"), &json!({})).await.status, 409);

    f.advance(10);
    f.release().await;
    f.claim().await;
    assert_eq!(f.api.patch(&format!("{path}?run=0"), &json!({"status": "Success"})).await.status, 409);
    assert_eq!(f.api.patch(&format!("{path}?run=0"), &failure).await.status, 200, "still a repetition");
    assert_eq!(f.api.status(&ids[0]).await, "Running");
    let answer = f.api.patch(&path, &json!({"status": "Success", "run": 1})).await;
    assert_eq!((answer.status.as_u16(), &answer.body["status"]), (200, &json!("Success")));
    assert_eq!(f.api.patch(&format!("{path}?run=1"), &json!({"status": "Success"})).await.status, 200);
    assert_eq!(f.api.patch(&format!("{path}?run=1"), &failure).await.status, 409);
    assert_eq!(f.api.status(&ids[1]).await, "Pending");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_report_for_a_timed_out_run_is_refused() {
    let f = Fixture::new().await;
    let ids = f.api.create(&parent_and_child(&policy(&json!({})))).await;
    f.claim().await;
    f.advance(30);
    f.expire().await;
    let failure = json!({"status": "Failure", "failure_reason": "x", "run": 0});
    assert_eq!(f.api.patch(&format!("/task/{}", ids[0]), &failure).await.status, 409);
}

#[tokio::test]
async fn a_retried_task_keeps_its_place_in_the_queue() {
    let mut f = Fixture::with(&["--webhook-concurrency", "1"]).await;
    let receiver = Receiver::start().await;
    let task = |name: &str| {
        json!({"name": name, "kind": "k", "on_start": receiver.action(&format!("/{name}")),
                                   "retry": policy(&json!({}))})
    };
    let ids = f.api.create(&json!([task("old")])).await;
    f.start().await;
    f.api.fail(&ids[0]).await;
    f.api.create(&json!([task("new1"), task("new2")])).await;
    f.advance(10);
    f.release().await;
    f.claim().await;
    f.write_answers().await;
    let paths: Vec<String> = receiver.received().into_iter().map(|r| r.path).collect();
    assert_eq!(paths[1], "/old", "before tasks that were created later: {paths:?}");
}

#[tokio::test]
async fn jitter_is_recorded_and_stays_in_its_bounds() {
    let f = Fixture::new().await;
    let tasks: Vec<Value> = (0..20)
        .map(|i| json!({"name": format!("t{i}"), "kind": "k", "retry": policy(&json!({"jitter_ms": 400}))}))
        .collect();
    let ids = f.api.create(&json!(tasks)).await;
    f.claim().await;
    for id in &ids {
        f.api.fail(id).await;
    }
    let odd = "select count(*) from attempt where delay_ms <> 10000 or jitter_ms not between 0 and 400
               or next_retry_at <> ended_at + make_interval(secs => (delay_ms + jitter_ms) / 1000.0)";
    assert_eq!(f.db.number(odd).await, 0);
    assert!(f.db.number("select count(distinct jitter_ms) from attempt").await > 1, "it is random");
}

#[tokio::test]
async fn tasks_that_time_out_together_are_retried_at_different_times() {
    let f = Fixture::new().await;
    let retry = policy(&json!({"jitter_ms": 3000}));
    let tasks: Vec<Value> = (0..60).map(|_| json!({"name": "n", "kind": "k", "timeout": 5, "retry": retry})).collect();
    f.api.create(&json!(tasks)).await;
    f.claim().await;
    f.advance(5);
    assert_eq!(f.expire().await, 60, "all in one tick");
    assert!(f.db.number("select count(distinct jitter_ms) from attempt").await > 40, "each has its own jitter");
}
