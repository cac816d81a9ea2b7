//! Concurrent reports, slow receivers, early reports, kills and disconnects, all with the real binary.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::support::{Client, Database, Instance, Receiver, Reply, eventually, text};

fn metric(page: &Value, name: &str) -> u64 {
    let line = page.as_str().unwrap().lines().find(|line| line.starts_with(name));
    line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

async fn count(db: &Database, status: &str) -> i64 {
    db.number(&format!("select count(*) from task where status = '{status}'")).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn children_of_forty_parents_that_end_at_once_are_released_once() {
    let db = Database::new().await;
    let instances = [Instance::start(&db.url, &[]), Instance::start(&db.url, &[])];
    let mut tasks: Vec<Value> = (0..40).map(|i| json!({"id": i.to_string(), "name": "parent", "kind": "k"})).collect();
    let needs: Vec<Value> = (0..40).map(|i| json!({"id": i.to_string()})).collect();
    tasks.extend((0..200).map(|_| json!({"name": "child", "kind": "k", "dependencies": needs})));
    let ids = instances[0].api.create(&json!(tasks)).await;
    eventually("the parents to run", async || (count(&db, "running").await == 40).then_some(())).await;
    let answers = join_all(ids[..40].iter().enumerate().map(|(i, id)| {
        // Each report has its own client and so its own connection.
        let api = Client::new(instances[i % 2].api.base());
        let id = id.clone();
        async move { tokio::spawn(async move { api.succeed(&id).await }).await.unwrap() }
    }))
    .await;
    for answer in answers {
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
    eventually("the children to run", async || (count(&db, "running").await == 200).then_some(())).await;
    let mut released = 0;
    for instance in &instances {
        let page = instance.api.get("/metrics").await.body;
        released += metric(&page, "reprise_transitions_total{from=\"waiting\",to=\"pending\"}");
    }
    assert_eq!(released, 200, "each exactly once");
    db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn six_hundred_slow_on_start_calls_are_each_made_once() {
    let db = Database::new().await;
    let instance = Instance::start(&db.url, &[("WEBHOOK_TIMEOUT_MS", "300000")]);
    let receiver = Receiver::start().await;
    let refused = Arc::new(AtomicUsize::new(0));
    let (api, counter) = (instance.api.clone(), Arc::clone(&refused));
    receiver.answer_with(move |received| {
        let (api, counter) = (api.clone(), Arc::clone(&counter));
        // Its report is taken while the call is open.
        async move {
            let handle = received.handle.unwrap();
            let path = handle.strip_prefix(api.base()).unwrap();
            if api.patch(path, &json!({"status": "Success"})).await.status != 200 {
                counter.fetch_add(1, Ordering::SeqCst);
            }
            Reply::ok()
        }
    });
    let slow = Receiver::start().await;
    let calls = watch::Sender::new(0);
    slow.answer_with(move |_| {
        calls.send_modify(|calls| *calls += 1);
        let (nth, mut calls) = (*calls.borrow(), calls.subscribe());
        async move {
            // Open until many more calls have come.
            calls.wait_for(|calls| *calls >= (nth + 50).min(300)).await.unwrap();
            Reply::ok()
        }
    });
    // Half of them report while their call is open, half only run.
    let tasks: Vec<Value> = (0..600)
        .map(|i| {
            let on_start = if i % 2 == 0 { receiver.action("/start") } else { slow.action("/start") };
            json!({"name": "n", "kind": "k", "on_start": on_start})
        })
        .collect();
    let ids = instance.api.create(&json!(tasks)).await;
    eventually("the tasks to be started", async || {
        (count(&db, "running").await == 300 && count(&db, "success").await == 300).then_some(())
    })
    .await;
    for id in ids.iter().skip(1).step_by(2) {
        let answer = instance.api.patch(&format!("/task/{id}?run=0"), &json!({"status": "Success"})).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
    assert_eq!(refused.load(Ordering::SeqCst), 0, "every report for the live run is taken");
    let keys: Vec<String> = receiver.keys().into_iter().chain(slow.keys()).collect();
    assert_eq!(keys.len(), 600, "each called exactly once");
    assert_eq!(keys.iter().collect::<HashSet<_>>().len(), 600);
    let page = instance.api.get("/metrics").await.body;
    assert_eq!(metric(&page, "reprise_transitions_total{from=\"claimed\",to=\"pending\"}"), 0, "none was requeued");
    db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn reports_before_the_on_start_answer_end_their_tasks() {
    let db = Database::new().await;
    let instance = Instance::start(&db.url, &[("WORKER_CLAIM_TIMEOUT_SECS", "300"), ("POOL_MAX_SIZE", "6")]);
    let receiver = Receiver::start().await;
    let api = instance.api.clone();
    receiver.answer_with(move |received| {
        let api = api.clone();
        async move {
            let handle = received.handle.unwrap();
            let answer = api.patch(handle.strip_prefix(api.base()).unwrap(), &json!({"status": "Success"})).await;
            Reply::status(answer.status.as_u16())
        }
    });
    let tasks: Vec<Value> = (0..300)
        .map(|_| json!({"name": "n", "kind": "k", "timeout": 300, "on_start": receiver.action("/start")}))
        .collect();
    instance.api.create(&json!(tasks)).await;
    eventually("the tasks to succeed", async || {
        assert_eq!(instance.api.get("/ready").await.status, 200);
        (count(&db, "success").await == 300).then_some(())
    })
    .await;
    assert_eq!(receiver.keys().len(), 300);
    let page = instance.api.get("/metrics").await.body;
    assert_eq!(metric(&page, "reprise_task_timeouts_total"), 0);
    let waits = "select count(*) from task where timeout_at is not null or next_retry_at is not null";
    assert_eq!(db.number(waits).await, 0, "no lease and no timeout is left to run out");
    db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn acknowledged_requests_survive_a_kill() {
    let db = Database::new().await;
    let first = Instance::start(&db.url, &[]);
    let tasks: Vec<Value> = (0..60).map(|_| json!({"name": "n", "kind": "k", "timeout": 3600})).collect();
    let ids = first.api.create(&json!(tasks)).await;
    eventually("the tasks to run", async || (count(&db, "running").await == 60).then_some(())).await;
    let (counting, ending) = (&ids[..10], &ids[10..]);

    // Clients send requests until the service is gone, and remember what was acknowledged.
    let hammer = |i: usize| {
        let (api, id) = (Client::new(first.api.base()), counting[i].clone());
        tokio::spawn(async move {
            let (mut added, mut created) = (0i64, Vec::new());
            loop {
                let put =
                    api.send(reqwest::Method::PUT, &format!("/task/{id}"), Some("{\"new_success\": 1}".into())).await;
                match put {
                    Ok(answer) if answer.status == 202 => added += 1,
                    Ok(answer) => panic!("{}", answer.body),
                    Err(_) => break,
                }
                let body = json!([{"name": "late", "kind": "late"}]).to_string();
                match api.send(reqwest::Method::POST, "/task", Some(body)).await {
                    Ok(answer) => created.push(text(&answer.body[0]["id"])),
                    Err(_) => break,
                }
            }
            (id, added, created)
        })
    };
    let hammers: Vec<_> = (0..10).map(hammer).collect();
    let (api, list) = (Client::new(first.api.base()), ending.to_vec());
    let reporter = tokio::spawn(async move {
        let mut reported = Vec::new();
        for id in list {
            match api
                .send(reqwest::Method::PATCH, &format!("/task/{id}"), Some("{\"status\": \"Success\"}".into()))
                .await
            {
                Ok(answer) if answer.status == 200 => reported.push(id),
                Ok(answer) => panic!("{}", answer.body),
                Err(_) => break,
            }
        }
        reported
    });
    eventually("some work to be done", async || {
        (db.number("select coalesce(sum(success), 0)::bigint from task").await > 100
            && count(&db, "success").await > 20)
            .then_some(())
    })
    .await;
    first.kill();

    let second = Instance::start(&db.url, &[]);
    for hammer in hammers {
        let (id, added, created) = hammer.await.unwrap();
        let stored = second.api.task(&id).await["success"].as_i64().unwrap();
        assert!(stored == added || stored == added + 1, "{added} acknowledged, {stored} stored");
        for id in created {
            assert_eq!(second.api.get(&format!("/task/{id}")).await.status, 200);
        }
    }
    for id in reporter.await.unwrap() {
        assert_eq!(second.api.status(&id).await, "Success");
    }
    db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn another_instance_takes_over_the_claims_of_a_killed_one() {
    let db = Database::new().await;
    let receiver = Receiver::start().await;
    receiver.answer(Reply::slow(Duration::from_secs(3600)));
    let settings = [("WORKER_CLAIM_TIMEOUT_SECS", "3600"), ("WORKER_LOOP_INTERVAL_MS", "50")];
    let first = Instance::start(&db.url, &settings);
    let tasks: Vec<Value> =
        (0..20).map(|_| json!({"name": "n", "kind": "k", "on_start": receiver.action("/start")})).collect();
    let ids = first.api.create(&json!(tasks)).await;
    eventually("the on_start calls", async || (receiver.keys().len() == 20).then_some(())).await;
    first.kill();
    assert_eq!(count(&db, "claimed").await, 20);
    receiver.answer(Reply::ok());
    db.end_leases(None).await;
    let second = Instance::start(&db.url, &settings);
    for id in &ids {
        let task = second.api.wait_for(id, "Running").await;
        assert_eq!((&task["run"], &task["attempt"]), (&json!(0), &json!(0)));
    }
    let keys = receiver.keys();
    assert_eq!(keys.len(), 40);
    assert_eq!(
        keys[..20].iter().collect::<HashSet<_>>(),
        keys[20..].iter().collect::<HashSet<_>>(),
        "the same keys again"
    );
    db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn clients_that_hang_up_leave_no_partial_change() {
    let db = Database::new().await;
    let instance = Instance::start(&db.url, &[("POOL_MAX_SIZE", "6")]);
    let mut tasks = vec![json!({"id": "p", "name": "p", "kind": "k"})];
    tasks.extend((0..300).map(|_| json!({"name": "n", "kind": "k"})));
    tasks.extend(
        (0..300).map(|i| json!({"id": format!("c{i}"), "name": "c", "kind": "k", "dependencies": [{"id": "p"}]})),
    );
    let ids = instance.api.create(&json!(tasks)).await;
    eventually("the tasks to run", async || (count(&db, "running").await == 301).then_some(())).await;
    let address = instance.api.base().strip_prefix("http://").unwrap().to_owned();
    let body = "{\"status\": \"Success\"}";
    let hang_up = |i: usize| {
        let (address, id) = (address.clone(), ids[i].clone());
        tokio::spawn(async move {
            let mut stream = TcpStream::connect(&address).await.unwrap();
            let length = body.len();
            let head = format!("PATCH /task/{id} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n");
            // Some hang up within the head, some within the body, some as soon as all is sent.
            let whole = format!("{head}{body}");
            let end = match i % 4 {
                0 => head.len() / 2,
                1 => head.len() + 5,
                _ => whole.len(),
            };
            stream.write_all(&whole.as_bytes()[..end]).await.unwrap();
            stream.flush().await.unwrap();
            for _ in 0..i % 7 {
                tokio::task::yield_now().await;
            }
        })
    };
    for result in join_all((0..301).map(hang_up)).await {
        result.unwrap();
    }
    assert_eq!(instance.api.get("/ready").await.status, 200);
    eventually("no transaction to be open", async || {
        let open = "select count(*) from pg_stat_activity where datname = current_database() and state like 'idle in transaction%'";
        (db.number(open).await == 0).then_some(())
    })
    .await;
    // A report took effect as a whole, or not at all and can be repeated.
    for id in &ids[..301] {
        assert_eq!(instance.api.succeed(id).await.status, 200);
    }
    eventually("the children to run", async || (count(&db, "running").await == 300).then_some(())).await;
    db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_terminated_instance_gives_back_its_unstarted_claims() {
    let db = Database::new().await;
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
    let instance = Instance::start(&db.url, &[("WEBHOOK_CONCURRENCY", "10")]);
    let tasks: Vec<Value> =
        (0..100).map(|_| json!({"name": "n", "kind": "k", "on_start": receiver.action("/start")})).collect();
    instance.api.create(&json!(tasks)).await;
    eventually("some calls", async || (receiver.keys().len() >= 10).then_some(())).await;
    // Its calls are open when it is told to end, and are answered afterwards.
    instance.signal(Signal::TERM);
    let api = instance.api.clone();
    eventually("the instance not to be ready", async || (api.get("/ready").await.status == 503).then_some(())).await;
    answers.send_replace(true);
    assert!(instance.ended().await.success(), "exit code 0");
    assert_eq!(count(&db, "claimed").await, 0, "unstarted claims were given back, answers were written");
    let keys = receiver.keys();
    assert_eq!(count(&db, "running").await, i64::try_from(keys.len()).unwrap());
    assert_eq!(count(&db, "pending").await, i64::try_from(100 - keys.len()).unwrap());
    db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn stopping_a_batch_continues_after_its_client_hangs_up() {
    let db = Database::new().await;
    let instance = Instance::start(&db.url, &[("WORKER_LOOP_INTERVAL_MS", "3600000"), ("WEBHOOK_CONCURRENCY", "1")]);
    let tasks: Vec<Value> =
        (0..9000).map(|_| json!({"name": "n", "kind": "k", "run_at": "2099-01-01T00:00:00Z"})).collect();
    let answer = instance.api.post("/task", &json!(tasks)).await;
    let batch = answer.headers["x-batch-id"].to_str().unwrap();
    let mut stream = TcpStream::connect(instance.api.base().strip_prefix("http://").unwrap()).await.unwrap();
    stream.write_all(format!("DELETE /batch/{batch} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).await.unwrap();
    eventually("the first canceled task", async || (count(&db, "canceled").await > 0).then_some(())).await;
    drop(stream);
    eventually("all tasks to be canceled", async || (count(&db, "canceled").await == 9000).then_some(())).await;
    db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn clients_that_give_up_waiting_do_not_exhaust_the_connections() {
    let db = Database::new().await;
    let instance = Instance::start(&db.url, &[("POOL_MAX_SIZE", "8")]);
    let ids = instance.api.create(&json!([{"name": "n", "kind": "k"}])).await;
    instance.api.wait_for(&ids[0], "Running").await;
    let mut holder = db.pool.begin().await.unwrap();
    sqlx::query("select from task for update").execute(&mut *holder).await.unwrap();
    let address = instance.api.base().strip_prefix("http://").unwrap().to_owned();
    let mut streams = Vec::new();
    for _ in 0..20 {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        let request = format!("PATCH /task/{} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{{}}", ids[0]);
        stream.write_all(request.as_bytes()).await.unwrap();
        streams.push(stream);
    }
    let waiting =
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    eventually("a statement to wait for a lock", async || (db.number(waiting).await >= 1).then_some(())).await;
    drop(streams);
    // Their connections are not available to other requests, which are answered with 503.
    let (api, path) = (instance.api.clone(), format!("/task/{}", ids[0]));
    let others: Vec<_> = (0..20)
        .map(|_| {
            let (api, path) = (api.clone(), path.clone());
            tokio::spawn(async move { api.patch(&path, &json!({})).await })
        })
        .collect();
    let all =
        "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'reprise'";
    eventually("the requests to be answered", async || {
        assert!(db.number(all).await <= 8, "no more connections than POOL_MAX_SIZE");
        others.iter().all(tokio::task::JoinHandle::is_finished).then_some(())
    })
    .await;
    for answer in join_all(others).await {
        let answer = answer.unwrap();
        assert!(answer.is_not_now(), "{} {}", answer.status, answer.body);
    }
    holder.rollback().await.unwrap();
    eventually("no statement to wait for a lock", async || (db.number(waiting).await == 0).then_some(())).await;
    assert_eq!(instance.api.succeed(&ids[0]).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_statement_canceled_by_the_server_is_answered_with_503() {
    let db = Database::new().await;
    let instance = Instance::start(&db.url, &[]);
    let ids = instance.api.create(&json!([{"name": "n", "kind": "k"}])).await;
    instance.api.wait_for(&ids[0], "Running").await;
    let mut holder = db.pool.begin().await.unwrap();
    sqlx::query("select from task for update").execute(&mut *holder).await.unwrap();
    let (api, id) = (instance.api.clone(), ids[0].clone());
    let report = tokio::spawn(async move { api.succeed(&id).await });
    let cancel = "select count(pg_cancel_backend(pid)) from pg_stat_activity \
                  where datname = current_database() and wait_event_type = 'Lock'";
    eventually("the report to be answered", async || {
        db.number(cancel).await;
        report.is_finished().then_some(())
    })
    .await;
    let answer = report.await.unwrap();
    assert!(answer.is_not_now(), "{} {}", answer.status, answer.body);
    holder.rollback().await.unwrap();
    assert_eq!(instance.api.succeed(&ids[0]).await.status, 200);
    db.assert_counters_match().await;
}
