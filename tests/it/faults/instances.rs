//! Three instances of the real binary on one database: killed, stopped, terminated, disconnected, and without their
//! database. Acknowledged work is never lost, and all of it comes to its end.

use std::collections::HashSet;

use futures_util::future::join_all;
use rustix::process::Signal;
use serde_json::json;
use uuid::Uuid;

use crate::support::database::admin;
use crate::support::load::{Fate, at, caller};
use crate::support::receiver::Received;
use crate::support::{Client, Database, Instance, Load, PATIENCE, Server, eventually};

/// Calls at once per instance, and as many again are claimed to follow them.
const CALLS: usize = 10;

/// A lease that does not end by itself: a test ends it.
const NEVER: &str = "3600";

/// The lease is the last of them.
const SETTINGS: [(&str, &str); 7] = [
    // These tests cause warnings on purpose.
    ("RUST_LOG", "error"),
    ("WORKER_LOOP_INTERVAL_MS", "200"),
    ("RETRY_LOOP_INTERVAL_MS", "200"),
    ("WEBHOOK_DELIVERY_INTERVAL_MS", "200"),
    ("WEBHOOK_CONCURRENCY", "10"),
    ("WEBHOOK_TIMEOUT_MS", "300000"),
    ("WORKER_CLAIM_TIMEOUT_SECS", NEVER),
];

/// Creates work where there is none left to be claimed.
async fn keep_busy(load: &Load, db: &Database) {
    if db.number("select count(*) from task where status = 'pending'").await == 0 {
        load.create(20).await;
    }
}

/// Three instances with this lease.
fn three(url: &str, lease: &str) -> Vec<Instance> {
    let mut settings = SETTINGS;
    settings[6].1 = lease;
    (0..3).map(|_| Instance::start(url, &settings)).collect()
}

/// The claims of an instance whose calls are not answered: the keys of the runs that it called for, and of those that it
/// would call for next.
struct Holding {
    /// Its id among the others.
    instance: Uuid,
    called: HashSet<String>,
    uncalled: HashSet<String>,
    tasks: Vec<Uuid>,
}

