//! Dates under contention: a timeout counts from the moment it is granted, and no event is dated before its predecessor.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::support::{Client, Database, Instance, Load, LockHolder, Receiver, Reply, eventually};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_heartbeat_after_a_delayed_start_grants_a_whole_timeout() {
    let db = Database::new().await;
    let instance = Instance::start(&db.url, &[("RUST_LOG", "error"), ("WORKER_LOOP_INTERVAL_MS", "100")]);
    let receiver = Receiver::start().await;
    let answers = watch::Sender::new(false);
    let told = answers.clone();
    receiver.answer_with(move |_| {
        let mut told = told.subscribe();
        async move {
            told.wait_for(|told| *told).await.unwrap();
            Reply::ok()
        }
    });
    // Far longer than the test takes: no task times out.
    let timeout = 3600;
    let task = json!({"name": "n", "kind": "k", "timeout": timeout, "on_start": receiver.action("/start")});
    let ids = instance.api.create(&json!(vec![task; 10])).await;
    eventually("the on_start calls", async || (receiver.received().len() == 10).then_some(())).await;
    let holder = LockHolder::holding(&db, "select from task order by id for update").await;
    // The starts, and the heartbeats that arrive meanwhile, are written after the rows are released.
    answers.send_replace(true);
    let put = |id: &String| {
        let (api, path) = (Client::new(instance.api.base()), format!("/task/{id}"));
        tokio::spawn(async move { api.put(&path, &json!({})).await })
    };
    let calls = "reprise_webhook_calls_total";
    eventually("the answers", async || (instance.api.counter(calls).await == 10).then_some(())).await;
    let early: Vec<_> = ids.iter().map(put).collect();
    eventually("heartbeats to wait", async || (db.waiting_for_locks().await > 0).then_some(())).await;
    holder.release().await;
    for answer in join_all(early).await {
        let answer = answer.unwrap();
        assert!(answer.status == 202 || answer.is_not_now(), "{} {}", answer.status, answer.body);
    }
    let sent = "select (extract(epoch from clock_timestamp()) * 1000)::bigint";
    let sent = db.number(sent).await;
    for answer in join_all(ids.iter().map(put)).await {
        let answer = answer.unwrap();
        assert_eq!(answer.status, 202, "{}", answer.body);
    }
    for id in &ids {
        instance.api.wait_for(id, "Running").await;
    }
    // When a deadline has come, the service moves it to the last heartbeat plus the timeout.
    db.execute("update task set timeout_at = clock_timestamp()").await;
    let due = "select count(*) from task where timeout_at <= clock_timestamp()";
    eventually("the deadlines to be moved", async || (db.number(due).await == 0).then_some(())).await;
    let granted = format!("select min(extract(epoch from timeout_at) * 1000)::bigint - {sent} from task");
    let granted = db.number(&granted).await;
    assert!(granted >= 1000 * timeout, "a task would time out {granted} ms after its heartbeat");
    db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_event_is_dated_before_the_one_it_follows() {
    let db = Database::new().await;
    db.watch_last_updated().await;
    let settings = [
        ("RUST_LOG", "error"),
        ("WORKER_LOOP_INTERVAL_MS", "100"),
        ("RETRY_LOOP_INTERVAL_MS", "100"),
        ("WORKER_CLAIM_TIMEOUT_SECS", "5"),
    ];
    let instances = [Instance::start(&db.url, &settings), Instance::start(&db.url, &settings)];
    let load = Load::on(&instances).await;
    let clients = load.clients(8);
    // Transactions wait for locks all the time.
    let stop = CancellationToken::new();
    let holders: Vec<_> = ["task", "batch_count", "status_count", "task"]
        .into_iter()
        .map(|table| {
            let (db, stop) = (db.clone(), stop.clone());
            tokio::spawn(async move {
                while !stop.is_cancelled() {
                    let alive = if table == "task" { "where ended_at is null" } else { "" };
                    let rows = format!("select from {table} {alive} order by random() limit 20 for update skip locked");
                    if let Some(holder) = LockHolder::holding_any(&db, &rows).await {
                        // Long enough for some to give up and try again; no assertion depends on it.
                        tokio::time::sleep(Duration::from_millis(700)).await;
                        holder.release().await;
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            })
        })
        .collect();
    eventually("600 runs to end", async || (load.ended() > 600).then_some(())).await;
    stop.cancel();
    join_all(holders).await.into_iter().for_each(Result::unwrap);
    clients.stop().await;
    load.finish(&db).await;
    db.assert_last_updated_rose().await;
}
