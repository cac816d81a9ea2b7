//! An instance that repeatedly loses its database: connections fall silent, stall, are cut or lose answers. The instance
//! reports that it is not ready meanwhile, and works again soon after.

use std::collections::HashMap;

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{Answer, Client, Database, Fault, Instance, PATIENCE, Proxy, Receiver, eventually, text};

/// Loops that tick at least once a second.
const LOOPS: [&str; 4] = ["start", "timeout", "retry", "delivery"];

struct Outages {
    db: Database,
    proxy: Proxy,
    instance: Instance,
    receiver: Receiver,
}

/// A request that has to work after an outage.
struct Request {
    method: Method,
    path: String,
    body: Value,
    expected: u16,
}

impl Request {
    fn new(method: Method, path: impl Into<String>, body: Value, expected: u16) -> Request {
        Request { method, path: path.into(), body, expected }
    }

    async fn send(&self, api: &Client) -> Answer {
        let body = Some(&self.body).filter(|body| !body.is_null());
        api.call(self.method.clone(), &self.path, body).await
    }
}

impl Outages {
    async fn new() -> Outages {
        let db = Database::new().await;
        let proxy = Proxy::start(&db).await;
        // The default size of the pool.
        let settings = [("RUST_LOG", "error"), ("POOL_MAX_SIZE", "16"), ("DATABASE_TIMEOUT_SECS", "5")];
        let instance = Instance::start(&proxy.url, &settings);
        Outages { db, proxy, instance, receiver: Receiver::start().await }
    }

    /// A batch with one task that runs.
    async fn running(&self, task: Value) -> (String, String) {
        let created = self.instance.api.post("/task", &json!([task])).await;
        assert_eq!(created.status, 201, "{}", created.body);
        let id = text(&created.body[0]["id"]);
        self.instance.api.wait_for(&id, "Running").await;
        (created.headers["x-batch-id"].to_str().unwrap().to_owned(), id)
    }

    /// Everything that a request can do, with tasks of its own.
    async fn requests(&self, round: usize) -> Vec<Request> {
        let plain = || json!({"name": "n", "kind": "k", "timeout": 3600});
        let (_, reported) = self
            .running(json!({"name": "n", "kind": "k", "timeout": 3600,
                            "on_success": [self.receiver.action(&format!("/done/{round}"))]}))
            .await;
        let (_, alive) = self.running(plain()).await;
        let (ruled, _) = self.running(plain()).await;
        let (stopped, _) = self.running(plain()).await;
        let (failed, broken) = self.running(plain()).await;
        assert_eq!(self.instance.api.fail(&broken).await.status, 200);
        let new = json!([{"name": "n", "kind": "k", "fair_key": format!("key {round}"), "timeout": 3600}]);
        let policy = json!({"max_retries": 2});
        vec![
            Request::new(Method::PATCH, format!("/task/{reported}"), json!({"status": "Success"}), 200),
            Request::new(Method::PUT, format!("/task/{alive}"), json!({"new_success": 1}), 202),
            Request::new(Method::PATCH, format!("/task/{alive}"), json!({"new_failures": 1}), 200),
            Request::new(Method::POST, "/task", new, 201),
            Request::new(Method::PATCH, format!("/batch/{ruled}/rules"), json!({"kind": "k", "rules": []}), 200),
            Request::new(Method::POST, format!("/batch/{failed}/retry"), json!({}), 200),
            Request::new(Method::DELETE, format!("/batch/{stopped}"), Value::Null, 200),
            Request::new(Method::PUT, format!("/retry-policy/kind{round}"), policy, 200),
            // Refused: the task is running.
            Request::new(Method::POST, format!("/task/{alive}/retry"), json!({}), 409),
            Request::new(Method::GET, "/task", Value::Null, 200),
            Request::new(Method::GET, format!("/batch/{ruled}"), Value::Null, 200),
            Request::new(Method::GET, "/webhook-deliveries", Value::Null, 200),
            Request::new(Method::GET, "/ready", Value::Null, 200),
        ]
    }

    /// All requests, the start of a new task and a notification, after the proxy was healed.
    async fn assert_works(&self, round: usize, requests: &[Request]) {
        let api = &self.instance.api;
        let begin = format!("/start/{round}");
        let new = json!([{"name": "new", "kind": "k", "timeout": 3600, "on_start": self.receiver.action(&begin)}]);
        let new = Request::new(Method::POST, "/task", new, 201);
        let start = async {
            let id = text(&insist(api, &new).await.body[0]["id"]);
            api.wait_for(&id, "Running").await;
            assert!(!self.receiver.at(&begin).is_empty());
        };
        let notification = async {
            let done = format!("/done/{round}");
            eventually("a notification", async || (!self.receiver.at(&done).is_empty()).then_some(())).await;
        };
        tokio::join!(join_all(requests.iter().map(|request| insist(api, request))), start, notification);
        self.db.assert_counters_match().await;
    }

    /// Waits until the instance listens for wake-ups on a connection that was opened after `moment`.
    async fn listens_since(&self, moment: i64) {
        let listens = format!(
            "select count(*) from pg_stat_activity where datname = current_database() and query ilike 'listen%' \
             and extract(epoch from backend_start) * 1000 >= {moment}"
        );
        eventually("the instance to listen", async || (self.db.number(&listens).await > 0).then_some(())).await;
    }

