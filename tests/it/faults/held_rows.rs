//! Rows that another transaction locks for longer than every limit of the service: only work that needs them waits. The
//! locks are held until the service has given up what needs them and other work was done meanwhile, however long that
//! takes.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Method;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::support::{Client, Database, Instance, LockHolder, PATIENCE, Receiver, Reply, eventually, text};

/// So many times, four unrelated tasks succeed while rows are locked.
const ROUNDS: usize = 8;

const SETTINGS: [(&str, &str); 7] = [
    // These tests cause warnings on purpose.
    ("RUST_LOG", "error"),
    ("WORKER_CLAIM_TIMEOUT_SECS", "3600"),
    // Requests for locked rows have to reach this limit, and no others may.
    ("DATABASE_TIMEOUT_SECS", "10"),
    ("WORKER_LOOP_INTERVAL_MS", "200"),
    ("RETRY_LOOP_INTERVAL_MS", "200"),
    ("WEBHOOK_DELIVERY_INTERVAL_MS", "200"),
    ("WEBHOOK_TIMEOUT_MS", "300000"),
];

/// An instance on a database of its own, and a receiver that answers calls below `/held` only when it is told to.
struct Setup {
    db: Database,
    instance: Instance,
    receiver: Receiver,
    /// The paths below `/held` that are answered.
    answered: watch::Sender<Vec<&'static str>>,
    number: AtomicUsize,
}

impl Setup {
    async fn new() -> Setup {
        Setup::with_setting("RUST_LOG", "error").await
    }

    /// With another value of one setting.
    async fn with_setting(name: &str, value: &str) -> Setup {
        let db = Database::new().await;
        let mut settings = SETTINGS.to_vec();
        settings.push((name, value));
        let instance = Instance::start(&db.url, &settings);
        Setup::with(db, instance).await
    }

    async fn with(db: Database, instance: Instance) -> Setup {
        let receiver = Receiver::start().await;
        let answered = watch::Sender::new(Vec::new());
        let paths = answered.clone();
        receiver.answer_with(move |call| {
            let mut paths = paths.subscribe();
            async move {
                if call.path.starts_with("/held") {
                    paths.wait_for(|paths| paths.contains(&call.path.as_str())).await.unwrap();
                }
                Reply::ok()
            }
        });
        Setup { db, instance, receiver, answered, number: AtomicUsize::default() }
    }

    fn api(&self) -> &Client {
        &self.instance.api
    }

    /// The calls at this path are answered from now on.
    fn answer(&self, path: &'static str) {
        self.answered.send_modify(|paths| paths.push(path));
    }

    /// Creates tasks that run without a call, in one batch; answers their ids when they run.
    async fn running(&self, tasks: Value) -> Vec<String> {
        let ids = self.api().create(&tasks).await;
        join_all(ids.iter().map(|id| self.api().wait_for(id, "Running"))).await;
        ids
    }

    /// An unrelated task is created, started, reported and notified of, each once.
    async fn one_task_succeeds(&self, with: &Value) {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let (start, done) = (format!("/start/{number}"), format!("/done/{number}"));
        let mut task = json!({"name": "n", "kind": "other", "timeout": 3600, "on_start": self.receiver.action(&start),
                              "on_success": [self.receiver.action(&done)]});
        task.as_object_mut().unwrap().extend(with.as_object().unwrap().clone());
        let id = self.api().create(&json!([task])).await.remove(0);
        self.api().wait_for(&id, "Running").await;
        let answer = self.api().succeed(&id).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        eventually("the notification of a task", async || (!self.receiver.at(&done).is_empty()).then_some(())).await;
        assert_eq!(self.receiver.at(&start).len(), 1, "called once");
    }

