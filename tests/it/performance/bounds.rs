//! Bounds: bytes that are claimed, leased and listed at once, new matchers in a request, and downtime in timeouts.

use reprise::store::{Patience, Session, outages};
use serde_json::{Value, json};

use crate::support::{Fixture, Receiver, Reply, action, text};

fn large(receiver: &Receiver, list: &str) -> Value {
    let mut action = receiver.action("/large");
    action["params"]["body"] = json!({"large": "x".repeat(250 * 1024)});
    let action = if list == "on_start" { action } else { json!([action]) };
    json!({"name": "n", "kind": "k", list: action})
}

#[tokio::test]
async fn a_claim_takes_at_most_8_mib_of_tasks() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    for _ in 0..2 {
        f.api.create(&json!(vec![large(&receiver, "on_start"); 50])).await;
    }
    let claimed = f.claim().await;
    assert!((30..40).contains(&claimed), "{claimed} of 250 KiB each in 8 MiB");
    let small = f.api.create(&json!([{"name": "n", "kind": "k", "priority": 5}])).await;
    let mut left = 101 - claimed;
    while left > 0 {
        for _ in 0..receiver.received().len() {
            if f.db.number("select count(*) from task where status = 'claimed'").await == 0 {
                break;
            }
            f.write_answers().await;
        }
        left -= f.claim().await;
    }
    assert_eq!(f.api.status(&small[0]).await, "Running");
}

#[tokio::test]
async fn a_lease_takes_at_most_8_mib_of_notifications() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let ids = f.api.create(&json!(vec![large(&receiver, "on_success"); 50])).await;
    f.claim().await;
    for id in &ids {
        assert_eq!(f.api.succeed(id).await.status, 200);
    }
    let first = f.deliver().await;
    assert!((30..40).contains(&first), "{first} of 250 KiB each in 8 MiB");
    assert_eq!(f.deliver().await, 50 - first);
    assert_eq!(receiver.at("/large").len(), 50);
}

#[tokio::test]
async fn a_report_of_a_large_task_is_answered_with_its_details() {
    let f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let ids = f.api.create(&json!(vec![large(&receiver, "on_success"); 3])).await;
    f.claim().await;
    for id in &ids {
        let done = f.api.succeed(id).await;
        assert_eq!((done.status.as_u16(), &done.body["status"]), (200, &json!("Success")));
        let body = &action(&done.body, "End")["params"]["body"]["large"];
        assert_eq!(body.as_str().map(str::len), Some(250 * 1024));
    }
}

#[tokio::test]
async fn a_page_of_large_batches_ends_early_with_a_cursor() {
    let f = Fixture::new().await;
    let mut created = Vec::new();
    for _ in 0..3 {
        // The names of its kinds are the largest part of a batch.
        let kinds: Vec<Value> = (0..10_000)
            .map(|n| json!({"name": "n", "kind": format!("{n:0>100}"), "run_at": "2999-01-01T00:00:00Z"}))
            .collect();
        created.push(text(&json!(f.api.post("/task", &json!(kinds)).await.headers["x-batch-id"].to_str().unwrap())));
    }
    f.db.execute("update batch set kinds = (select array_agg(repeat('é', 99) || n) from generate_series(1, 40000) n)")
        .await;
    let (mut shown, mut path, mut pages) = (Vec::new(), "/batches?page_size=100".to_owned(), 0);
    loop {
        let page = f.api.get(&path).await;
        shown.extend(page.body.as_array().unwrap().iter().map(|batch| text(&batch["batch_id"])));
        pages += 1;
        let Some(next) = page.headers.get("x-next-cursor") else { break };
        path = format!("/batches?page_size=100&cursor={}", next.to_str().unwrap());
    }
    created.reverse();
    assert_eq!((shown, pages), (created, 2));
}

fn limited(fields: usize) -> Value {
    let metadata: Value = (0..fields).map(|n| (format!("f{n}"), json!(1))).collect::<serde_json::Map<_, _>>().into();
    let rules: Vec<Value> = (0..fields)
        .map(|n| json!({"type": "Concurrency", "max_concurrency": 1, "matcher": {"fields": [format!("f{n}")]}}))
        .collect();
    json!({"name": "n", "kind": "k", "metadata": metadata, "rules": rules})
}