impl Holding {
    /// Creates work until it holds all it can.
    async fn of(load: &Load, db: &Database) -> Holding {
        let held = eventually("the instance to make all calls", async || {
            keep_busy(load, db).await;
            Some(load.held()).filter(|held| held.len() == CALLS)
        })
        .await;
        let called: HashSet<String> = held.iter().map(Received::key).collect();
        let task: Uuid = held[0].header("x-task-id").parse().unwrap();
        let instance = "select claimed_by from task where id = $1";
        let instance: Uuid = sqlx::query_scalar(instance).bind(task).fetch_one(&db.pool).await.unwrap();
        let claimed =
            "select id, id || ':start:success:' || run from task where claimed_by = $1 and status = 'claimed'";
        let claimed: Vec<(Uuid, String)> = eventually("the instance to claim all it can", async || {
            keep_busy(load, db).await;
            let claimed = sqlx::query_as(claimed).bind(instance).fetch_all(&db.pool).await.unwrap();
            // With less room than for half of its calls it claims no more, until it has made the next ones.
            Some(claimed).filter(|claimed| claimed.len() + CALLS / 2 > 2 * CALLS)
        })
        .await;
        let (tasks, keys): (Vec<Uuid>, HashSet<String>) = claimed.into_iter().unzip();
        Holding { instance, uncalled: &keys - &called, called, tasks }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn three_instances_start_every_run_exactly_once() {
    let db = Database::new().await;
    let instances = three(&db.url, NEVER);
    let load = Load::on(&instances).await;
    load.create(60).await;
    load.finish(&db).await;
    assert!(load.late().is_empty(), "{:?}", load.late());
    for (key, calls) in load.starts() {
        assert_eq!(calls.len(), 1, "{key} was called by {calls:?}");
    }
    for (key, told) in load.delivered(&db).await {
        assert_eq!(told, 1, "{key}");
    }
    assert_eq!(load.refused(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_killed_instance_loses_no_acknowledged_task() {
    let db = Database::new().await;
    let mut instances = three(&db.url, NEVER);
    let load = Load::on(&instances).await;
    load.hold(&instances[0]);
    let clients = load.clients(2);
    let holding = Holding::of(&load, &db).await;
    load.remove_instance(&instances[0]);
    instances.remove(0).kill();

    // Some of the workers that it called live on and report before its leases end: their runs have ended for good.
    let workers: Vec<_> = load.held().into_iter().filter(|call| call.path == "/work").collect();
    let (alive, dead) = workers.split_at(workers.len() / 2);
    assert!(!alive.is_empty());
    join_all(alive.iter().map(|call| load.work(call))).await;
    db.end_leases(Some(holding.instance)).await;

    clients.stop().await;
    load.finish(&db).await;
    assert!(load.late().is_empty(), "{:?}", load.late());
    let starts = load.starts();
    for (key, calls) in &starts {
        let reported = alive.iter().any(|call| call.key() == *key);
        let expected = if holding.called.contains(key) && !reported { 2 } else { 1 };
        assert_eq!(calls.len(), expected, "{key} was called by {calls:?}");
    }
    assert!(holding.uncalled.iter().all(|key| starts.contains_key(key)), "taken over");
    // Late workers may repeat the recorded outcome, and report nothing else.
    let api = &instances[0].api;
    for call in dead {
        assert_eq!(api.patch(&at(call), &json!({"status": "Success"})).await.status, 200);
        let answer = api.patch(&at(call), &json!({"status": "Failure", "failure_reason": "late"})).await;
        assert_eq!(answer.status, 409, "{}", answer.body);
    }
    db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_instance_stopped_past_its_leases_moves_no_lost_task() {
    let db = Database::new().await;
    let mut instances = three(&db.url, NEVER);
    let load = Load::on(&instances).await;
    let stopped = instances.remove(0);
    // No request is sent to it any more: it would not be answered until the instance continues.
    load.remove_instance(&stopped);
    load.hold(&stopped);
    let holding = Holding::of(&load, &db).await;
    stopped.signal(Signal::STOP);
    db.end_leases(Some(holding.instance)).await;

    // The others take over its claims, and their calls are not answered either.
    let (address, keys) = (stopped.api.base().to_owned(), &holding.called | &holding.uncalled);
    let (by, held) = (address.clone(), keys.clone());
    load.decide(move |call| if caller(call) == by || held.contains(&call.key()) { Fate::Wait } else { Fate::Work });
    let theirs = "select count(*) from task where id = any($1) and status = 'claimed' and claimed_by <> $2";
    let theirs = async || {
        let count = sqlx::query_scalar(theirs).bind(&holding.tasks).bind(holding.instance);
        usize::try_from(count.fetch_one(&db.pool).await.map(|count: i64| count).unwrap()).unwrap()
    };
    eventually("the others to take over the claims", async || (theirs().await == keys.len()).then_some(())).await;

    // Its own calls are answered now, some of them with an error, and it goes on.
    let mark = db.number("select max(seq) from event").await;
    let (by, held) = (address.clone(), keys.clone());
    load.decide(move |call| match (caller(call) == by, held.contains(&call.key())) {
        (true, true) => Fate::Answer(if call.path == "/work" { 200 } else { 500 }),
        (false, true) => Fate::Wait,
        _ => Fate::Work,
    });
    stopped.signal(Signal::CONT);
    let by_it = format!("from event where instance = '{}' and seq > {mark}", holding.instance);
    eventually("the stopped instance to work again", async || {
        keep_busy(&load, &db).await;
        (db.number(&format!("select count(*) {by_it} and to_status = 'running'")).await > 10).then_some(())
    })
    .await;
    // It ends after it has written all answers.
    assert!(stopped.terminate().success());
    assert_eq!(theirs().await, keys.len(), "its late answers have moved nothing");
    load.let_go();
    load.finish(&db).await;
    assert!(load.late().is_empty(), "{:?}", load.late());
    let late = sqlx::AssertSqlSafe(format!("select count(*) {by_it} and task_ids && $1"));
    let late: i64 = sqlx::query_scalar(late).bind(&holding.tasks).fetch_one(&db.pool).await.unwrap();
    assert_eq!(late, 0, "nor has it moved them later");
    for (key, calls) in load.starts() {
        let expected = if holding.called.contains(&key) { 2 } else { 1 };
        assert_eq!(calls.len(), expected, "{key} was called by {calls:?}");
        assert!(
            !holding.uncalled.contains(&key) || calls[0] != address,
            "{key} was called by the instance that had lost it"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_instance_stopped_inside_a_transaction_does_not_block_the_others() {
    let db = Database::new().await;
    let instances = three(&db.url, NEVER);
    let ids = instances[0].api.create(&json!([{"name": "n", "kind": "k"}])).await;
    instances[0].api.wait_for(&ids[0], "Running").await;
    let waiting =
        |what: &str| format!("select count(*) from pg_stat_activity where datname = current_database() and {what}");
    let mut holder = db.pool.begin().await.unwrap();
    sqlx::query("select from task for update").execute(&mut *holder).await.unwrap();
    let (api, id) = (instances[0].api.clone(), ids[0].clone());
    let report = tokio::spawn(async move { api.succeed(&id).await });
    let for_lock = waiting("wait_event_type = 'Lock'");
    eventually("the report to wait for the lock", async || (db.number(&for_lock).await == 1).then_some(())).await;
    instances[0].signal(Signal::STOP);
    // Now its transaction has locked the row, and only the server can end it.
    holder.rollback().await.unwrap();
    let open = waiting("state = 'idle in transaction'");
    eventually("the transaction to be open", async || (db.number(&open).await == 1).then_some(())).await;
    let others = join_all(instances[1..].iter().map(|instance| instance.api.succeed(&ids[0])));
    for answer in tokio::time::timeout(PATIENCE, others).await.expect("the others can report") {
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
    instances[0].signal(Signal::CONT);
    let answer = report.await.unwrap();
    assert!(answer.status == 200 || answer.is_not_now(), "{} {}", answer.status, answer.body);
    assert_eq!(instances[0].api.succeed(&ids[0]).await.status, 200);
    db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn repeatedly_terminated_connections_lose_no_work() {
    let db = Database::new().await;
    // A claim whose commit is not confirmed is started when its lease ends, which the test waits for. It cannot end leases
    // itself: those of confirmed claims must not end.
    let instances = three(&db.url, "20");
    let load = Load::on(&instances).await;
    let clients = load.clients(6);
    let name = db.url.rsplit('/').next().unwrap().split('?').next().unwrap();
    for _ in 0..8 {
        let before = load.ended();
        eventually("work to go on", async || (load.ended() > before + 30).then_some(())).await;
        admin(&format!("select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'")).await;
    }
    clients.stop().await;
    load.finish(&db).await;
    assert!(load.late().is_empty(), "{:?}", load.late());
    for (key, calls) in load.starts() {
        assert_eq!(calls.len(), 1, "{key} was called by {calls:?}: what was answered is written");
    }
    for instance in &instances {
        assert_eq!(instance.api.get("/ready").await.status, 200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_database_restart_loses_no_work() {
    let mut server = Server::new("restarted");
    let url = server.start().await;
    let instances = three(&url, NEVER);
    let db = Database::at(&url);
    let load = Load::on(&instances).await;
    let clients = load.clients(6);
    for immediately in [false, true] {
        let before = load.ended();
        eventually("work to go on", async || (load.ended() > before + 60).then_some(())).await;
        if immediately {
            server.stop_immediately().await;
        } else {
            server.stop_fast().await;
        }
        let refused = load.refused();
        join_all(instances.iter().map(async |instance| {
            let api = Client::new(instance.api.base());
            assert_eq!(api.get("/health").await.status, 200);
            let ready = api.get("/ready").await;
            assert!(ready.is_not_now(), "{} {}", ready.status, ready.body);
            let id = Uuid::now_v7();
            for path in ["/task", "/batches", &format!("/task/{id}")] {
                let answer = api.get(path).await;
                assert!(answer.is_not_now(), "{} {}", answer.status, answer.body);
            }
            let answer = api.post("/task", &json!([{"name": "n", "kind": "k"}])).await;
            assert!(answer.is_not_now(), "{} {}", answer.status, answer.body);
            let answer = api.put(&format!("/task/{id}"), &json!({})).await;
            assert!(answer.is_not_now(), "{} {}", answer.status, answer.body);
            assert_eq!(api.get("/metrics").await.status, 200);
        }))
        .await;
        eventually("clients and workers to get a 503", async || (load.refused() > refused).then_some(())).await;
        assert_eq!(server.start().await, url);
        // A claim whose commit was not confirmed is started when its lease ends.
        db.end_leases(None).await;
    }
    let before = load.ended();
    eventually("work to go on", async || (load.ended() > before + 60).then_some(())).await;
    clients.stop().await;
    load.finish(&db).await;
    for instance in instances {
        assert_eq!(instance.api.get("/ready").await.status, 200);
        assert!(instance.terminate().success());
    }
    db.pool.close().await;
    server.stop_fast().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_terminated_instance_hands_its_uncalled_claims_to_the_others() {
    let db = Database::new().await;
    // No lease ends in this test: a claim that is not given back stays claimed.
    let mut instances = three(&db.url, NEVER);
    let load = Load::on(&instances).await;
    load.hold(&instances[0]);
    let holding = Holding::of(&load, &db).await;
    let leaving = instances.remove(0);
    leaving.signal(Signal::TERM);
    eventually("the terminated instance not to be ready", async || {
        (leaving.api.get("/ready").await.status == 503).then_some(())
    })
    .await;
    // The others start the claims without a call, while its own calls are still open.
    eventually("the claims that were given back to be started", async || {
        let starts = load.starts();
        holding.uncalled.iter().all(|key| starts.contains_key(key)).then_some(())
    })
    .await;
    let given_back = "select sum(cardinality(task_ids)) from event where cause = 'given_back' and instance = $1";
    let given_back: i64 = sqlx::query_scalar(given_back).bind(holding.instance).fetch_one(&db.pool).await.unwrap();
    assert_eq!(usize::try_from(given_back).unwrap(), holding.uncalled.len());
    assert_eq!(load.held().len(), CALLS, "it has made no further call");
    load.let_go();
    load.remove_instance(&leaving);
    assert!(leaving.ended().await.success(), "exit code 0");
    load.finish(&db).await;
    assert!(load.late().is_empty(), "{:?}", load.late());
    load.delivered(&db).await;
    for (key, calls) in load.starts() {
        assert_eq!(calls.len(), 1, "{key} was called by {calls:?}");
    }
    let recorded = "select task_id || ':start:success:' || run from attempt where instance = $1";
    let recorded: Vec<String> = sqlx::query_scalar(recorded).bind(holding.instance).fetch_all(&db.pool).await.unwrap();
    assert!(holding.called.iter().all(|key| recorded.contains(key)), "the answers to its calls were written");
}
