//! Concurrent requests on the same rows: no change is lost between two transactions.

use futures_util::future::join_all;
use reprise::clock::Clock;
use reprise::domain::retry::RetryLimits;
use reprise::store::{Actor, Patience, Session};
use serde_json::{Value, json};

use crate::support::{Client, Database, Fixture, Instance, PATIENCE, eventually};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_parents_that_end_at_once_release_their_child() {
    let f = Fixture::with(&["--webhook-concurrency", "1000"]).await;
    let tasks: Vec<Value> = (0..100)
        .flat_map(|i| {
            let (a, b) = (format!("a{i}"), format!("b{i}"));
            let child = json!({"name": "c", "kind": "k", "dependencies": [{"id": a}, {"id": b}]});
            [json!({"id": a, "name": "a", "kind": "k"}), json!({"id": b, "name": "b", "kind": "k"}), child]
        })
        .collect();
    let ids = f.api.create(&json!(tasks)).await;
    while f.claim().await > 0 {}
    for chunk in ids.chunks(30) {
        let parents = chunk.chunks(3).flat_map(|trio| trio[..2].iter().cloned());
        let reports = parents.map(|id| {
            let api = f.api.clone();
            tokio::spawn(async move { api.succeed(&id).await.status })
        });
        for status in join_all(reports).await {
            assert_eq!(status.unwrap(), 200);
        }
    }
    assert_eq!(f.db.number("select count(*) from task where status = 'pending'").await, 100);
    f.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_parent_that_will_be_retried_moves_no_child() {
    let f = Fixture::with(&["--webhook-concurrency", "1000"]).await;
    let retry = json!({"max_retries": 2, "jitter_ms": 0});
    let tasks: Vec<Value> = (0..60)
        .flat_map(|i| {
            let (a, b) = (format!("a{i}"), format!("b{i}"));
            let child =
                json!({"name": "c", "kind": "k", "dependencies": [{"id": a}, {"id": b, "requires_success": false}]});
            [
                json!({"id": a, "name": "a", "kind": "k", "timeout": 10, "retry": retry}),
                json!({"id": b, "name": "b", "kind": "k"}),
                child,
            ]
        })
        .collect();
    let ids = f.api.create(&json!(tasks)).await;
    while f.claim().await > 0 {}
    f.advance(10);
    // One parent times out or fails, the other ends in either way, all at the same time.
    let mut reports = Vec::new();
    for (i, trio) in ids.chunks(3).enumerate() {
        let (api, a, b) = (f.api.clone(), trio[0].clone(), trio[1].clone());
        reports.push(tokio::spawn(async move {
            if i % 2 == 0 {
                let _ = api.fail(&a).await;
            }
            if i % 3 == 0 { api.fail(&b).await.status } else { api.succeed(&b).await.status }
        }));
    }
    let (expired, reports) = tokio::join!(f.expire(), join_all(reports));
    assert!(expired <= 60);
    for status in reports {
        assert_eq!(status.unwrap(), 200);
    }
    f.expire().await;
    assert_eq!(f.db.number("select count(*) from task where status = 'retry_pending'").await, 60);
    assert_eq!(f.db.number("select count(*) from task where status = 'waiting'").await, 60, "no child has moved");
    f.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_requests_of_every_kind_keep_the_counters_right() {
    send_requests_of_every_kind("0").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_requests_with_dead_end_cancel_keep_the_counters_right() {
    send_requests_of_every_kind("1").await;
}

async fn send_requests_of_every_kind(dead_end_cancel: &str) {
    let db = Database::new().await;
    let settings =
        [("WORKER_LOOP_INTERVAL_MS", "20"), ("RETRY_LOOP_INTERVAL_MS", "20"), ("DEAD_END_CANCEL", dead_end_cancel)];
    let instances = [Instance::start(&db.url, &settings), Instance::start(&db.url, &settings)];
    let retry = json!({"max_retries": 1, "initial_delay_secs": 1, "jitter_ms": 50});
    let tasks: Vec<Value> = (0..240usize)
        .map(|i| {
            let mut needs: Vec<Value> = Vec::new();
            for back in [7, 11, 30] {
                if let Some(parent) = i.checked_sub(back).filter(|_| i % 5 != 0) {
                    needs.push(json!({"id": parent.to_string(), "requires_success": back != 11}));
                }
            }
            json!({"id": i.to_string(), "name": "n", "kind": "k", "dependencies": needs, "retry": retry})
        })
        .collect();
    let ids = instances[0].api.create(&json!(tasks)).await;
    let storms = (0..16).map(|worker: usize| {
        let (api, ids) = (Client::new(instances[worker % 2].api.base()), ids.clone());
        tokio::spawn(async move {
            for round in 0..60 {
                let number = (worker * 37 + round * 101) % ids.len();
                let id = &ids[number];
                let answer = match (worker + round) % 9 {
                    0..=3 => api.succeed(id).await,
                    4 => api.fail(id).await,
                    5 => api.patch(&format!("/task/pause/{id}"), &json!({})).await,
                    6 => api.patch(&format!("/task/resume/{id}"), &json!({})).await,
                    7 => api.put(&format!("/task/{id}"), &json!({"new_success": 1})).await,
                    _ if round % 20 == 0 => api.delete(&format!("/task/{id}")).await,
                    _ => api.get(&format!("/task/{id}")).await,
                };
                assert!([200, 202, 409].contains(&answer.status.as_u16()), "{}", answer.body);
            }
        })
    });
    for storm in join_all(storms).await {
        storm.unwrap();
    }
    // Resume paused tasks and report the others: the batch can end.
    let batch = instances[0].api.task(&ids[0]).await["batch_id"].as_str().unwrap().to_owned();
    eventually("the batch to end", async || {
        for task in instances[0]
            .api
            .get(&format!("/task?batch_id={batch}&status=paused,running&page_size=100"))
            .await
            .body
            .as_array()
            .unwrap()
        {
            let id = task["id"].as_str().unwrap();
            instances[1].api.patch(&format!("/task/resume/{id}"), &json!({})).await;
            instances[1].api.succeed(id).await;
        }
        instances[0].api.get(&format!("/batch/{batch}")).await.body["completed_at"].is_string().then_some(())
    })
    .await;
    db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_wake_up_reaches_another_instance() {
    let db = Database::new().await;
    // Without a wake-up, the instance would look for work after an hour.
    let lazy = [("WORKER_LOOP_INTERVAL_MS", "3600000"), ("RETRY_LOOP_INTERVAL_MS", "3600000")];
    let idle = Instance::start(&db.url, &lazy);
    let f = Fixture::on(Database::at(&db.url), &[]).await;
    let token = tokio_util::sync::CancellationToken::new();
    let teller = tokio::spawn(reprise::loops::wakeup::tell(f.store.clone(), token.clone()));
    // Created by a service without loops, so only the other instance can start it. It may not be listening yet.
    let done = tokio::time::timeout(PATIENCE, async {
        loop {
            let ids = f.api.create(&json!([{"name": "n", "kind": "k"}])).await;
            for _ in 0..50 {
                if idle.api.status(&ids[0]).await == "Running" {
                    return;
                }
            }
        }
    });
    assert!(done.await.is_ok(), "the instance was not woken");
    token.cancel();
    teller.await.unwrap();
}

#[tokio::test]
async fn an_aborted_begin_leaves_no_transaction_open() {
    let db = Database::new().await;
    let store = reprise::store::Store::new(&db.url, 1, Clock::Database, RetryLimits::default()).unwrap();
    let open = "select count(*) from pg_stat_activity where datname = current_database() and state like 'idle in transaction%'";
    for polls in 0..40 {
        let begin = |session: Session| async move { session.begin(Actor::Api).await };
        let mut begin = Box::pin(store.retrying(Patience::Brief, begin));
        for _ in 0..polls {
            if futures_util::poll!(&mut begin).is_ready() {
                break;
            }
            tokio::task::yield_now().await;
        }
        drop(begin);
        // The next user of a connection must not find an open transaction: the pool has kept the connection without one,
        // or has dropped it.
        let back = async || [(0, 0), (1, 1)].contains(&store.pool_use()).then(|| store.pool_use().1);
        let kept = eventually("the connection to be kept or dropped", back).await;
        let open_now = db.number(open).await;
        assert!(kept == 0 || open_now == 0, "a transaction is open on a connection in the pool after {polls} polls");
        store.ping().await.unwrap();
        // The server process of a dropped connection may take a moment to notice.
        let what = format!("no open transaction after {polls} polls");
        eventually(&what, async || (db.number(open).await == 0).then_some(())).await;
    }
}

/// The client whose request commits those of all others hangs up: the others are answered all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_client_that_hangs_up_fails_no_other_request_of_its_group_commit() {
    let f = Fixture::new().await;
    let tasks: Vec<Value> = (0..200).map(|_| json!({"name": "n", "kind": "k", "timeout": 3600})).collect();
    let ids = f.api.create(&json!(tasks)).await;
    f.claim().await;
    let address = f.api.base().strip_prefix("http://").unwrap().to_owned();
    let body = "{\"status\": \"Success\"}";
    let hanging_up = ids[100..].iter().map(|id| {
        let (address, length) = (address.clone(), body.len());
        let request = format!("PATCH /task/{id} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{body}");
        async move {
            let mut stream = tokio::net::TcpStream::connect(&address).await.unwrap();
            tokio::io::AsyncWriteExt::write_all(&mut stream, request.as_bytes()).await.unwrap();
        }
    });
    let staying = ids[..100].iter().map(async |id| f.api.succeed(id).await);
    let (answers, _) = tokio::join!(join_all(staying), join_all(hanging_up));
    for answer in answers {
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
}