    /// Unrelated tasks succeed, several at a time, for as long as the rows are locked: until `given_up`, at least.
    async fn others_succeed_while(&self, holder: LockHolder, with: Value, mut given_up: impl AsyncFnMut() -> bool) {
        let mut rounds = 0;
        eventually("what needs the locked rows to be given up", async || {
            join_all((0..4).map(|_| self.one_task_succeeds(&with))).await;
            rounds += 1;
            (given_up().await && rounds >= ROUNDS).then_some(())
        })
        .await;
        holder.release().await;
    }

    /// Sends a request in the background.
    fn spawn(&self, method: Method, path: String, body: Value) -> JoinHandle<u16> {
        // A connection of its own.
        let api = Client::new(self.api().base());
        tokio::spawn(async move { api.call(method, &path, Some(&body)).await.status.as_u16() })
    }

    async fn hold_tasks(&self, ids: &[&String]) -> LockHolder {
        let ids = ids.iter().map(|id| format!("'{id}'")).collect::<Vec<_>>().join(", ");
        LockHolder::holding(&self.db, &format!("select from task where id in ({ids}) order by id for update")).await
    }

    async fn batch_of(&self, id: &str) -> String {
        text(&self.api().task(id).await["batch_id"])
    }
}

fn are_answered(requests: &[JoinHandle<u16>]) -> bool {
    requests.iter().all(JoinHandle::is_finished)
}

