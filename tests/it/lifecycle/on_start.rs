//! `on_start`: what the call carries, what its answer means, and which claims may still make it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::support::{Client, Database, Fixture, PATIENCE, Receiver, Reply, eventually};

fn task(receiver: &Receiver) -> Value {
    json!([{"name": "n", "kind": "k", "on_start": receiver.action("/start")}])
}

#[tokio::test]
async fn an_on_start_call_carries_its_handle_key_and_headers() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let action = json!({"kind": "Webhook", "params": {
        "url": format!("{}/work?x=1", receiver.url), "verb": "Put", "body": {"a": [1]}, "headers": {"X-Own": "yes"}}});
    let ids = f.api.create(&json!([{"name": "n", "kind": "k", "on_start": action}])).await;
    let id = &ids[0];
    assert_eq!(f.start().await, 1);
    let call = receiver.received().pop().unwrap();
    assert_eq!((call.method.as_str(), call.path.as_str()), ("PUT", "/work"));
    assert_eq!(call.body, json!({"a": [1]}), "the caller's own body");
    let start = format!("{}/task/{id}?run=0&token=", f.api.base());
    assert!(call.handle.clone().unwrap().starts_with(&start), "{:?}", call.handle);
    assert_eq!(call.key(), format!("{id}:start:success:0"));
    assert_eq!((call.header("x-task-id"), call.header("x-task-trigger")), (id.as_str(), "start"));
    assert_eq!((call.header("x-task-attempt"), call.header("x-own")), ("0", "yes"));
    let trace: Vec<&str> = call.header("traceparent").split('-').collect();
    assert_eq!((trace[0], trace[1].len(), trace[2].len(), trace[3]), ("00", 32, 16, "01"));
    assert_eq!(f.api.status(id).await, "Running");

    // The handle is a URL that can be used as it is.
    let handle = call.handle.unwrap();
    let path = handle.strip_prefix(f.api.base()).unwrap();
    assert_eq!(f.api.put(path, &json!({"new_success": 1})).await.status, 202);
    assert_eq!(f.api.patch(path, &json!({"status": "Success"})).await.body["status"], "Success");
}

#[tokio::test]
async fn a_report_before_the_on_start_answer_wins() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let api = Client::new(f.api.base());
    receiver.answer_with(move |received| {
        let api = api.clone();
        async move {
            let handle = received.handle.unwrap();
            let path = handle.strip_prefix(api.base()).unwrap();
            assert_eq!(api.patch(path, &json!({"status": "Success"})).await.status, 200);
            Reply::ok()
        }
    });
    let ids = f.api.create(&task(&receiver)).await;
    f.start().await;
    assert_eq!(f.api.status(&ids[0]).await, "Success");
    f.advance(86_400);
    assert_eq!(f.expire().await, 0);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn the_on_start_answer_may_carry_the_cancel_action() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let action = receiver.action("/cancel");
    receiver.answer(Reply { body: action.clone(), ..Reply::ok() });
    let ids = f.api.create(&task(&receiver)).await;
    f.start().await;
    let shown = f.api.task(&ids[0]).await;
    let shown = crate::support::action(&shown, "Cancel");
    assert_eq!((&shown["kind"], &shown["params"]), (&action["kind"], &action["params"]));
    f.api.delete(&format!("/task/{}", ids[0])).await;
    assert_eq!(f.deliver().await, 1);
    let cancel = receiver.at("/cancel").pop().unwrap();
    assert_eq!(cancel.key(), format!("{}:cancel:success:0", ids[0]));
    assert_eq!((cancel.header("x-task-trigger"), &cancel.body["reprise"]["status"]), ("cancel", &json!("Canceled")));
}

#[tokio::test]
async fn a_cancel_action_with_other_keys_is_called() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let mut action = receiver.action("/cancel");
    action["trigger"] = json!("Cancel");
    action["condition"] = Value::Null;
    action["foo"] = json!({"kind": 1});
    action["params"]["foo"] = json!([1]);
    action["params"]["body"] = json!({"job": 7});
    receiver.answer(Reply { body: action, ..Reply::ok() });
    let ids = f.api.create(&task(&receiver)).await;
    f.start().await;
    assert_eq!(f.api.delete(&format!("/task/{}", ids[0])).await.status, 200);
    assert_eq!(f.deliver().await, 1);
    let call = receiver.at("/cancel").pop().unwrap();
    assert_eq!((&call.body["job"], &call.body["reprise"]["trigger"]), (&json!(7), &json!("cancel")));
    assert_eq!((&call.body["reprise"]["name"], &call.body["reprise"]["metadata"]), (&json!("n"), &json!({})));
}

