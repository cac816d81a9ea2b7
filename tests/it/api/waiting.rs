//! `wait_secs`: requests that wait for a task or a batch, answered by this instance, by another one, when the time is
//! over, and at shutdown.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use reprise::loops::runner::Loop;
use reprise::loops::waiters::CheckWaiters;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::support::{Answer, Client, Database, Fixture, Instance, eventually, text};

/// Longer than a test may take: no test here waits for it to pass.
const LONG: u64 = 60;

fn ask(api: &Client, path: String) -> JoinHandle<Answer> {
    let api = api.clone();
    tokio::spawn(async move { api.get(&path).await })
}

/// Asks for the task and waits until the request waits.
async fn ask_and_wait(f: &Fixture, path: String) -> JoinHandle<Answer> {
    let before = f.store.waiters().count();
    let asked = ask(&f.api, path);
    eventually("the request to wait", async || (f.store.waiters().count() > before).then_some(())).await;
    asked
}

async fn one_task(f: &Fixture) -> (String, String) {
    let created = f.api.post("/task", &json!([{"name": "n", "kind": "k"}])).await;
    (text(&created.body[0]["id"]), text(&created.body[0]["batch_id"]))
}

#[tokio::test]
async fn a_change_on_the_same_instance_answers_the_requests_that_wait_for_it() {
    let f = Fixture::new().await;
    let (id, batch) = one_task(&f).await;
    let ended = ask_and_wait(&f, format!("/task/{id}?wait_secs={LONG}")).await;
    let running = ask_and_wait(&f, format!("/task/{id}?wait_secs={LONG}&until=running")).await;
    let failed = ask_and_wait(&f, format!("/task/{id}?wait_secs={LONG}&until=FAILURE")).await;
    let completed = ask_and_wait(&f, format!("/batch/{batch}?wait_secs={LONG}")).await;
    f.claim().await;
    assert_eq!(running.await.unwrap().body["status"], "Running");
    assert_eq!(f.store.waiters().count(), 3);
    assert_eq!(f.api.succeed(&id).await.status, 200);
    assert_eq!(ended.await.unwrap().body["status"], "Success");
    assert_eq!(failed.await.unwrap().body["status"], "Success", "it cannot fail any more");
    let completed = completed.await.unwrap().body;
    assert!(completed["completed_at"].is_string(), "{completed}");
    assert_eq!(completed["status_counts"]["success"], 1);
    assert_eq!(f.store.waiters().count(), 0);
}

#[tokio::test]
async fn a_wait_that_is_over_is_answered_at_once() {
    let f = Fixture::new().await;
    let (id, batch) = one_task(&f).await;
    let pending = f.api.get(&format!("/task/{id}?wait_secs={LONG}&until=Pending")).await;
    assert_eq!(pending.body["status"], "Pending");
    f.claim().await;
    f.api.succeed(&id).await;
    let unknown = uuid::Uuid::now_v7();
    let cases = [
        (format!("/task/{id}?wait_secs={LONG}"), 200),
        (format!("/task/{id}?wait_secs={LONG}&until=terminal"), 200),
        (format!("/task/{id}?wait_secs={LONG}&until=Running"), 200),
        (format!("/task/{id}?wait_secs={LONG}&run=7"), 409),
        (format!("/task/{unknown}?wait_secs={LONG}"), 404),
        (format!("/batch/{batch}?wait_secs={LONG}"), 200),
        (format!("/batch/{unknown}?wait_secs={LONG}"), 404),
        (format!("/task/{id}?wait_secs=61"), 400),
        (format!("/task/{id}?wait_secs=-1"), 400),
        (format!("/task/{id}?wait_secs=1&until=done"), 400),
        (format!("/batch/{batch}?wait_secs=61"), 400),
        (format!("/batch/{batch}?until=Running"), 400),
    ];
    let started = Instant::now();
    for (path, status) in cases {
        let answer = f.api.get(&path).await;
        assert_eq!(answer.status, status, "{path}: {}", answer.body);
    }
    assert!(started.elapsed() < Duration::from_secs(LONG), "none of them waits");
}

#[tokio::test]
async fn when_the_time_is_over_the_answer_is_the_task_as_it_is() {
    // The time limit of requests is about receiving them.
    let f = Fixture::with(&["--request-timeout-secs", "1"]).await;
    let (id, batch) = one_task(&f).await;
    let started = Instant::now();
    let (task, batch) = tokio::join!(
        ask(&f.api, format!("/task/{id}?wait_secs=2")),
        ask(&f.api, format!("/batch/{batch}?wait_secs=2"))
    );
    assert!(started.elapsed() >= Duration::from_secs(2));
    let (task, batch) = (task.unwrap(), batch.unwrap());
    assert_eq!((task.status.as_u16(), &task.body["status"]), (200, &json!("Pending")));
    assert_eq!((batch.status.as_u16(), &batch.body["completed_at"]), (200, &Value::Null));
}