    /// Milliseconds, by the database's clock.
    async fn now(&self) -> i64 {
        self.db.number("select (extract(epoch from clock_timestamp()) * 1000)::bigint").await
    }

    /// The number of failed ticks of each loop.
    async fn failures(&self) -> HashMap<&'static str, u64> {
        let page = text(&self.instance.api.get("/metrics").await.body);
        let of = |name: &&'static str| {
            let line = format!("reprise_loop_ticks_total{{loop=\"{name}\",outcome=\"error\"}} ");
            let count = page.lines().find_map(|said| said.strip_prefix(&line));
            (*name, count.map_or(0, |count| count.parse().unwrap()))
        };
        LOOPS.iter().map(of).collect()
    }

    /// Waits until the outage has outlasted two ticks of each loop, and with them every limit of a transaction.
    async fn fails_ticks_since(&self, before: &HashMap<&'static str, u64>) {
        eventually("all loops to fail", async || {
            let now = self.failures().await;
            LOOPS.iter().all(|name| now[name] >= before[name] + 2).then_some(())
        })
        .await;
    }

    async fn assert_not_ready(&self) {
        let ready = || async { self.instance.api.get("/ready").await };
        eventually("the instance not to be ready", async || (ready().await.status == 503).then_some(())).await;
        assert!(ready().await.is_not_now());
    }
}

/// Repeats a request that is answered with 503.
async fn insist(api: &Client, request: &Request) -> Answer {
    let what = format!("{} {}", request.method, request.path);
    let answer = eventually(&what, async || {
        let answer = tokio::time::timeout(PATIENCE, request.send(api)).await;
        let answer = answer.unwrap_or_else(|_| panic!("{what}: no answer"));
        (!answer.is_not_now()).then_some(answer)
    })
    .await;
    assert_eq!(answer.status, request.expected, "{what}: {}", answer.body);
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_idle_instance_recovers_from_repeated_network_silence() {
    let outages = Outages::new().await;
    for round in 0..4 {
        let requests = outages.requests(round).await;
        let (failures, moment) = (outages.failures().await, outages.now().await);
        outages.proxy.break_network(Fault::Forget);
        outages.assert_not_ready().await;
        outages.fails_ticks_since(&failures).await;
        outages.assert_not_ready().await;
        outages.proxy.heal();
        outages.assert_works(round, &requests).await;
        outages.listens_since(moment).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_idle_instance_replaces_silent_connections() {
    let outages = Outages::new().await;
    for round in 0..6 {
        let requests = outages.requests(round).await;
        let moment = outages.now().await;
        outages.proxy.forget_all();
        outages.assert_works(round, &requests).await;
        outages.listens_since(moment).await;
        let silent = outages.proxy.open();
        assert!(silent < 64, "{silent} connections are open: silent ones are not closed");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn requests_are_answered_when_any_of_their_statements_meets_silence() {
    let outages = Outages::new().await;
    for round in 0..5 {
        let requests = outages.requests(round).await;
        // Connections for all of them.
        join_all((0..32).map(|_| outages.instance.api.get("/task"))).await;
        outages.proxy.break_each_after(Fault::Forget, round);
        let answers = requests.iter().map(|request| async {
            let answer = tokio::time::timeout(PATIENCE, request.send(&outages.instance.api)).await;
            let what = format!("silent after {round} statements: {} {}", request.method, request.path);
            let answer = answer.unwrap_or_else(|_| panic!("{what}: no answer"));
            let fine = answer.status == request.expected || answer.is_not_now();
            assert!(fine, "{what}: {} {}", answer.status, answer.body);
        });
        join_all(answers).await;
        outages.proxy.heal();
        outages.assert_works(round, &requests).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn requests_during_an_outage_are_answered_and_delay_no_later_request() {
    let outages = Outages::new().await;
    for (round, fault) in [Fault::Forget, Fault::Stall, Fault::Swallow, Fault::Cut].into_iter().enumerate() {
        let requests = outages.requests(round).await;
        let (failures, moment) = (outages.failures().await, outages.now().await);
        outages.proxy.break_network(fault);
        let during = join_all(requests.iter().flat_map(|request| {
            let send = || tokio::time::timeout(PATIENCE, request.send(&outages.instance.api));
            [send(), send(), send()]
        }));
        for (answer, request) in during.await.into_iter().zip(requests.iter().flat_map(|request| [request; 3])) {
            let what = format!("{fault:?}: {} {}", request.method, request.path);
            let answer = answer.unwrap_or_else(|_| panic!("{what}: no answer"));
            assert!(answer.is_not_now(), "{what}: {} {}", answer.status, answer.body);
        }
        outages.assert_not_ready().await;
        outages.fails_ticks_since(&failures).await;
        outages.proxy.heal();
        outages.assert_works(round, &requests).await;
        // A connection that was only stalled may have lived on.
        if fault != Fault::Stall {
            outages.listens_since(moment).await;
        }
    }
}