#[tokio::test]
async fn an_answer_that_only_looks_like_an_action_is_named_in_the_event() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let action = receiver.action("/cancel");
    let cases = [
        (json!({"cancel": action}), "answer.cancel: looks like an action"),
        (json!([action]), "answer[0]: looks like an action"),
        (json!({"kind": "Webhook", "params": {"params": action["params"]}}), "answer.params.url: is required"),
    ];
    for (body, reason) in cases {
        receiver.answer(Reply { body, ..Reply::ok() });
        let ids = f.api.create(&task(&receiver)).await;
        f.start().await;
        let events = f.api.get(&format!("/task/{}/events", ids[0])).await.body;
        let said = crate::support::text(&events[2]["reason"]);
        assert!(events[2]["to"] == "Running" && said.contains(reason), "{said}");
        f.api.delete(&format!("/task/{}", ids[0])).await;
        assert_eq!(f.deliver().await, 0);
    }
}

#[tokio::test]
async fn a_task_canceled_during_its_start_gets_its_cancel_call() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let (api, action) = (Client::new(f.api.base()), receiver.action("/cancel"));
    receiver.answer_with(move |received| {
        let (api, action) = (api.clone(), action.clone());
        async move {
            if received.path == "/start" {
                let id = received.header("x-task-id").to_owned();
                assert_eq!(api.delete(&format!("/task/{id}")).await.status, 200);
            }
            Reply { body: action, ..Reply::ok() }
        }
    });
    let ids = f.api.create(&task(&receiver)).await;
    f.start().await;
    assert_eq!(f.api.status(&ids[0]).await, "Canceled");
    assert_eq!(f.deliver().await, 1);
    assert_eq!(receiver.at("/cancel").len(), 1);
}

#[tokio::test]
async fn unsuccessful_on_start_answers_fail_the_run() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let cases = [
        (400, "validation_error"),
        (401, "authentication_error"),
        (403, "authentication_error"),
        (408, "timeout"),
        (429, "rate_limit"),
        (503, "server_error"),
        (302, "unknown"),
    ];
    for (status, failure_type) in cases {
        receiver.answer(Reply::status(status));
        let ids = f.api.create(&task(&receiver)).await;
        f.start().await;
        let task = f.api.task(&ids[0]).await;
        assert_eq!((&task["status"], &task["failure_type"]), (&json!("Failure"), &json!(failure_type)), "{status}");
    }
    let mut hasty = Fixture::with(&["--webhook-timeout-ms", "200"]).await;
    receiver.answer(Reply::slow(std::time::Duration::from_secs(3600)));
    let ids = hasty.api.create(&task(&receiver)).await;
    hasty.start().await;
    assert_eq!(hasty.api.task(&ids[0]).await["failure_type"], "timeout");
    hasty.db.assert_counters_match().await;

    let gone = json!({"kind": "Webhook", "params": {"url": "http://127.0.0.1:1/", "verb": "Post"}});
    let ids = f.api.create(&json!([{"name": "n", "kind": "k", "on_start": gone}])).await;
    f.start().await;
    let task = f.api.task(&ids[0]).await;
    assert_eq!(task["failure_type"], "network_error");
    assert!(task["failure_reason"].as_str().unwrap().contains("cannot connect"), "{task}");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_lost_claim_is_called_again_with_the_same_key() {
    let db = Database::new().await;
    let url = db.url.clone();
    let mut dead = Fixture::on(db, &[]).await;
    let mut alive =
        Fixture::on(Database { url: url.clone(), pool: sqlx::PgPool::connect_lazy(&url).unwrap() }, &[]).await;
    let receiver = Receiver::start().await;
    let ids = alive.api.create(&task(&receiver)).await;
    assert_eq!(dead.claim().await, 1);
    eventually("the call", async || (receiver.received().len() == 1).then_some(())).await;
    // The first instance stops here: its answer is not written, its lease is not renewed.
    alive.advance(29);
    assert_eq!(alive.expire().await, 0, "the lease is still good");
    alive.advance(1);
    assert_eq!(alive.expire().await, 1);
    let task = alive.api.task(&ids[0]).await;
    assert_eq!((&task["status"], &task["run"], &task["attempt"]), (&json!("Pending"), &json!(0), &json!(0)));
    alive.start().await;
    assert_eq!(alive.api.status(&ids[0]).await, "Running");
    let keys = receiver.keys();
    assert_eq!(keys[0], keys[1], "the same run, the same key");

    // The first instance continues: its answer has no effect.
    dead.write_answers().await;
    assert_eq!(alive.api.status(&ids[0]).await, "Running");
    alive.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_worker_may_report_after_its_claim_was_lost() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let ids = f.api.create(&task(&receiver)).await;
    f.claim().await;
    eventually("the call", async || (receiver.received().len() == 1).then_some(())).await;
    f.advance(30);
    f.expire().await;
    let path = format!("/task/{}", ids[0]);
    assert_eq!(f.api.status(&ids[0]).await, "Pending");
    assert_eq!(f.api.patch(&path, &json!({"status": "Success"})).await.status, 409, "which run?");
    assert_eq!(f.api.patch(&path, &json!({"status": "Success", "run": 0})).await.body["status"], "Success");
    f.write_answers().await;
    assert_eq!(f.api.status(&ids[0]).await, "Success");
    f.db.assert_counters_match().await;
}

