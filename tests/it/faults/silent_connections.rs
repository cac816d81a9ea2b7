//! Connections to the database that fall silent without being closed: its server lost power, or a firewall forgot them.
//! No request waits for them forever, least of all one behind another request in a lane.
//!
//! The statements at which a connection falls silent carry their names as SQL comments.

use std::time::Duration;

use futures_util::future::join_all;
use reprise::clock::Clock;
use reprise::domain::retry::RetryLimits;
use reprise::store::{Store, policies};
use serde_json::{Value, json};

use crate::support::{Client, Database, Instance, Proxy, Receiver, eventually};

struct Silence {
    db: Database,
    proxy: Proxy,
    instance: Instance,
    receiver: Receiver,
}

impl Silence {
    /// The lease is as long as a transaction may hang, so it has to be renewed meanwhile.
    async fn new() -> Silence {
        let db = Database::new().await;
        let proxy = Proxy::start(&db).await;
        let instance =
            Instance::start(&proxy.url, &[("DATABASE_TIMEOUT_SECS", "15"), ("WORKER_CLAIM_TIMEOUT_SECS", "15")]);
        Silence { db, proxy, instance, receiver: Receiver::start().await }
    }

    async fn count(&self, status: &str) -> i64 {
        self.db.number(&format!("select count(*) from task where status = '{status}'")).await
    }

    async fn running(&self, count: u32) -> Vec<String> {
        let tasks: Vec<Value> = (0..count).map(|_| json!({"name": "n", "kind": "k", "timeout": 3600})).collect();
        let ids = self.instance.api.create(&json!(tasks)).await;
        eventually("the tasks to run", async || (self.count("running").await == i64::from(count)).then_some(())).await;
        ids
    }

