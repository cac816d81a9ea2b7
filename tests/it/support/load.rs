//! Clients and workers of several instances. They repeat requests without a definite answer at another instance,
//! remember what was acknowledged, and record what must never happen.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use url::Url;
use uuid::Uuid;

use super::receiver::Received;
use super::{Answer, Client, Database, Instance, PATIENCE, Receiver, Reply, eventually, text};

/// Tasks in a batch, and their executions: two of them have two.
const TASKS: usize = 6;
const EXECUTIONS: usize = 8;

/// How the receiver treats a call of `on_start`.
pub enum Fate {
    /// A worker takes it up.
    Work,
    /// It is answered, and no worker begins.
    Answer(u16),
    /// It is not answered until its fate has changed.
    Wait,
}

type Decide = Arc<dyn Fn(&Received) -> Fate + Send + Sync>;

#[derive(Clone)]
pub struct Load(Arc<Inner>);

struct Inner {
    receiver: Receiver,
    /// The instances that clients and workers use in turn.
    apis: Mutex<Vec<Client>>,
    turn: AtomicUsize,
    /// The number of tenants, of each of which two tasks may execute; 0 for no rules.
    tenants: AtomicUsize,
    /// Decides about calls of `on_start`, and the calls that wait.
    fate: watch::Sender<Decide>,
    held: Mutex<Vec<Received>>,
    /// Ids of tasks whose creation was acknowledged.
    created: Mutex<Vec<Uuid>>,
    /// Keys of runs whose end was acknowledged.
    ended: Mutex<HashSet<String>>,
    /// Acknowledged heartbeats, by task.
    counted: Mutex<HashMap<String, i64>>,
    refused: AtomicUsize,
    /// Calls for runs that had ended.
    late: Mutex<Vec<String>>,
    wrong: Mutex<Vec<String>>,
}

impl Load {
    pub async fn on(instances: &[Instance]) -> Load {
        let load = Load(Arc::new(Inner {
            receiver: Receiver::start().await,
            apis: Mutex::new(instances.iter().map(|instance| instance.api.clone()).collect()),
            turn: AtomicUsize::default(),
            tenants: AtomicUsize::default(),
            fate: watch::Sender::new(Arc::new(|_| Fate::Work)),
            held: Mutex::default(),
            created: Mutex::default(),
            ended: Mutex::default(),
            counted: Mutex::default(),
            refused: AtomicUsize::default(),
            late: Mutex::default(),
            wrong: Mutex::default(),
        }));
        let worker = load.clone();
        load.0.receiver.answer_with(move |call| {
            let worker = worker.clone();
            async move { worker.called(call).await }
        });
        load
    }

    /// From now on tasks belong to one of so many tenants, and for each of them a rule lets two execute at a time.
    pub fn limit_tenants(&self, tenants: usize) {
        self.0.tenants.store(tenants, Ordering::Relaxed);
    }

    /// Creates that many batches at once, through all instances.
    pub async fn create(&self, batches: usize) {
        join_all((0..batches).map(|_| self.create_one())).await;
    }

    /// Clients that create a batch, wait for its end and go on with the next, until told to stop.
    pub fn clients(&self, count: usize) -> Clients {
        let stop = CancellationToken::new();
        let tasks = (0..count).map(|_| tokio::spawn(self.clone().be_client(stop.clone()))).collect();
        Clients { tasks, stop }
    }

