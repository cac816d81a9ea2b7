//! Which failures are retried: types of failures, status lists, `Retry-After`, deferrals, expiry and delays.

use serde_json::{Value, json};

use crate::support::{Fixture, Receiver, Reply};

fn policy(extra: &Value) -> Value {
    let mut policy = json!({"max_retries": 3, "initial_delay_secs": 10, "jitter_ms": 0});
    policy.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    policy
}

fn task(receiver: &Receiver, retry: &Value) -> Value {
    json!([{"name": "n", "kind": "k", "on_start": receiver.action("/start"), "retry": retry}])
}

async fn started_with(f: &mut Fixture, receiver: &Receiver, reply: Reply, retry: &Value) -> (String, Value) {
    receiver.answer(reply);
    let id = f.api.create(&task(receiver, retry)).await.remove(0);
    f.start().await;
    let task = f.api.task(&id).await;
    (id, task)
}

#[tokio::test]
async fn final_answers_fail_at_once_and_count_no_attempt() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let cases = [
        (400, "Failure", 0),
        (401, "Failure", 0),
        (404, "Failure", 0),
        (408, "RetryPending", 1),
        (429, "RetryPending", 1),
        (500, "RetryPending", 1),
        (302, "RetryPending", 1),
    ];
    for (status, expected, attempt) in cases {
        let (_, task) = started_with(&mut f, &receiver, Reply::status(status), &policy(&json!({}))).await;
        assert_eq!((&task["status"], &task["attempt"]), (&json!(expected), &json!(attempt)), "{status}");
    }
}

#[tokio::test]
async fn status_lists_override_the_default_retry_decision() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let lists = policy(&json!({"retry_on_status": ["4xx"], "no_retry_on_status": ["404", "5xx"]}));
    for (status, expected) in [(400, "RetryPending"), (404, "Failure"), (500, "Failure"), (302, "RetryPending")] {
        let (_, task) = started_with(&mut f, &receiver, Reply::status(status), &lists).await;
        assert_eq!(task["status"], expected, "{status}");
    }
    let both = policy(&json!({"retry_on_status": ["429"], "no_retry_on_status": ["429"]}));
    let refused = f.api.post("/task", &task(&receiver, &both)).await;
    assert_eq!(refused.status, 400);
    assert!(
        refused.body["details"][0].as_str().unwrap().starts_with("[0].retry.no_retry_on_status"),
        "{}",
        refused.body
    );
}

#[tokio::test]
async fn retry_after_defers_the_task_and_counts_no_attempt() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let with = |status: u16, value: &str| Reply::status(status).header("retry-after", value);
    let due = |secs: i64| {
        json!(reprise::domain::view::Timestamp(crate::support::fixture::dawn() + chrono::TimeDelta::seconds(secs)))
    };
    let cases = [
        (with(429, "77"), "deferred", due(77)),
        (with(503, "5"), "deferred", due(5)),
        (with(429, "Thu, 01 Jan 2026 00:02:00 GMT"), "deferred", due(120)),
        (with(429, "9999999"), "deferred", due(86_400)),
        (with(429, "Wed, 31 Dec 2025 23:59:00 GMT"), "retried", due(10)),
        (with(429, "in a while"), "retried", due(10)),
        (with(429, "0"), "retried", due(10)),
        (with(500, "77"), "retried", due(10)),
    ];
    for (reply, outcome, due) in cases {
        let shown = format!("{reply:?}");
        let (id, task) = started_with(&mut f, &receiver, reply, &policy(&json!({}))).await;
        assert_eq!((&task["status"], &task["next_retry_at"]), (&json!("RetryPending"), &due), "{shown}");
        let counted = (if outcome == "deferred" { (0, 1) } else { (1, 0) }, 1);
        assert_eq!(
            (&task["attempt"], &task["deferrals"], &task["run"]),
            (&json!(counted.0.0), &json!(counted.0.1), &json!(counted.1)),
            "{shown}"
        );
        let attempts = f.api.get(&format!("/task/{id}/attempts")).await.body;
        assert_eq!(
            (&attempts[0]["outcome"], &attempts[0]["http_status"]),
            (&json!(outcome), &task_status(&shown)),
            "{shown}"
        );
    }
}

fn task_status(shown: &str) -> Value {
    let digits: String = shown.chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
    json!(digits.parse::<u16>().unwrap())
}