    /// One request meets the silence, and another one follows it. Both are answered, and the next one succeeds.
    async fn two_requests(&self, trap: &'static str, send: impl AsyncFn(&Client) -> u16) {
        self.proxy.trap(trap);
        let (first, second) = tokio::join!(send(&self.instance.api), async {
            self.proxy.trapped().await;
            send(&self.instance.api).await
        });
        assert_eq!(first, 503);
        assert!([200, 201, 202, 503].contains(&second), "{second}");
        let next = send(&self.instance.api).await;
        assert!([200, 201, 202].contains(&next), "{next}");
        self.db.assert_counters_match().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn heartbeats_survive_a_silent_connection() {
    let silence = Silence::new().await;
    let ids = silence.running(2).await;
    let path = format!("/task/{}", ids[0]);
    silence.two_requests("/* heartbeats */", async |api| api.put(&path, &json!({})).await.status.as_u16()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn patches_survive_a_silent_connection() {
    let silence = Silence::new().await;
    let ids = silence.running(2).await;
    let path = format!("/task/{}", ids[0]);
    let change = async |api: &Client| api.patch(&path, &json!({"new_success": 1})).await.status.as_u16();
    silence.two_requests("/* lock task details */", change).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn creation_survives_a_silent_connection() {
    for trap in ["/* create tasks */", "/* read policies */"] {
        let silence = Silence::new().await;
        let create = async |api: &Client| {
            api.post("/task", &json!([{"name": "n", "kind": "k", "run_at": "2999-01-01T00:00:00Z"}]))
                .await
                .status
                .as_u16()
        };
        silence.two_requests(trap, create).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn reads_survive_a_silent_connection() {
    let silence = Silence::new().await;
    let ids = silence.running(1).await;
    let path = format!("/task/{}", ids[0]);
    silence.two_requests("/* read task details */", async |api| api.get(&path).await.status.as_u16()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn on_start_answers_and_deliveries_are_written_despite_silent_connections() {
    let silence = Silence::new().await;
    silence.proxy.trap("/* start tasks */");
    let task = json!([{"name": "n", "kind": "k", "on_start": silence.receiver.action("/start"),
        "on_success": [silence.receiver.action("/done")]}]);
    let mut ids = silence.instance.api.create(&task).await;
    silence.proxy.trapped().await;
    for _ in 0..4 {
        ids.extend(silence.instance.api.create(&task).await);
    }
    eventually("the tasks to run", async || (silence.count("running").await == 5).then_some(())).await;
    assert_eq!(silence.receiver.at("/start").len(), 5, "each called once");

    // So are the results of deliveries.
    silence.proxy.trap("/* mark deliveries */");
    for id in &ids {
        assert_eq!(silence.instance.api.succeed(id).await.status, 200);
    }
    silence.proxy.trapped().await;
    let sent = "select count(*) from outbox where status = 'success'";
    eventually("the deliveries to be marked", async || (silence.db.number(sent).await == 5).then_some(())).await;
    silence.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_service_recovers_when_all_connections_fall_silent() {
    let silence = Silence::new().await;
    let ids = silence.running(3).await;
    let api = &silence.instance.api;
    // Opens connections, which then fall silent.
    let paths: Vec<String> = ids.iter().map(|id| format!("/task/{id}")).collect();
    let nothing = json!({});
    join_all(paths.iter().flat_map(|path| [api.put(path, &nothing), api.put(path, &nothing)])).await;
    let listening = "select coalesce(max(pid), 0)::bigint from pg_stat_activity where datname = current_database() and \
                     query ilike 'listen%'";
    let listener = silence.db.number(listening).await;
    silence.proxy.forget_all();
    let task = json!([{"name": "n", "kind": "k", "on_start": silence.receiver.action("/late")}]);
    eventually("a heartbeat", async || (api.put(&paths[0], &nothing).await.status == 202).then_some(())).await;
    eventually("a report", async || (api.succeed(&ids[1]).await.status == 200).then_some(())).await;
    eventually("a new task", async || (api.post("/task", &task).await.status == 201).then_some(())).await;
    eventually("the on_start call", async || (!silence.receiver.at("/late").is_empty()).then_some(())).await;
    eventually("the instance to listen again", async || {
        let pid = silence.db.number(listening).await;
        (pid != 0 && pid != listener).then_some(())
    })
    .await;
    let moving = "select count(*) from task where status in ('pending', 'claimed')";
    eventually("the new task to run", async || (silence.db.number(moving).await == 0).then_some(())).await;
    silence.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_request_that_times_out_on_a_lock_leaves_no_waiting_statement() {
    let silence = Silence::new().await;
    let ids = silence.running(1).await;
    let mut holder = silence.db.pool.begin().await.unwrap();
    sqlx::query("select from task for update").execute(&mut *holder).await.unwrap();
    let (api, path) = (&silence.instance.api, format!("/task/{}", ids[0]));
    let (sign, report) = (json!({"new_success": 1}), json!({"status": "Success"}));
    let (sign, report) = tokio::join!(api.put(&path, &sign), api.patch(&path, &report));
    assert_eq!((sign.status.as_u16(), report.status.as_u16()), (503, 503));
    let waiting =
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    // One waits behind the other: for the lock of the row, and then for its holder.
    eventually("the statements to give up", async || (silence.db.number(waiting).await == 0).then_some(())).await;
    holder.rollback().await.unwrap();
    assert_eq!(api.succeed(&ids[0]).await.status, 200);
    assert_eq!(api.task(&ids[0]).await["success"], 0, "a heartbeat that was not acknowledged takes no effect later");
    silence.db.assert_counters_match().await;
}

/// The clock is paused, so the time is that of the test: waiting one after the other would take 100 seconds of it.
#[tokio::test]
async fn without_a_database_all_readers_of_policies_fail_at_once() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let store = Store::new(&format!("postgres://u@{free}/d"), 4, Clock::Database, RetryLimits::default()).unwrap();
    tokio::time::pause();
    let started = tokio::time::Instant::now();
    for answer in join_all((0..20).map(|_| policies::by_kind(&store))).await {
        let error = answer.unwrap_err();
        assert!(error.is_unavailable());
        assert_eq!(error.to_string().matches("not available").count(), 1, "{error}: the reason is given once");
    }
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
}
