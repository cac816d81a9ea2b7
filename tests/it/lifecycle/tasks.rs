//! The life of single tasks: reports, heartbeats, pause, cancel, stop, `run_at`.

use serde_json::{Value, json};

use crate::support::{Fixture, PATIENCE, Receiver, Reply, eventually, text};

fn tasks(count: usize) -> Value {
    json!((0..count).map(|i| json!({"name": format!("t{i}"), "kind": "k", "timeout": 30})).collect::<Vec<_>>())
}

#[tokio::test]
async fn a_task_without_on_start_runs_once_claimed() {
    let f = Fixture::new().await;
    let ids = f.api.create(&tasks(1)).await;
    assert_eq!(f.api.status(&ids[0]).await, "Pending");
    assert_eq!(f.api.succeed(&ids[0]).await.status, 409, "it is not claimed yet");
    f.claim().await;
    let running = f.api.task(&ids[0]).await;
    assert_eq!(
        (&running["status"], &running["started_at"]),
        (&json!("Running"), &json!("2026-01-01T00:00:00.000000Z"))
    );
    f.advance(5);
    let done = f.api.succeed(&ids[0]).await;
    assert_eq!((done.status.as_u16(), &done.body["ended_at"]), (200, &json!("2026-01-01T00:00:05.000000Z")));
    let again = f.api.succeed(&ids[0]).await;
    assert_eq!((again.status.as_u16(), again.body), (200, done.body), "a repetition changes nothing");
    let answer = f.api.fail(&ids[0]).await;
    assert_eq!((answer.status.as_u16(), &answer.body["current_status"]), (409, &json!("Success")));
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn heartbeats_extend_the_timeout_and_add_to_the_counters() {
    let f = Fixture::new().await;
    let ids = f.api.create(&tasks(1)).await;
    let path = format!("/task/{}", ids[0]);
    f.claim().await;
    f.advance(20);
    assert_eq!(f.api.put(&path, &json!({})).await.status, 202);
    assert_eq!(f.api.put(&path, &Value::Null).await.status, 202, "an empty body is a heartbeat, too");
    f.advance(20);
    assert_eq!(f.api.put(&path, &json!({"new_success": 3, "new_failures": 1})).await.status, 202);
    f.advance(20);
    assert_eq!(f.expire().await, 0, "heartbeats extended the timeout");
    f.api.put(&path, &json!({"new_success": 4})).await;
    let task = f.api.task(&ids[0]).await;
    assert_eq!((&task["success"], &task["failures"]), (&json!(7), &json!(1)));
    f.advance(29);
    assert_eq!(f.expire().await, 0, "the last heartbeat counts");
    f.advance(1);
    assert_eq!(f.expire().await, 1);
    let task = f.api.task(&ids[0]).await;
    assert_eq!((&task["status"], &task["failure_type"]), (&json!("Failure"), &json!("timeout")));
    assert_eq!(f.api.put(&path, &json!({})).await.status, 409, "terminal");
    assert_eq!(f.api.put(&format!("/task/{}", uuid::Uuid::now_v7()), &json!({})).await.status, 404);
}

#[tokio::test]
async fn a_patch_changes_only_the_fields_it_names() {
    let f = Fixture::new().await;
    let ids = f.api.create(&json!([{"name": "n", "kind": "k", "metadata": {"a": 1, "b": 2}}])).await;
    let path = format!("/task/{}", ids[0]);
    let body = json!({"metadata": {"b": 3, "c": [1]}, "new_success": 2, "expected_count": 9, "priority": 7});
    let task = f.api.patch(&path, &body).await.body;
    assert_eq!(task["metadata"], json!({"a": 1, "b": 3, "c": [1]}));
    assert_eq!((&task["success"], &task["expected_count"], &task["priority"]), (&json!(2), &json!(9), &json!(7)));
    let large = json!({"metadata": {"x": "y".repeat(60_000)}});
    assert_eq!(f.api.patch(&path, &large).await.status, 200);
    let larger = json!({"metadata": {"z": "y".repeat(60_000)}, "new_success": 5});
    let refused = f.api.patch(&path, &larger).await;
    assert_eq!(refused.status, 400, "64 KiB, merged");
    assert_eq!(f.api.task(&ids[0]).await["success"], 2, "nothing of it took effect");
    f.claim().await;
    let done =
        f.api.patch(&path, &json!({"status": "Success", "new_failures": 1, "metadata": {"end": true}})).await.body;
    assert_eq!(
        (&done["status"], &done["failures"], &done["metadata"]["end"]),
        (&json!("Success"), &json!(1), &json!(true))
    );
    assert_eq!(f.api.patch(&path, &json!({"priority": 1})).await.status, 409, "an ended task does not change");
}

#[tokio::test]
async fn tasks_start_by_priority_then_age() {
    let f = Fixture::with(&["--webhook-concurrency", "1"]).await;
    let ids = f.api.create(&json!([
        {"name": "low", "kind": "k", "priority": -5}, {"name": "first", "kind": "k"}, {"name": "second", "kind": "k"},
        {"name": "high", "kind": "k", "priority": 5},
    ])).await;
    assert_eq!(f.claim().await, 2, "as many as there is room for");
    let running = |list: Value| list.as_array().unwrap().iter().map(|t| text(&t["name"])).collect::<Vec<_>>();
    assert_eq!(running(f.api.get("/task?status=Running").await.body), ["high", "first"]);
    f.api.patch(&format!("/task/{}", ids[0]), &json!({"priority": 9})).await;
    f.claim().await;
    assert_eq!(running(f.api.get("/task?status=running&name=low").await.body), ["low"]);
}

#[tokio::test]
async fn a_paused_task_is_not_claimed_until_it_is_resumed() {
    let f = Fixture::new().await;
    let ids = f.api.create(&tasks(2)).await;
    let pause = |id: &str| format!("/task/pause/{id}");
    let resume = |id: &str| format!("/task/resume/{id}");
    assert_eq!(f.api.patch(&pause(&ids[0]), &json!({})).await.body["status"], "Paused");
    assert_eq!(f.api.patch(&pause(&ids[0]), &json!({})).await.status, 200, "again");
    assert_eq!(f.claim().await, 1, "a paused task is not claimed");
    assert_eq!(f.api.patch(&pause(&ids[1]), &json!({})).await.status, 409, "running");
    assert_eq!(f.api.patch(&resume(&ids[1]), &json!({})).await.status, 200, "not paused: nothing to do");
    assert_eq!(f.api.patch(&resume(&ids[0]), &json!({})).await.body["status"], "Pending");
    f.claim().await;
    f.api.succeed(&ids[0]).await;
    assert_eq!(f.api.patch(&resume(&ids[0]), &json!({})).await.status, 409);
    assert_eq!(f.api.patch(&pause(&uuid::Uuid::now_v7().to_string()), &json!({})).await.status, 404);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_paused_task_keeps_its_retry_date() {
    let f = Fixture::new().await;
    let retry = json!({"max_retries": 3, "initial_delay_secs": 60, "jitter_ms": 0});
    let ids = f.api.create(&json!([{"name": "n", "kind": "k", "retry": retry}])).await;
    f.claim().await;
    let due = f.api.fail(&ids[0]).await.body["next_retry_at"].clone();
    let paused = f.api.patch(&format!("/task/pause/{}", ids[0]), &json!({})).await.body;
    assert_eq!((&paused["status"], &paused["next_retry_at"]), (&json!("Paused"), &due));
    let resumed = f.api.patch(&format!("/task/resume/{}", ids[0]), &json!({})).await.body;
    assert_eq!((&resumed["status"], &resumed["next_retry_at"]), (&json!("RetryPending"), &due), "still ahead");
    f.api.patch(&format!("/task/pause/{}", ids[0]), &json!({})).await;
    f.advance(61);
    assert_eq!(f.release().await, 0, "a paused task is not released");
    let resumed = f.api.patch(&format!("/task/resume/{}", ids[0]), &json!({})).await.body;
    assert_eq!((&resumed["status"], &resumed["next_retry_at"]), (&json!("Pending"), &Value::Null), "due by now");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn stopping_a_batch_cancels_every_alive_task() {
    let f = Fixture::with(&["--webhook-concurrency", "1"]).await;
    let retry = json!({"max_retries": 3});
    let answer = f.api.post("/task", &json!([
        {"id": "a", "name": "a", "kind": "k", "retry": retry}, {"id": "b", "name": "b", "kind": "k"},
        {"id": "c", "name": "c", "kind": "k"}, {"id": "d", "name": "d", "kind": "k", "dependencies": [{"id": "c"}]},
        {"id": "e", "name": "e", "kind": "k", "dependencies": [{"id": "d"}]},
        {"id": "f", "name": "f", "kind": "k", "priority": -1},
        {"id": "g", "name": "g", "kind": "k", "priority": -1},
    ])).await;
    let ids: Vec<String> = answer.body.as_array().unwrap().iter().map(|t| text(&t["id"])).collect();
    let batch = answer.headers["x-batch-id"].to_str().unwrap().to_owned();
    f.claim().await; // a and b
    f.api.fail(&ids[0]).await;
    f.api.succeed(&ids[1]).await;
    f.claim().await; // c and f
    f.api.patch(&format!("/task/pause/{}", ids[6]), &json!({})).await;
    let stopped = f.api.delete(&format!("/batch/{batch}")).await;
    assert_eq!(
        stopped.body,
        json!({"batch_id": batch, "canceled_waiting": 2, "canceled_pending": 0, "canceled_claimed": 0,
               "canceled_running": 2, "canceled_retry_pending": 1, "canceled_paused": 1, "already_terminal": 1})
    );
    let counts = f.api.get(&format!("/batch/{batch}")).await.body;
    assert_eq!((&counts["status_counts"]["canceled"], &counts["status_counts"]["failure"]), (&json!(6), &json!(0)));
    assert!(counts["completed_at"].is_string());
    let again = f.api.delete(&format!("/batch/{batch}")).await;
    assert_eq!((again.status.as_u16(), &again.body["already_terminal"]), (200, &json!(7)));
    f.advance(86_400);
    assert_eq!(f.release().await, 0, "canceled is final");
    assert_eq!(f.api.delete(&format!("/batch/{}", uuid::Uuid::now_v7())).await.status, 404);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn stopping_a_batch_larger_than_a_chunk_cancels_every_task() {
    let f = Fixture::new().await;
    let tasks: Vec<Value> = (0..5000)
        .map(|i: usize| {
            let needs: Vec<Value> = i.checked_sub(1).map(|p| json!({"id": p.to_string()})).into_iter().collect();
            json!({"id": i.to_string(), "name": "n", "kind": "k", "dependencies": needs})
        })
        .collect();
    let answer = f.api.post("/task", &json!(tasks)).await;
    let batch = answer.headers["x-batch-id"].to_str().unwrap().to_owned();
    let stopped = f.api.delete(&format!("/batch/{batch}")).await.body;
    assert_eq!((&stopped["canceled_waiting"], &stopped["canceled_pending"]), (&json!(4999), &json!(1)));
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_task_does_not_start_before_its_run_at() {
    let f = Fixture::new().await;
    let ids = f
        .api
        .create(&json!([
            {"id": "a", "name": "later", "kind": "k", "run_at": "2026-01-01T01:00:00+00:00"},
            {"name": "past", "kind": "k", "run_at": "2020-01-01T00:00:00Z"},
            {"id": "b", "name": "child", "kind": "k", "run_at": "2026-01-01T02:00:00Z", "dependencies": [{"id": "a"}]},
        ]))
        .await;
    assert_eq!(f.claim().await, 1, "only the one whose time has come");
    assert_eq!(f.api.task(&ids[0]).await["run_at"], "2026-01-01T01:00:00.000000Z");
    f.advance(3599);
    assert_eq!((f.release().await, f.claim().await), (0, 0));
    f.advance(1);
    assert_eq!((f.release().await, f.claim().await), (1, 1));
    f.api.succeed(&ids[0]).await;
    assert_eq!(f.api.status(&ids[2]).await, "Pending");
    assert_eq!(f.claim().await, 0, "its run_at has not come");
    f.advance(3600);
    assert_eq!((f.release().await, f.claim().await), (1, 1));
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn transitions_without_a_decision_follow_the_state_machine() {
    use reprise::domain::retry::RetryLimits;
    use reprise::domain::task::lifecycle::{Event, Jitter, Moment, decide};
    use reprise::domain::task::status::Status;
    use reprise::domain::task::{Flags, Task};

    let mut f = Fixture::with(&["--webhook-concurrency", "1"]).await;
    let receiver = crate::support::Receiver::start().await;
    let retry = json!({"max_retries": 1, "jitter_ms": 0});
    let on_start = receiver.action("/start");
    f.api.create(&json!([{"name": "a", "kind": "k", "retry": retry, "on_start": on_start}])).await;
    f.start().await;
    let id = text(&f.api.get("/task").await.body[0]["id"]);
    f.api.fail(&id).await;
    f.advance(10);
    f.release().await;
    receiver.answer(crate::support::Reply::slow(std::time::Duration::from_secs(3600)));
    f.api.create(&json!([{"name": "b", "kind": "k", "on_start": on_start}])).await;
    f.claim().await;
    // The drain gives back the task without a call, and then waits for the call that is never answered.
    let given_back = "select count(*) from event where cause = 'given_back'";
    tokio::select! {
        () = f.keeper().drain(PATIENCE) => {}
        () = eventually("a claim to be given back", async || (f.db.number(given_back).await > 0).then_some(())) => {}
    }

    let rows: Vec<(String, String, String)> = sqlx::query_as(
        "select distinct cause, from_status::text, to_status::text from event
         where cause in ('claim', 'start', 'given_back', 'retry_due')",
    )
    .fetch_all(&f.db.pool)
    .await
    .unwrap();
    let causes: std::collections::BTreeSet<&str> = rows.iter().map(|(cause, _, _)| cause.as_str()).collect();
    assert_eq!(causes.into_iter().collect::<Vec<_>>(), ["claim", "given_back", "retry_due", "start"]);
    let (now, me) = (crate::support::fixture::dawn(), uuid::Uuid::now_v7());
    for (cause, from, to) in rows {
        let (from, to) = (Status::parse(&from).unwrap(), Status::parse(&to).unwrap());
        let held = from.is_executing();
        let task = Task {
            id: me,
            batch_id: me,
            kind: "k".into(),
            status: from,
            flags: Flags::default(),
            attempt: 0,
            run: 0,
            deferrals: 0,
            wait_count: 0,
            timeout_secs: 60,
            claimed_by: held.then_some(me),
            claimed_run: None,
            claim: 1,
            manual_run: None,
            slots: Vec::new(),
            timeout_at: held.then_some(now),
            next_retry_at: (from == Status::RetryPending).then_some(now),
            created_at: now,
            last_updated: now,
            started_at: None,
            ended_at: None,
            failure_type: None,
            failure_reason: None,
            retry: None,
        };
        let events = [
            Event::Claimed { by: me, lease: chrono::TimeDelta::seconds(1) },
            Event::Started { by: me, claim: 1 },
            Event::LeaseRanOut,
            Event::RetryDue,
        ];
        let moment = Moment { now, jitter: Jitter::Exactly(0.0), limits: RetryLimits::default() };
        let allowed = events
            .iter()
            .any(|event| decide(&task, event, moment).is_ok_and(|t| t.is_some_and(|t| t.task().status == to)));
        assert!(allowed, "{cause}: {from:?} to {to:?}");
    }
}

/// The service does not read a task again to answer its change; the answer shows what is stored all the same.
#[tokio::test]
async fn a_patch_is_answered_with_the_stored_task() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    receiver.answer(Reply { body: receiver.action("/cancel"), ..Reply::ok() });
    let called = json!({"name": "n", "kind": "k", "on_start": receiver.action("/s"), "metadata": {"a": 1}, "priority": 3,
        "expected_count": 9, "retry": {"max_retries": 2}, "timeout": 77, "run_at": "2025-12-31T00:00:00Z", "fair_key": "f"});
    let plain = json!({"name": "n", "kind": "k"});
    let retried = json!({"name": "n", "kind": "k", "retry": {"max_retries": 1}});
    let child = json!({"name": "n", "kind": "k", "dependencies": [{"id": "parent"}], "dead_end_barrier": true});
    let parent = json!({"id": "parent", "name": "n", "kind": "k"});
    let ids = f.api.create(&json!([called, plain, plain, plain, plain, retried, parent, child])).await;
    f.start().await;
    f.advance(5);
    let failure = json!({"status": "Failure", "failure_reason": "why", "run": 0});
    let later = json!({"status": "Failure", "failure_reason": "busy", "failure_type": "rate_limit",
        "retry_after_secs": 30});
    let changes = [
        (0, failure.clone()),
        (0, failure.clone()),
        (1, json!({"status": "Success"})),
        (1, json!({"status": "Success"})),
        (2, failure),
        (3, json!({"status": "Success", "new_success": 4, "new_failures": 1})),
        (4, json!({"status": "Success", "metadata": {"b": 2}})),
        (5, json!({"priority": 7, "expected_count": 3})),
        (5, later),
        (6, json!({"status": "Failure", "failure_reason": "why"})),
    ];
    for (at, change) in changes {
        let path = format!("/task/{}", ids[at]);
        let answer = f.api.patch(&path, &change).await;
        assert_eq!(answer.status, 200, "{change}: {}", answer.body);
        assert_eq!(answer.body, f.api.get(&path).await.body, "{change}");
        f.advance(1);
    }
    assert_eq!(f.api.status(&ids[0]).await, "RetryPending");
    assert_eq!(f.api.status(&ids[7]).await, "Failure");
    f.db.assert_counters_match().await;
}

/// A claim is not durable when its worker is called. If the database crashes in that moment the claim is lost, and the
/// worker's report is the only trace of it.
#[tokio::test]
async fn a_worker_can_report_after_a_crash_lost_its_claim() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let ids = f.api.create(&json!([{"name": "n", "kind": "k", "on_start": receiver.action("/start")}])).await;
    f.claim().await;
    f.write_answers().await;
    let handle = receiver.received()[0].handle.clone().unwrap();
    let path = handle.strip_prefix(f.api.base()).unwrap().to_owned();
    f.db.execute(
        "update task set status = 'pending', claimed_by = null, claimed_run = null, claim = 0, timeout_at = null, \
         started_at = null",
    )
    .await;
    let guessed = f.api.patch(&format!("/task/{}?run=0", ids[0]), &json!({"status": "Success"})).await;
    assert_eq!(guessed.status, 409, "the number of the run alone, without the token, proves nothing");
    assert_eq!(f.api.patch(&path, &json!({"status": "Success"})).await.status, 200);
    assert_eq!(f.api.status(&ids[0]).await, "Success");
}

#[tokio::test]
async fn a_canceled_task_says_who_canceled_it() {
    let f = Fixture::new().await;
    let task = json!({"name": "n", "kind": "k", "retry": {"max_retries": 1}});
    let ids = f.api.create(&json!([task, task])).await;
    f.claim().await;
    f.api
        .patch(
            &format!("/task/{}", ids[0]),
            &json!({"status": "Failure", "failure_reason": "no network", "failure_type": "timeout"}),
        )
        .await;
    let canceled = f.api.delete(&format!("/task/{}", ids[0])).await.body;
    assert_eq!(canceled["failure_reason"], "canceled by api", "not the last error: {canceled}");
    assert_eq!((&canceled["status"], &canceled["failure_type"]), (&json!("Canceled"), &Value::Null));
    let batch = canceled["batch_id"].as_str().unwrap().to_owned();
    f.api.delete(&format!("/batch/{batch}")).await;
    let stopped = f.api.task(&ids[1]).await;
    assert_eq!(stopped["failure_reason"], "its batch was stopped by api", "{stopped}");
    let attempt = f.api.get(&format!("/task/{}/attempts", ids[1])).await.body[0].clone();
    assert_eq!(attempt["reason"], "its batch was stopped by api", "{attempt}");
    let retried = f.api.post(&format!("/task/{}/retry", ids[0]), &json!({})).await.body;
    assert_eq!(retried["task"]["failure_reason"], Value::Null, "{retried}");
}