    async fn be_client(self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            let path = format!("/batch/{}", self.create_one().await);
            while self.insist(Method::GET, &path, &[], None).await.body["completed_at"].is_null() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    async fn create_one(&self) -> String {
        let to = |path: &str| self.0.receiver.action(path);
        let done = [to("/done")];
        let retry = json!({"max_retries": 1, "strategy": "immediate", "jitter_ms": 0});
        let tenants = self.0.tenants.load(Ordering::Relaxed);
        let tenant = (tenants > 0).then(|| self.0.turn.fetch_add(1, Ordering::Relaxed) % tenants);
        let metadata = tenant.map(|tenant| json!({"tenant": tenant}));
        let matcher = json!({"kind": "k", "status": "Running", "fields": ["tenant"]});
        let rules = tenant.map(|_| json!([{"type": "Concurency", "max_concurency": 2, "matcher": matcher}]));
        let task = |id: &str, path: &str, needs: &[&str], retry: &Value| {
            let needs: Vec<Value> = needs.iter().map(|id| json!({"id": id})).collect();
            // Its worker may have to repeat its report for long.
            json!({"id": id, "name": path, "kind": "k", "timeout": 3600, "on_start": to(path), "on_success": done,
                   "dependencies": needs, "retry": retry, "metadata": metadata, "rules": rules})
        };
        let tasks = json!([
            task("a", "/work", &[], &Value::Null),
            task("b", "/work", &["a"], &Value::Null),
            task("c", "/fail-once", &["a"], &retry),
            task("d", "/refuse-once", &[], &retry),
            task("e", "/count", &["b", "c"], &Value::Null),
            task("f", "/work", &["d"], &Value::Null),
        ]);
        let key = Uuid::now_v7().to_string();
        let answer = self.insist(Method::POST, "/task", &[("idempotency-key", &key)], Some(tasks)).await;
        if answer.status != 201 {
            self.wrong(format!("POST: {} {}", answer.status, answer.body));
            return String::new();
        }
        let ids = answer.body.as_array().unwrap().iter().map(|task| text(&task["id"]).parse::<Uuid>().unwrap());
        self.0.created.lock().unwrap().extend(ids);
        answer.headers["x-batch-id"].to_str().unwrap().to_owned()
    }

    /// Asks one instance after the other until one gives an answer other than 503.
    async fn insist(&self, method: Method, path: &str, headers: &[(&str, &str)], body: Option<Value>) -> Answer {
        loop {
            let api = {
                let apis = self.0.apis.lock().unwrap();
                apis[self.0.turn.fetch_add(1, Ordering::Relaxed) % apis.len()].clone()
            };
            let request = api.send_with(method.clone(), path, headers, body.as_ref().map(Value::to_string));
            match tokio::time::timeout(PATIENCE, request).await {
                Ok(Ok(answer)) if answer.is_not_now() => {
                    self.0.refused.fetch_add(1, Ordering::Relaxed);
                }
                Ok(Ok(answer)) => {
                    if answer.status.is_server_error() {
                        self.wrong(format!("{method} {path}: {} {}", answer.status, answer.body));
                    }
                    return answer;
                }
                // The instance has ended or is ending.
                Ok(Err(_)) => {}
                Err(_) => self.wrong(format!("{method} {path}: no answer")),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn called(&self, call: Received) -> Reply {
        let key = call.key();
        if call.path == "/done" {
            return Reply::ok();
        }
        if self.0.ended.lock().unwrap().contains(&key) {
            self.0.late.lock().unwrap().push(key.clone());
        }
        let mut fate = self.0.fate.subscribe();
        let mut waits = false;
        loop {
            let decided = fate.borrow_and_update()(&call);
            match decided {
                Fate::Work => break,
                Fate::Answer(status) => return Reply::status(status),
                Fate::Wait if waits => {}
                Fate::Wait => {
                    waits = true;
                    self.0.held.lock().unwrap().push(call.clone());
                }
            }
            let _ = fate.changed().await;
        }
        if call.path == "/refuse-once" && run(&key) == 0 {
            return Reply::status(500);
        }
        let load = self.clone();
        // A worker outlives the instance that called it.
        tokio::spawn(async move { load.work(&call).await });
        Reply::ok()
    }

    /// Does what the call asks for, and reports.
    pub async fn work(&self, call: &Received) {
        let (key, at) = (call.key(), at(call));
        if call.path == "/count" {
            let answer = self.insist(Method::PUT, &at, &[], Some(json!({"new_success": 1}))).await;
            match answer.status.as_u16() {
                202 => *self.0.counted.lock().unwrap().entry(call.header("x-task-id").to_owned()).or_default() += 1,
                // Another worker has ended the run meanwhile.
                409 => {}
                _ => self.wrong(format!("{key} PUT: {} {}", answer.status, answer.body)),
            }
        }
        let report = if call.path == "/fail-once" && run(&key) == 0 {
            json!({"status": "Failure", "failure_reason": "not yet"})
        } else {
            json!({"status": "Success"})
        };
        let answer = self.insist(Method::PATCH, &at, &[], Some(report)).await;
        if answer.status == 200 {
            self.0.ended.lock().unwrap().insert(key);
        } else {
            self.wrong(format!("{key} PATCH: {} {}", answer.status, answer.body));
        }
    }

    /// From now on `fate` decides about calls, also about waiting ones.
    pub fn decide(&self, fate: impl Fn(&Received) -> Fate + Send + Sync + 'static) {
        self.0.fate.send_replace(Arc::new(fate));
    }

    /// From now on the calls of this instance are not answered.
    pub fn hold(&self, instance: &Instance) {
        let base = instance.api.base().to_owned();
        self.decide(move |call| if caller(call) == base { Fate::Wait } else { Fate::Work });
    }

    /// Answers all calls as usual, also those that wait.
    pub fn let_go(&self) {
        self.decide(|_| Fate::Work);
    }

    pub fn held(&self) -> Vec<Received> {
        self.0.held.lock().unwrap().clone()
    }

    /// No client or worker is sent to this instance any more.
    pub fn remove_instance(&self, instance: &Instance) {
        self.0.apis.lock().unwrap().retain(|api| api.base() != instance.api.base());
    }

    /// Clients and workers use this instance instead of the one at the address.
    pub fn replace_instance(&self, address: &str, instance: &Instance) {
        for api in self.0.apis.lock().unwrap().iter_mut().filter(|api| api.base() == address) {
            *api = instance.api.clone();
        }
    }

    /// The callers of `on_start` by key, in order.
    pub fn starts(&self) -> HashMap<String, Vec<String>> {
        let mut starts: HashMap<String, Vec<String>> = HashMap::new();
        for call in self.0.receiver.received() {
            if call.path != "/done" {
                starts.entry(call.key()).or_default().push(caller(&call));
            }
        }
        starts
    }

    /// The number of requests that were answered with 503.
    pub fn refused(&self) -> usize {
        self.0.refused.load(Ordering::Relaxed)
    }

    /// Calls that came after the end of their run had been acknowledged. Where many leases end while their workers report,
    /// a call may be on its way at that moment.
    pub fn late(&self) -> Vec<String> {
        self.0.late.lock().unwrap().clone()
    }

    pub fn ended(&self) -> usize {
        self.0.ended.lock().unwrap().len()
    }

    /// Waits until all tasks have ended, and compares what was acknowledged with what is stored.
    pub async fn finish(&self, db: &Database) {
        eventually("all tasks to end", async || {
            assert_eq!(*self.0.wrong.lock().unwrap(), Vec::<String>::new());
            (db.number("select count(*) from task where ended_at is null").await == 0).then_some(())
        })
        .await;
        let created = self.0.created.lock().unwrap().clone();
        let known = "select count(*) from task where status = 'success' and id = any($1)";
        let known: i64 = sqlx::query_scalar(known).bind(&created).fetch_one(&db.pool).await.unwrap();
        assert_eq!(
            usize::try_from(known).unwrap(),
            created.len(),
            "all acknowledged tasks are stored and have succeeded"
        );
        assert_eq!(db.number("select count(*) from task").await, known, "no task was created twice");
        let counted = self.0.counted.lock().unwrap().clone();
        for (id, acknowledged) in counted {
            let stored = db.number(&format!("select success from task where id = '{id}'")).await;
            assert!(stored >= acknowledged, "{id}: {acknowledged} acknowledged, {stored} stored");
        }
        let runs = "select count(*) from task t join task_spec s on s.id = t.id \
                    where t.run <> case when s.name in ('/fail-once', '/refuse-once') then 1 else 0 end";
        assert_eq!(db.number(runs).await, 0, "each task has as many runs as it needs");
        let executions = i64::try_from(created.len() / TASKS * EXECUTIONS).unwrap();
        assert_eq!(db.number("select count(*) from attempt").await, executions, "each run has ended once");
        // A notification that its instance lost is sent when its lease ends, after more time than the test waits.
        assert_eq!(db.number("select count(*) from outbox").await, known, "every end has its notification");
        eventually("the service to settle its counters", async || {
            (db.number("select count(*) from batch_delta").await == 0).then_some(())
        })
        .await;
        db.assert_counters_match().await;
    }

    /// Waits until every end has been told of; answers by key how often.
    pub async fn delivered(&self, db: &Database) -> HashMap<String, usize> {
        eventually("all notifications to be delivered", async || {
            (db.number("select count(*) from outbox where status <> 'success'").await == 0).then_some(())
        })
        .await;
        let mut told: HashMap<String, usize> = HashMap::new();
        for call in self.0.receiver.at("/done") {
            *told.entry(call.key()).or_default() += 1;
        }
        assert_eq!(told.len(), self.0.created.lock().unwrap().len());
        told
    }

    fn wrong(&self, what: String) {
        self.0.wrong.lock().unwrap().push(what);
    }
}

pub struct Clients {
    tasks: Vec<JoinHandle<()>>,
    stop: CancellationToken,
}

impl Clients {
    /// Waits until each has seen the end of its last batch.
    pub async fn stop(self) {
        self.stop.cancel();
        let all = tokio::time::timeout(PATIENCE, join_all(self.tasks)).await.expect("their batches end");
        all.into_iter().for_each(Result::unwrap);
    }
}

/// Where the report of a call goes, at whichever instance.
pub fn at(call: &Received) -> String {
    let handle = Url::parse(call.handle.as_deref().unwrap()).unwrap();
    format!("{}?{}", handle.path(), handle.query().unwrap())
}

/// The address of the instance that made a call: its handles start with it.
pub fn caller(call: &Received) -> String {
    Url::parse(call.handle.as_deref().unwrap()).unwrap().origin().ascii_serialization()
}

fn run(key: &str) -> i32 {
    key.rsplit(':').next().unwrap().parse().unwrap()
}