/// Makes the receiver answer one call for each permit that the test adds.
fn hold_answers(receiver: &Receiver) -> Arc<Semaphore> {
    let gate = Arc::new(Semaphore::new(0));
    let closed = Arc::clone(&gate);
    receiver.answer_with(move |_| {
        let gate = Arc::clone(&closed);
        async move {
            gate.acquire().await.unwrap().forget();
            Reply::ok()
        }
    });
    gate
}

async fn two_claimed(f: &Fixture, receiver: &Receiver) -> Vec<String> {
    let on_start = receiver.action("/start");
    let tasks =
        json!([{"name": "a", "kind": "k", "on_start": on_start}, {"name": "b", "kind": "k", "on_start": on_start}]);
    let ids = f.api.create(&tasks).await;
    assert_eq!(f.claim().await, 2, "one is called, one waits for the only permit");
    eventually("the first call", async || (receiver.received().len() == 1).then_some(())).await;
    ids
}

#[tokio::test]
async fn leases_are_renewed_while_calls_wait_or_run() {
    let mut f = Fixture::with(&["--webhook-concurrency", "1"]).await;
    let receiver = Receiver::start().await;
    let open = hold_answers(&receiver);
    let ids = two_claimed(&f, &receiver).await;
    for _ in 0..5 {
        f.advance(20);
        f.keeper().renew().await.unwrap();
        assert_eq!(f.expire().await, 0);
    }
    open.add_permits(2);
    f.write_answers().await;
    eventually("both to run", async || {
        let both = f.api.status(&ids[0]).await == "Running" && f.api.status(&ids[1]).await == "Running";
        if !both && receiver.received().len() == 2 {
            f.write_answers().await;
        }
        both.then_some(())
    })
    .await;
    assert_eq!(receiver.keys().len(), 2, "each was called once");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_task_canceled_while_its_call_waits_is_not_called() {
    let mut f = Fixture::with(&["--webhook-concurrency", "1"]).await;
    let receiver = Receiver::start().await;
    let open = hold_answers(&receiver);
    let ids = two_claimed(&f, &receiver).await;
    let called = receiver.received()[0].header("x-task-id").to_owned();
    let waiting = ids.iter().find(|id| **id != called).unwrap();
    assert_eq!(f.api.delete(&format!("/task/{waiting}")).await.status, 200);
    open.add_permits(10);
    f.write_answers().await;
    assert_eq!(f.api.status(&called).await, "Running");
    // Another task uses the same permit afterwards: by then the canceled task had its turn.
    f.api.create(&json!([{"name": "c", "kind": "k", "on_start": receiver.action("/after")}])).await;
    f.start().await;
    let paths: Vec<String> = receiver.received().into_iter().map(|r| r.path).collect();
    assert_eq!(paths, ["/start", "/after"]);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_task_that_ends_while_it_is_claimed_is_not_called() {
    let f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let ended = f.api.create(&task(&receiver)).await;
    let ended_it = AtomicBool::new(false);
    // Reading the actions of the claimed task takes long.
    let mut holder = f.db.pool.begin().await.unwrap();
    sqlx::query("lock table task_spec in access exclusive mode").execute(&mut *holder).await.unwrap();
    let meanwhile = async {
        let waiting =
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
        eventually("a claim to wait for the lock", async || (f.db.number(waiting).await > 0).then_some(())).await;
        let end = "update task set status = 'canceled', ended_at = now(), claimed_by = null, timeout_at = null";
        f.db.execute(end).await;
        holder.rollback().await.unwrap();
        ended_it.store(true, Ordering::Relaxed);
    };
    // A claim waits for a lock only briefly.
    let claiming = async {
        let mut claimed = 0;
        while !ended_it.load(Ordering::Relaxed) {
            claimed += f.claim().await;
        }
        claimed
    };
    let (claimed, ()) = tokio::join!(claiming, meanwhile);
    assert_eq!(claimed, 0, "claiming a task and reading its action are one statement");
    let next = f.api.create(&task(&receiver)).await;
    f.claim().await;
    eventually("the next one to be called", async || {
        receiver.keys().iter().any(|key| key.starts_with(&next[0])).then_some(())
    })
    .await;
    assert!(!receiver.keys().iter().any(|key| key.starts_with(&ended[0])));
}

#[tokio::test]
async fn on_start_calls_are_made_in_queue_order() {
    let mut f = Fixture::with(&["--webhook-concurrency", "4"]).await;
    let receiver = Receiver::start().await;
    let open = hold_answers(&receiver);
    let first: Vec<Value> = (0..4)
        .map(|_| json!({"name": "n", "kind": "k", "priority": 99, "on_start": receiver.action("/first")}))
        .collect();
    f.api.create(&json!(first)).await;
    f.claim().await;
    eventually("all permits to be taken", async || (receiver.received().len() == 4).then_some(())).await;
    let order = [3, 0, 2, 1];
    let tasks: Vec<Value> = order
        .iter()
        .map(|p| json!({"name": "n", "kind": "k", "priority": p, "on_start": receiver.action(&format!("/{p}"))}))
        .collect();
    f.api.create(&json!(tasks)).await;
    f.claim().await;
    for done in 5..=8 {
        open.add_permits(1);
        eventually("the next call", async || (receiver.received().len() == done).then_some(())).await;
    }
    let paths: Vec<String> = receiver.received().into_iter().skip(4).map(|r| r.path).collect();
    assert_eq!(paths, ["/3", "/2", "/1", "/0"]);
    open.add_permits(4);
    f.write_answers().await;
}

#[tokio::test]
async fn claims_without_a_call_are_given_back_at_shutdown() {
    let mut f = Fixture::with(&["--webhook-concurrency", "1"]).await;
    let receiver = Receiver::start().await;
    let open = hold_answers(&receiver);
    two_claimed(&f, &receiver).await;
    let drain = f.keeper().drain(std::time::Duration::from_secs(30));
    let given_back = eventually("the other to be given back", async || {
        (f.db.number("select count(*) from task where status = 'pending'").await == 1).then(|| open.add_permits(1))
    });
    tokio::join!(drain, given_back);
    f.write_answers().await;
    assert_eq!(f.db.number("select count(*) from task where status = 'running'").await, 1);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn the_on_start_answer_of_a_locked_task_is_written_later() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let ids = f.api.create(&task(&receiver)).await;
    f.claim().await;
    let mut holder = f.db.pool.begin().await.unwrap();
    sqlx::query("select from task for update").execute(&mut *holder).await.unwrap();
    f.write_answers().await;
    assert_eq!(f.api.status(&ids[0]).await, "Claimed");
    holder.rollback().await.unwrap();
    // The answer is written once the task is unlocked.
    f.write_answers().await;
    assert_eq!(f.api.status(&ids[0]).await, "Running");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn on_start_answers_of_two_runs_are_kept_apart() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let open = Arc::new(Semaphore::new(0));
    let gate = Arc::clone(&open);
    // The first run is answered right after the second one.
    receiver.answer_with(move |call| {
        let gate = Arc::clone(&gate);
        async move {
            if call.key().ends_with(":0") {
                gate.acquire().await.unwrap().forget();
            } else {
                gate.add_permits(1);
            }
            Reply::status(500)
        }
    });
    let policy = json!({"max_retries": 5, "strategy": "immediate", "jitter_ms": 0});
    let task = json!([{"name": "n", "kind": "k", "on_start": receiver.action("/start"), "retry": policy}]);
    let ids = f.api.create(&task).await;
    f.claim().await;
    eventually("the first call", async || (receiver.keys().len() == 1).then_some(())).await;
    let report = json!({"status": "Failure", "failure_reason": "x"});
    assert_eq!(f.api.patch(&format!("/task/{}?run=0", ids[0]), &report).await.body["status"], "RetryPending");
    f.advance(1);
    f.release().await;
    f.claim().await;
    eventually("the second call", async || (receiver.keys().len() == 2).then_some(())).await;
    // Until both are answered.
    f.keeper().drain(PATIENCE).await;
    f.write_answers().await;
    assert_eq!(f.api.status(&ids[0]).await, "RetryPending");
    let attempts = f.api.get(&format!("/task/{}/attempts", ids[0])).await.body;
    assert_eq!((&attempts[1]["run"], &attempts[1]["http_status"]), (&json!(1), &json!(500)), "{attempts}");
    f.db.assert_counters_match().await;
}