#[tokio::test]
async fn a_client_that_hangs_up_stops_waiting() {
    let f = Fixture::new().await;
    let (id, _) = one_task(&f).await;
    let asked = ask_and_wait(&f, format!("/task/{id}?wait_secs={LONG}")).await;
    asked.abort();
    eventually("the wait to end", async || (f.store.waiters().count() == 0).then_some(())).await;
}

#[tokio::test]
async fn a_change_by_another_instance_is_found() {
    let f = Fixture::new().await;
    let other = Fixture::on(f.db.clone(), &[]).await;
    let (id, batch) = one_task(&f).await;
    let ended = ask_and_wait(&f, format!("/task/{id}?wait_secs={LONG}")).await;
    let running = ask_and_wait(&f, format!("/task/{id}?wait_secs={LONG}&until=Running")).await;
    let completed = ask_and_wait(&f, format!("/batch/{batch}?wait_secs={LONG}")).await;
    let waiters = CheckWaiters { store: f.store.clone() };
    assert_eq!(waiters.tick().await.unwrap().processed, 0);
    other.claim().await;
    assert_eq!(waiters.tick().await.unwrap().processed, 1);
    assert_eq!(running.await.unwrap().body["status"], "Running");
    other.api.succeed(&id).await;
    assert_eq!(waiters.tick().await.unwrap().processed, 2);
    assert_eq!(ended.await.unwrap().body["status"], "Success");
    assert!(completed.await.unwrap().body["completed_at"].is_string());
    assert_eq!(waiters.tick().await.unwrap().processed, 0);
}

#[tokio::test]
async fn a_deleted_task_ends_the_wait() {
    let f = Fixture::new().await;
    let (id, batch) = one_task(&f).await;
    let task = ask_and_wait(&f, format!("/task/{id}?wait_secs={LONG}")).await;
    let whole = ask_and_wait(&f, format!("/batch/{batch}?wait_secs={LONG}")).await;
    f.db.execute("truncate task, task_spec, batch, batch_count, link cascade").await;
    CheckWaiters { store: f.store.clone() }.tick().await.unwrap();
    assert_eq!((task.await.unwrap().status.as_u16(), whole.await.unwrap().status.as_u16()), (404, 404));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_waiting_requests_hold_no_connection() {
    let f = Fixture::new().await;
    let tasks: Vec<Value> = (0..1000).map(|i| json!({"name": format!("n{i}"), "kind": "k"})).collect();
    let created = f.api.post("/task", &json!(tasks)).await;
    let batch = text(&created.headers["x-batch-id"].to_str().unwrap().into());
    let ids = created.body.as_array().unwrap().iter().map(|task| text(&task["id"]));
    let paths = ids.map(|id| format!("/task/{id}?wait_secs={LONG}&until=Canceled"));
    let mut asked: Vec<JoinHandle<Answer>> = paths.map(|path| ask(&f.api, path)).collect();
    asked.extend((0..1000).map(|_| ask(&f.api, format!("/batch/{batch}?wait_secs={LONG}"))));
    eventually("all requests to wait", async || (f.store.waiters().count() == 2000).then_some(())).await;
    let busy = "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'reprise' \
                and state <> 'idle'";
    eventually("the connections to be idle", async || (f.db.number(busy).await == 0).then_some(())).await;
    let (open, idle) = f.store.pool_use();
    assert!(open == idle && open <= 16, "{open} open, {idle} idle");

    assert_eq!(f.api.delete(&format!("/batch/{batch}")).await.status, 200);
    for (i, answer) in join_all(asked).await.into_iter().enumerate() {
        let answer = answer.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.body);
        match i {
            0..1000 => assert_eq!(answer.body["status"], "Canceled"),
            _ => assert!(answer.body["completed_at"].is_string()),
        }
    }
    assert_eq!(f.store.waiters().count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_instances_answer_each_others_waits_and_all_of_them_at_shutdown() {
    let db = Database::new().await;
    let (first, second) = (Instance::start(&db.url, &[]), Instance::start(&db.url, &[]));
    let ids = first.api.create(&json!([{"name": "a", "kind": "k"}, {"name": "b", "kind": "k"}])).await;
    first.api.wait_for(&ids[0], "Running").await;
    let waiting = async |count: usize| {
        let line = format!("\nreprise_waiting_requests {count}\n");
        eventually("requests to wait", async || {
            text(&first.api.get("/metrics").await.body).contains(&line).then_some(())
        })
        .await;
    };
    let ended = ask(&first.api, format!("/task/{}?wait_secs={LONG}", ids[0]));
    let alive = ask(&first.api, format!("/task/{}?wait_secs={LONG}", ids[1]));
    waiting(2).await;
    assert_eq!(second.api.succeed(&ids[0]).await.status, 200);
    assert_eq!(ended.await.unwrap().body["status"], "Success");
    waiting(1).await;
    assert!(first.terminate().success());
    let alive = alive.await.unwrap();
    assert_eq!((alive.status.as_u16(), &alive.body["status"]), (200, &json!("Running")));
}