/// The statuses of all answers. None is a server error other than 503.
async fn answered(requests: Vec<JoinHandle<u16>>) -> Vec<u16> {
    let answers = tokio::time::timeout(PATIENCE, join_all(requests)).await.expect("every request is answered");
    let answers: Vec<u16> = answers.into_iter().map(Result::unwrap).collect();
    assert!(answers.iter().all(|status| *status == 503 || *status < 500), "{answers:?}");
    answers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tasks_start_while_another_claimed_task_is_locked() {
    // The leases of the locked tasks have to end. Those of others are needed for a moment only.
    let setup = Setup::with_setting("WORKER_CLAIM_TIMEOUT_SECS", "20").await;
    let task = |path: &str| json!([{"name": "n", "kind": "k", "on_start": setup.receiver.action(path)}]);
    let mut held = setup.api().create(&task("/held/open")).await;
    held.extend(setup.api().create(&task("/held/answered")).await);
    eventually("both on_start calls", async || (setup.receiver.received().len() == 2).then_some(())).await;
    let holder = setup.hold_tasks(&[&held[0], &held[1]]).await;
    // One call is answered while its row is locked; the lease of the other task cannot be renewed.
    setup.answer("/held/answered");
    let mut others = Vec::new();
    for _ in 0..10 {
        others.extend(setup.api().create(&task("/start")).await);
    }
    for id in &others {
        setup.api().wait_for(id, "Running").await;
    }
    let ended = "select count(*) from task where status = 'claimed' and timeout_at < clock_timestamp()";
    setup.others_succeed_while(holder, json!({}), async || setup.db.number(ended).await == 2).await;
    for id in &others {
        assert_eq!(setup.api().status(id).await, "Running");
        let calls = setup.receiver.at("/start").into_iter().filter(|call| call.header("x-task-id") == id);
        assert_eq!(calls.count(), 1, "called once");
    }
    setup.answer("/held/open");
    for id in &held {
        setup.api().wait_for(id, "Running").await;
    }
    setup.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn reports_succeed_while_children_of_other_tasks_are_locked() {
    // Longer than the test waits: a report that waits for a locked row is not given up.
    let setup = Setup::with_setting("DATABASE_TIMEOUT_SECS", "600").await;
    let mut parents = Vec::new();
    let mut children = Vec::new();
    for _ in 0..2 {
        let family = json!([{"id": "p", "name": "parent", "kind": "k"},
                            {"name": "child", "kind": "k", "dependencies": [{"id": "p"}]}]);
        let mut ids = setup.api().create(&family).await;
        setup.api().wait_for(&ids[0], "Running").await;
        children.push(ids.remove(1));
        parents.push(ids.remove(0));
    }
    let others = setup.running(json!(vec![json!({"name": "n", "kind": "k", "timeout": 3600}); 30])).await;
    let holder = setup.hold_tasks(&[&children[0], &children[1]]).await;
    let report = |id: &String| setup.spawn(Method::PATCH, format!("/task/{id}"), json!({"status": "Success"}));
    let reports: Vec<_> = parents.iter().map(report).collect();
    eventually("a report to wait", async || (setup.db.waiting_for_locks().await > 0).then_some(())).await;
    let succeed = async {
        for id in &others {
            let answer = setup.api().succeed(id).await;
            assert_eq!(answer.status, 200, "{}", answer.body);
        }
    };
    tokio::time::timeout(PATIENCE, succeed).await.expect("no report waits for those of locked tasks");
    assert!(!reports.iter().any(JoinHandle::is_finished), "the reports of locked tasks still wait");
    holder.release().await;
    assert_eq!(answered(reports).await, [200, 200]);
    for id in &children {
        setup.api().wait_for(id, "Running").await;
        assert_eq!(setup.api().succeed(id).await.status, 200);
    }
    setup.db.assert_counters_match().await;
}

/// Sends heartbeats until it is told to stop; returns how many of them carried a count.
fn be_alive(setup: &Setup, id: &str, stop: &watch::Sender<bool>) -> JoinHandle<i64> {
    let (api, path, mut stop) = (Client::new(setup.api().base()), format!("/task/{id}"), stop.subscribe());
    tokio::spawn(async move {
        let mut counted = 0;
        loop {
            for sign in [json!({"new_success": 1}), json!({})] {
                let answer = api.put(&path, &sign).await;
                assert_eq!(answer.status, 202, "{}", answer.body);
                counted += sign.as_object().unwrap().len();
                let told = stop.wait_for(|stop| *stop);
                if tokio::time::timeout(Duration::from_millis(50), told).await.is_ok() {
                    return i64::try_from(counted).unwrap();
                }
            }
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn heartbeats_count_while_the_counters_of_their_batch_are_locked() {
    let setup = Setup::new().await;
    let path = "/complete";
    let alive = json!({"name": "alive", "kind": "k", "timeout": 3600});
    let long = json!({"name": "n", "kind": "k", "timeout": 3600});
    let held = json!({"tasks": [alive, long, long], "on_batch_complete": [setup.receiver.action(path)]});
    let stop = watch::Sender::new(false);
    let mine = setup.api().create(&held).await;
    setup.api().wait_for(&mine[0], "Running").await;
    let mut signs = vec![be_alive(&setup, &mine[0], &stop)];
    for id in &mine {
        setup.api().wait_for(id, "Running").await;
    }
    let other = setup.running(json!([alive])).await.remove(0);
    signs.push(be_alive(&setup, &other, &stop));
    let batch = setup.batch_of(&mine[0]).await;
    let counters = format!("select from batch_count where batch_id = '{batch}' for update");
    let holder = LockHolder::holding(&setup.db, &counters).await;

    let report = setup.spawn(Method::PATCH, format!("/task/{}", mine[1]), json!({"status": "Success"}));
    // Both tasks are overdue, unless a heartbeat was written since the counters are locked.
    let both = format!("id in ('{}', '{other}')", mine[0]);
    setup.db.execute(&format!("update task set last_updated = last_updated - interval '2 hours' where {both}")).await;
    let silent = format!("select count(*) from task where {both} and last_updated < now() - interval '1 hour'");
    eventually("heartbeats of both", async || (setup.db.number(&silent).await == 0).then_some(())).await;
    setup.db.execute(&format!("update task set timeout_at = clock_timestamp() where {both}")).await;
    let due = format!("select count(*) from task where {both} and timeout_at <= clock_timestamp()");
    eventually("the deadlines to be moved", async || (setup.db.number(&due).await == 0).then_some(())).await;
    let reports = [report];
    setup.others_succeed_while(holder, json!({}), async || are_answered(&reports)).await;
    stop.send_replace(true);
    let counted: Vec<i64> = join_all(signs).await.into_iter().map(Result::unwrap).collect();
    answered(reports.into()).await;
    for id in [&mine[0], &other] {
        assert_eq!(setup.api().status(id).await, "Running", "its worker sent heartbeats");
    }
    for id in &mine {
        assert_eq!(setup.api().succeed(id).await.status, 200);
    }
    assert_eq!(setup.api().task(&other).await["success"], counted[1]);
    eventually("the batch to be complete", async || {
        let batch = setup.api().get(&format!("/batch/{batch}")).await.body;
        let right = batch["total_success"] == counted[0] && batch["status_counts"]["success"] == 3;
        (right && !batch["completed_at"].is_null()).then_some(())
    })
    .await;
    eventually("the notification of the batch", async || (!setup.receiver.at(path).is_empty()).then_some(())).await;
    assert_eq!(setup.api().succeed(&other).await.status, 200);
    setup.one_task_succeeds(&json!({})).await;
    assert_eq!(setup.receiver.at(path).len(), 1, "notified once");
    setup.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tasks_start_and_end_while_the_counters_of_their_batch_are_locked() {
    let setup = Setup::new().await;
    let path = "/complete";
    let (start, done) = (setup.receiver.action("/start"), setup.receiver.action("/done"));
    let child = json!({"name": "child", "kind": "k", "dependencies": [{"id": "p"}], "on_start": start,
                       "on_success": [done]});
    let held = json!({"tasks": [{"id": "p", "name": "parent", "kind": "k"}, child],
                      "on_batch_complete": [setup.receiver.action(path)]});
    let ids = setup.api().create(&held).await;
    setup.api().wait_for(&ids[0], "Running").await;
    let batch = setup.batch_of(&ids[0]).await;
    let counters = format!("select from batch_count where batch_id = '{batch}' for update");
    let holder = LockHolder::holding(&setup.db, &counters).await;
    for id in &ids {
        setup.api().wait_for(id, "Running").await;
        let answer = setup.api().succeed(id).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
    eventually("the notification of the child", async || (setup.receiver.at("/done").len() == 1).then_some(())).await;
    setup.others_succeed_while(holder, json!({}), async || true).await;
    eventually("the batch to be complete", async || {
        let batch = setup.api().get(&format!("/batch/{batch}")).await.body;
        (batch["status_counts"]["success"] == 2 && !batch["completed_at"].is_null()).then_some(())
    })
    .await;
    eventually("the notification of the batch", async || (!setup.receiver.at(path).is_empty()).then_some(())).await;
    setup.one_task_succeeds(&json!({})).await;
    assert_eq!(setup.receiver.at(path).len(), 1, "notified once");
    setup.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn loops_continue_while_a_child_of_an_overdue_task_is_locked() {
    let db = Database::new().await;
    // This instance is killed, and its leases end while the row is locked.
    let victim = Instance::start(&db.url, &SETTINGS);
    let hanging = Receiver::start().await;
    hanging.answer(Reply::slow(Duration::from_secs(3600)));
    let call = json!({"name": "n", "kind": "k", "on_start": hanging.action("/hang")});
    let lost = victim.api.create(&json!(vec![call; 5])).await;
    eventually("the on_start calls", async || (hanging.received().len() == 5).then_some(())).await;
    hanging.answer(Reply::ok());
    victim.kill();

    let setup = Setup::with(db.clone(), Instance::start(&db.url, &SETTINGS)).await;
    let family = json!([{"id": "p", "name": "parent", "kind": "k", "timeout": 3600},
                        {"name": "child", "kind": "k", "dependencies": [{"id": "p"}]}]);
    let retry = json!({"max_retries": 1, "strategy": "fixed_delay", "delay_secs": 1, "jitter_ms": 0});
    let again = json!({"name": "n", "kind": "k", "timeout": 3600, "retry": retry});
    let due = setup.running(json!(vec![again; 5])).await;
    let mine = setup.api().create(&family).await;
    setup.api().wait_for(&mine[0], "Running").await;
    let holder = setup.hold_tasks(&[&mine[1]]).await;
    // From now on with a timeout of one second.
    let time_out = async |id: &str| {
        let short = format!("update task set timeout_secs = 1, timeout_at = clock_timestamp() where id = '{id}'");
        db.execute(&short).await;
    };
    time_out(&mine[0]).await;
    let overdue = format!("select count(*) from task where id = '{}' and timeout_at < clock_timestamp()", mine[0]);
    eventually("the parent to be overdue", async || (db.number(&overdue).await == 1).then_some(())).await;
    db.end_leases(None).await;

    let late = setup.running(json!(vec![json!({"name": "n", "kind": "k", "timeout": 3600}); 5])).await;
    for id in &late {
        time_out(id).await;
    }
    for id in &due {
        assert_eq!(setup.api().fail(id).await.status, 200);
    }
    for id in &late {
        setup.api().wait_for(id, "Failure").await;
    }
    for id in &due {
        let task = setup.api().wait_for(id, "Running").await;
        assert_eq!(task["run"], 1);
    }
    for id in &lost {
        setup.api().wait_for(id, "Running").await;
    }
    setup.others_succeed_while(holder, json!({}), async || true).await;
    for id in &mine {
        setup.api().wait_for(id, "Failure").await;
    }
    db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn due_retries_are_released_while_one_of_them_is_locked() {
    let setup = Setup::new().await;
    let retry = json!({"max_retries": 1, "strategy": "fixed_delay", "delay_secs": 3600, "jitter_ms": 0});
    let ids = setup.running(json!(vec![json!({"name": "n", "kind": "k", "timeout": 3600, "retry": retry}); 6])).await;
    for id in &ids {
        assert_eq!(setup.api().fail(id).await.status, 200);
    }
    // All of them become due before the instance can look, and one is locked.
    setup.instance.signal(Signal::STOP);
    setup.db.execute("update task set next_retry_at = clock_timestamp()").await;
    let holder = setup.hold_tasks(&[&ids[0]]).await;
    setup.instance.signal(Signal::CONT);
    for id in &ids[1..] {
        assert_eq!(setup.api().wait_for(id, "Running").await["run"], 1);
    }
    setup.others_succeed_while(holder, json!({}), async || true).await;
    assert_eq!(setup.api().wait_for(&ids[0], "Running").await["run"], 1);
    setup.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn requests_succeed_while_the_claim_lock_is_held() {
    let setup = Setup::new().await;
    let task = json!({"name": "n", "kind": "k", "timeout": 3600, "on_success": [setup.receiver.action("/done")]});
    let ids = setup.running(json!(vec![task; 20])).await;
    let claim_lock = "select pg_advisory_xact_lock(8243118329669313793)";
    let holder = LockHolder::holding(&setup.db, claim_lock).await;
    let waiting = "select pid || ' since ' || query_start from pg_stat_activity where datname = current_database() \
                   and application_name = 'reprise' and wait_event_type = 'Lock'";
    let waiting = async || -> HashSet<String> {
        sqlx::query_scalar(waiting).fetch_all(&setup.db.pool).await.unwrap().into_iter().collect()
    };
    let (mut new, mut waited) = (Vec::new(), HashSet::new());
    for id in &ids {
        let sign = setup.api().put(&format!("/task/{id}"), &json!({"new_success": 1})).await;
        assert_eq!(sign.status, 202, "{}", sign.body);
        let report = setup.api().succeed(id).await;
        assert_eq!(report.status, 200, "{}", report.body);
        new.extend(setup.api().create(&json!([{"name": "n", "kind": "k"}])).await);
        assert_eq!(setup.api().get(&format!("/batch/{}", setup.batch_of(id).await)).await.status, 200);
        waited.extend(waiting().await);
    }
    eventually("a claim to wait", async || {
        waited.extend(waiting().await);
        (!waited.is_empty()).then_some(())
    })
    .await;
    // A statement without a limit of its own would wait for as long as the lock is held.
    eventually("the statements to be given up", async || waiting().await.is_disjoint(&waited).then_some(())).await;
    let told = "all notifications";
    eventually(told, async || (setup.receiver.at("/done").len() == ids.len()).then_some(())).await;
    let pending = format!("select count(*) from task where status = 'pending' and id <> '{}'", ids[0]);
    assert_eq!(
        usize::try_from(setup.db.number(&pending).await).unwrap(),
        new.len(),
        "a task was claimed although the claim lock was held"
    );
    holder.release().await;
    for id in &new {
        setup.api().wait_for(id, "Running").await;
    }
    setup.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tasks_succeed_while_a_status_count_is_locked() {
    let setup = Setup::new().await;
    let nothing = json!({});
    join_all((0..20).map(|_| setup.one_task_succeeds(&nothing))).await;
    // The row to which most connections of the instance write.
    let row = "select from status_count where shard = (select shard from status_count order by (select count(*) from \
               pg_stat_activity where datname = current_database() and application_name = 'reprise' and \
               pid % 16 = shard) desc limit 1) for update";
    let holder = LockHolder::holding(&setup.db, row).await;
    setup.others_succeed_while(holder, json!({}), async || true).await;
    setup.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tasks_succeed_while_a_slot_of_another_kind_is_locked() {
    let setup = Setup::new().await;
    let rule = |kind: &str| json!([{"type": "Concurency", "max_concurency": 2, "matcher": {"kind": kind}}]);
    let limited = json!([{"name": "n", "kind": "limited", "timeout": 3600, "rules": rule("limited")}]);
    let mut ids = setup.running(limited.clone()).await;
    let slots = "select from slot s join matcher m on m.id = s.matcher_id where m.kind = 'limited' for update of s";
    let holder = LockHolder::holding(&setup.db, slots).await;
    // A rule lets this task start, but its slot is locked.
    ids.extend(setup.api().create(&limited).await);
    let reports = vec![setup.spawn(Method::PATCH, format!("/task/{}", ids[0]), json!({"status": "Success"}))];
    // The other tasks have rules of their own.
    let many = json!([{"type": "Concurency", "max_concurency": 50, "matcher": {"kind": "other"}}]);
    setup.others_succeed_while(holder, json!({"rules": many}), async || are_answered(&reports)).await;
    answered(reports).await;
    for id in &ids {
        if setup.api().status(id).await != "Success" {
            setup.api().wait_for(id, "Running").await;
        }
        assert_eq!(setup.api().succeed(id).await.status, 200);
    }
    setup.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tasks_succeed_while_a_notification_in_flight_is_locked() {
    let setup = Setup::new().await;
    let task = json!([{"name": "n", "kind": "k", "on_success": [setup.receiver.action("/held/done")]}]);
    let ids = setup.running(task).await;
    assert_eq!(setup.api().succeed(&ids[0]).await.status, 200);
    eventually("the notification to be sent", async || (!setup.receiver.at("/held/done").is_empty()).then_some(()))
        .await;
    let row = format!("select from outbox where task_id = '{}' for update", ids[0]);
    let holder = LockHolder::holding(&setup.db, &row).await;
    setup.answer("/held/done");
    // The results of other deliveries are written meanwhile.
    let open = "select count(*) from outbox where status <> 'success'";
    setup.others_succeed_while(holder, json!({}), async || setup.db.number(open).await == 1).await;
    eventually("the deliveries to be marked", async || (setup.db.number(open).await == 0).then_some(())).await;
    setup.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tasks_succeed_while_a_default_policy_is_locked() {
    let setup = Setup::new().await;
    let policy = json!({"max_retries": 2});
    let path = "/retry-policy/held";
    assert!(setup.api().put(path, &policy).await.status.is_success());
    let holder = LockHolder::holding(&setup.db, "select from retry_policy where kind = 'held' for update").await;
    let changes: Vec<_> = (0..12).map(|_| setup.spawn(Method::PUT, path.into(), policy.clone())).collect();
    setup.others_succeed_while(holder, json!({}), async || are_answered(&changes)).await;
    answered(changes).await;
    assert!(setup.api().put(path, &policy).await.status.is_success());
    setup.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tasks_succeed_while_the_turn_of_another_fair_key_is_locked() {
    let setup = Setup::new().await;
    let mine = json!([{"name": "n", "kind": "k", "fair_key": "held"}]);
    let mut ids = setup.running(mine.clone()).await;
    let holder = LockHolder::holding(&setup.db, "select from fair_turn where key = 'held' for update").await;
    let waiting: Vec<_> = (0..12).map(|_| setup.spawn(Method::POST, "/task".into(), mine.clone())).collect();
    setup.others_succeed_while(holder, json!({"fair_key": "other"}), async || are_answered(&waiting)).await;
    answered(waiting).await;
    ids.extend(setup.running(mine).await);
    setup.one_task_succeeds(&json!({})).await;
    setup.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tasks_succeed_while_retry_statistics_are_locked() {
    let setup = Setup::new().await;
    let retry = json!({"max_retries": 1, "strategy": "immediate", "jitter_ms": 0});
    let task = json!({"name": "n", "kind": "held", "timeout": 3600, "retry": retry});
    let ids = setup.running(json!(vec![task.clone(); 24])).await;
    let (now, later) = ids.split_at(12);
    for answer in join_all(now.iter().map(|id| setup.api().succeed(id))).await {
        assert_eq!(answer.status, 200);
    }
    let rows = "select from retry_stat where kind = 'held' for update";
    let holder = LockHolder::holding(&setup.db, rows).await;
    let report = |id: &String| setup.spawn(Method::PATCH, format!("/task/{id}"), json!({"status": "Success"}));
    let reports: Vec<_> = later.iter().map(report).collect();
    setup.others_succeed_while(holder, json!({"retry": retry}), async || are_answered(&reports)).await;
    answered(reports).await;
    for id in later {
        assert_eq!(setup.api().succeed(id).await.status, 200);
    }
    setup.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_requests_for_a_locked_task_leave_connections_for_others() {
    let setup = Setup::new().await;
    let held = setup.running(json!([{"name": "n", "kind": "k", "timeout": 3600}])).await.remove(0);
    let holder = setup.hold_tasks(&[&held]).await;
    let (stop, answered) = (watch::Sender::new(false), Arc::new(AtomicUsize::default()));
    // More clients than connections, each of which repeats its request as soon as it is answered.
    let want = |i: usize| {
        let (api, id, stop) = (Client::new(setup.api().base()), held.clone(), stop.subscribe());
        let (answered, mut first) = (Arc::clone(&answered), 1);
        tokio::spawn(async move {
            while !*stop.borrow() {
                let answer = match i % 4 {
                    0 => api.succeed(&id).await,
                    1 => api.patch(&format!("/task/{id}"), &json!({"new_failures": 1})).await,
                    2 => api.delete(&format!("/task/{id}")).await,
                    _ => api.patch(&format!("/task/pause/{id}"), &json!({})).await,
                };
                assert!(answer.status.as_u16() < 500 || answer.is_not_now(), "{} {}", answer.status, answer.body);
                answered.fetch_add(std::mem::take(&mut first), Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
    };
    let many: Vec<_> = (0..60).map(want).collect();
    setup.others_succeed_while(holder, json!({}), async || answered.load(Ordering::Relaxed) == many.len()).await;
    stop.send_replace(true);
    for one in tokio::time::timeout(PATIENCE, join_all(many)).await.expect("every request is answered") {
        one.unwrap();
    }
    setup.db.assert_counters_match().await;
}