#[tokio::test]
async fn a_request_adds_at_most_1000_new_matchers() {
    let f = Fixture::new().await;
    let tasks = |from: usize, to: usize| -> Value {
        (from..to)
            .map(|n| {
                json!({"name": "n", "kind": format!("k{n}"),
                       "rules": [{"type": "Concurrency", "max_concurrency": 1, "matcher": {"fields": []}}]})
            })
            .collect()
    };
    let refused = f.api.post("/task", &tasks(0, 1001)).await;
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert!(text(&refused.body["detail"]).contains("1000 matchers"), "{}", refused.body);
    assert_eq!(f.api.post("/task", &tasks(0, 1000)).await.status, 201);
    assert_eq!(f.db.number("select count(*) from matcher").await, 1000);
    assert_eq!(f.api.post("/task", &tasks(500, 1500)).await.status, 201, "known ones are not new");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn unused_matchers_are_retired_and_counted_again_when_they_return() {
    let f = Fixture::new().await;
    let (forget, active) = ("select count(*) from matcher", "select count(*) from matcher where retired_at is null");
    let ids = f.api.create(&json!([limited(3), limited(3)])).await;
    f.claim().await;
    assert_eq!(f.api.status(&ids[0]).await, "Running");
    f.advance(3600);
    f.clean_up(0).await;
    assert_eq!(f.db.number(active).await, 3, "tasks alive carry them");
    for id in &ids {
        f.api.succeed(id).await;
        f.claim().await;
    }
    // A task of the kind still executes, and is counted.
    let plain = f.api.create(&json!([{"name": "n", "kind": "k", "metadata": {"f0": 1}}])).await;
    f.claim().await;
    f.clean_up(0).await;
    assert_eq!(f.db.number(active).await, 0);
    f.db.assert_counters_match().await;
    // The matcher returns with a new task: executing tasks count.
    let again = f.api.create(&json!([limited(1)])).await;
    f.claim().await;
    f.claim().await;
    assert_eq!(f.api.status(&again[0]).await, "Pending", "one of the kind executes");
    f.db.assert_counters_match().await;
    f.api.succeed(&plain[0]).await;
    f.claim().await;
    assert_eq!(f.api.status(&again[0]).await, "Running");
    f.api.succeed(&again[0]).await;
    f.advance(3600);
    f.clean_up(0).await;
    f.clean_up(0).await;
    assert_eq!(f.db.number(forget).await, 0);
    f.db.assert_counters_match().await;
}

/// The request knew the matcher, and it was retired before the task was stored.
#[tokio::test]
async fn a_task_with_a_retired_matcher_obeys_its_rule() {
    let f = Fixture::new().await;
    let ids = f.api.create(&json!([limited(1), limited(1)])).await;
    f.db.execute("update matcher set retired_at = now(); update matcher_version set version = version + 1").await;
    for _ in 0..3 {
        f.claim().await;
    }
    assert_eq!((f.api.status(&ids[0]).await, f.api.status(&ids[1]).await), ("Running".into(), "Pending".into()));
    f.db.assert_counters_match().await;
}

/// Tasks as an instance of a version without the flag creates them, after their matcher was deleted.
#[tokio::test]
async fn a_task_without_the_rules_flag_obeys_its_rules() {
    let f = Fixture::new().await;
    let ids = f.api.create(&json!([limited(1), limited(1), {"name": "n", "kind": "other"}])).await;
    f.db.execute(
        "update task set flags = flags & ~256; delete from matcher; update matcher_version set version = version + 1",
    )
    .await;
    for _ in 0..3 {
        f.claim().await;
    }
    let mut status = Vec::new();
    for id in &ids {
        status.push(f.api.status(id).await);
    }
    assert_eq!(status, ["Running", "Pending", "Running"]);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn downtime_of_all_instances_does_not_count_towards_timeouts() {
    let f = Fixture::new().await;
    let beat = async || {
        let beat = |session: Session| async move { outages::record_alive(&session).await };
        f.store.retrying(Patience::Brief, beat).await.unwrap();
    };
    let ids = f.api.create(&json!([{"name": "n", "kind": "k", "timeout": 30}])).await;
    f.claim().await;
    beat().await;
    f.advance(2);
    beat().await;
    // No instance works for a hundred seconds.
    f.advance(100);
    beat().await;
    assert_eq!(f.expire().await, 0);
    assert_eq!(f.api.status(&ids[0]).await, "Running");
    f.advance(27);
    assert_eq!(f.expire().await, 0, "28 and 100 seconds, of which the latter do not count");
    f.advance(2);
    assert_eq!(f.expire().await, 1);
    // A lease that ended during the downtime is extended once.
    let receiver = Receiver::start().await;
    receiver.answer(Reply::slow(std::time::Duration::from_secs(3600)));
    let claimed = f.api.create(&json!([{"name": "n", "kind": "k", "on_start": receiver.action("/s")}])).await;
    f.claim().await;
    beat().await;
    f.advance(100);
    beat().await;
    assert_eq!(f.expire().await, 0);
    f.advance(29);
    assert_eq!(f.expire().await, 0);
    f.advance(2);
    assert_eq!(f.expire().await, 1);
    assert_eq!(f.api.status(&claimed[0]).await, "Pending");
    f.api.delete(&format!("/task/{}", claimed[0])).await;
    // Later timeouts are not extended.
    let ids = f.api.create(&json!([{"name": "n", "kind": "k", "timeout": 30}])).await;
    f.claim().await;
    f.advance(31);
    assert_eq!(f.expire().await, 1);
    assert_eq!(f.api.status(&ids[0]).await, "Failure");
}

#[tokio::test]
async fn an_invalid_cancel_action_is_recorded_in_the_events() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    // With a character that PostgreSQL does not store.
    let answer = json!({"kind": "a\u{0}b", "params": {"url": "not a url", "verb": "Post"}});
    receiver.answer(Reply { body: answer, ..Reply::ok() });
    let ids = f.api.create(&json!([{"name": "n", "kind": "k", "on_start": receiver.action("/start")}])).await;
    f.claim().await;
    f.write_answers().await;
    let events = f.api.get(&format!("/task/{}/events", ids[0])).await.body;
    let started = events.as_array().unwrap().iter().find(|event| event["to"] == "Running").unwrap();
    assert!(text(&started["reason"]).contains("a b"), "{started}");
    assert!(events.as_array().unwrap().iter().filter(|event| event["to"] != "Running").all(|e| e["reason"].is_null()));
}