#[tokio::test]
async fn a_worker_may_defer_its_task() {
    let f = Fixture::with(&["--retry-max-deferrals", "2"]).await;
    let ids = f
        .api
        .create(&json!([{"name": "n", "kind": "k", "timeout": 86_400, "retry": policy(&json!({"max_retries": 1}))},
                                   {"name": "without", "kind": "k", "timeout": 86_400}]))
        .await;
    let later =
        json!({"status": "Failure", "failure_reason": "busy", "failure_type": "rate_limit", "retry_after_secs": 30});
    let path = format!("/task/{}", ids[0]);
    f.claim().await;
    let without = f.api.patch(&format!("/task/{}", ids[1]), &later).await.body;
    assert_eq!(without["status"], "Failure", "no policy, no deferral");
    for deferrals in 1..=2 {
        let task = f.api.patch(&path, &later).await.body;
        assert_eq!(
            (&task["attempt"], &task["deferrals"], &task["run"]),
            (&json!(0), &json!(deferrals), &json!(deferrals))
        );
        f.advance(29);
        assert_eq!(f.release().await, 0);
        f.advance(1);
        assert_eq!((f.release().await, f.claim().await), (1, 1));
    }
    let task = f.api.patch(&path, &later).await.body;
    assert_eq!(
        (&task["status"], &task["attempt"], &task["deferrals"]),
        (&json!("RetryPending"), &json!(1), &json!(2)),
        "now it counts"
    );
    let bad =
        json!({"status": "Failure", "failure_reason": "x", "failure_type": "validation_error", "retry_after_secs": 5});
    assert_eq!(f.api.patch(&path, &bad).await.status, 400);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn retries_end_when_the_policy_expires() {
    let f = Fixture::new().await;
    let retry = policy(&json!({"expires_after_secs": 25}));
    let ids = f
        .api
        .create(&json!([{"name": "n", "kind": "k", "retry": retry}, {"name": "m", "kind": "k", "retry": retry}]))
        .await;
    f.claim().await;
    assert_eq!(f.api.fail(&ids[0]).await.body["status"], "RetryPending");
    f.advance(10);
    f.release().await;
    f.claim().await;
    let task = f.api.fail(&ids[0]).await.body;
    assert_eq!(
        (&task["status"], &task["attempt"]),
        (&json!("Failure"), &json!(1)),
        "the next one would be due after 30 s"
    );
    let reason = task["failure_reason"].as_str().unwrap();
    assert!(reason.starts_with("it broke") && reason.contains("expired: "), "{reason}");
    let attempts = f.api.get(&format!("/task/{}/attempts", ids[0])).await.body;
    assert_eq!(attempts[1]["error"], "it broke");
    let later = json!({"status": "Failure", "failure_reason": "busy", "retry_after_secs": 60});
    assert_eq!(
        f.api.patch(&format!("/task/{}", ids[1]), &later).await.body["status"],
        "Failure",
        "no deferral past it either"
    );
}

#[tokio::test]
async fn on_retry_is_called_for_each_retry_and_deferral() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let ids = f
        .api
        .create(
            &json!([{"name": "n", "kind": "k", "retry": policy(&json!({})), "on_retry": [receiver.action("/again")],
                                    "on_failure": [receiver.action("/failed")]}]),
        )
        .await;
    f.claim().await;
    f.api.fail(&ids[0]).await;
    assert_eq!(f.deliver().await, 1);
    f.advance(10);
    f.release().await;
    f.claim().await;
    let later =
        json!({"status": "Failure", "failure_reason": "busy", "failure_type": "rate_limit", "retry_after_secs": 30});
    f.api.patch(&format!("/task/{}", ids[0]), &later).await;
    assert_eq!(f.deliver().await, 1);
    let told = receiver.received();
    assert_eq!(told.iter().map(|t| t.path.as_str()).collect::<Vec<_>>(), ["/again", "/again"]);
    assert_eq!(told[0].key(), format!("{}:retry:success:0", ids[0]));
    assert_eq!(told[1].key(), format!("{}:retry:success:1", ids[0]));
    let state = &told[0].body["reprise"];
    assert_eq!(
        (&state["will_retry"], &state["status"], &state["trigger"]),
        (&json!(true), &json!("RetryPending"), &json!("retry"))
    );
    assert_eq!((&state["run"], &state["attempt"]), (&json!(0), &json!(0)), "both of the execution that failed");
    assert_eq!(told[0].header("x-task-attempt"), "0");
    assert_eq!((&state["next_retry_at"], &state["max_retries"]), (&json!("2026-01-01T00:00:10.000000Z"), &json!(3)));
    assert_eq!((&state["failure_reason"], &state["ended_at"]), (&json!("it broke"), &Value::Null));
    f.api.patch(&format!("/task/pause/{}", ids[0]), &json!({})).await;
    f.api.patch(&format!("/task/resume/{}", ids[0]), &json!({})).await;
    assert_eq!(f.deliver().await, 0, "pausing is not retrying");
}

#[tokio::test]
async fn each_strategy_waits_its_documented_delays() {
    let f = Fixture::new().await;
    let none = json!({"jitter_ms": 0});
    let with = |extra: Value| {
        let mut policy = json!({"max_retries": 4});
        policy.as_object_mut().unwrap().extend(none.as_object().unwrap().clone());
        policy.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        policy
    };
    let day = 86_400;
    let cases = [
        (with(json!({"strategy": "immediate"})), vec![0, 0, 0, 0]),
        (with(json!({"strategy": "fixed_delay", "delay_secs": 7})), vec![7, 7, 7, 7]),
        (
            with(
                json!({"strategy": "exponential_backoff", "initial_delay_secs": 3, "backoff_multiplier": 10, "max_delay_secs": 100}),
            ),
            vec![3, 30, 100, 100],
        ),
        (
            with(json!({"strategy": "custom", "schedule": [{"secs": 5}, {"hours": 1}, {"days": 14}]})),
            vec![5, 3600, 14 * day, 14 * day],
        ),
    ];
    for (retry, delays) in cases {
        let ids = f.api.create(&json!([{"name": "n", "kind": "k", "retry": retry}])).await;
        f.claim().await;
        for delay in delays {
            assert_eq!(f.api.fail(&ids[0]).await.body["status"], "RetryPending", "{retry}");
            if delay > 0 {
                f.advance(delay - 1);
                assert_eq!(f.release().await, 0, "{retry}");
                f.advance(1);
            }
            assert_eq!((f.release().await, f.claim().await), (1, 1), "{retry}");
        }
        assert_eq!(f.api.fail(&ids[0]).await.body["status"], "Failure");
        let attempts = f.api.get(&format!("/task/{}/attempts", ids[0])).await.body;
        assert_eq!(attempts.as_array().unwrap().len(), 5);
    }
    f.db.assert_counters_match().await;
}
