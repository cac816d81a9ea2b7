//! Fencing of claims: once a task is claimed again, even by the same instance, only the answer to the new call counts.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use futures_util::future::join_all;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::support::instance::command;
use crate::support::load::at;
use crate::support::{Database, Instance, LOOPBACK, LockHolder, Receiver, Reply, eventually};

const TASKS: usize = 30;

const SETTINGS: [(&str, &str); 6] = [
    ("RUST_LOG", "error"),
    ("WORKER_CLAIM_TIMEOUT_SECS", "3600"),
    ("WORKER_LOOP_INTERVAL_MS", "200"),
    ("RETRY_LOOP_INTERVAL_MS", "200"),
    ("WEBHOOK_TIMEOUT_MS", "300000"),
    ("WEBHOOK_ALLOW", LOOPBACK),
];

/// An instance that has called twice for each of its tasks, because it lost its claims in between. No call is answered
/// yet.
struct CalledTwice {
    db: Database,
    instance: Instance,
    receiver: Receiver,
    ids: Vec<String>,
    /// The answers to the first and to the second call for a task.
    answers: watch::Sender<[Option<Reply>; 2]>,
}

impl CalledTwice {
    async fn new(start: impl FnOnce(&str) -> Instance) -> CalledTwice {
        let db = Database::new().await;
        let (instance, receiver) = (start(&db.url), Receiver::start().await);
        let answers = watch::Sender::new([None, None]);
        let (told, calls) = (answers.clone(), Arc::new(Mutex::new(HashMap::<String, usize>::new())));
        receiver.answer_with(move |call| {
            let (mut told, mut calls) = (told.subscribe(), calls.lock().unwrap());
            let nth = calls.entry(call.key()).or_default();
            let which = (*nth).min(1);
            *nth += 1;
            async move {
                if call.path != "/start" {
                    return Reply::status(500);
                }
                told.wait_for(|told| told[which].is_some()).await.unwrap()[which].clone().unwrap()
            }
        });
        let task = json!({"name": "n", "kind": "k", "timeout": 3600, "on_start": receiver.action("/start")});
        let ids = instance.api.create(&json!(vec![task; TASKS])).await;
        eventually("the first calls", async || (receiver.received().len() == TASKS).then_some(())).await;

        // No other instance can claim meanwhile, so the stopped one finds its lost tasks when it continues.
        instance.signal(Signal::STOP);
        let claim_lock = LockHolder::holding(&db, "select pg_advisory_xact_lock(8243118329669313793)").await;
        db.end_leases(None).await;
        let other = Instance::start(&db.url, &SETTINGS);
        let pending = "select count(*) from task where status = 'pending'";
        eventually("the leases to run out", async || {
            (db.number(pending).await == i64::try_from(TASKS).unwrap()).then_some(())
        })
        .await;
        other.kill();
        // Statements of the killed instance end before the claim lock is free.
        let left = "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database() \
                    and application_name = 'reprise' and wait_event = 'advisory'";
        db.number(left).await;
        claim_lock.release().await;
        instance.signal(Signal::CONT);
        eventually("the second calls", async || (receiver.received().len() == 2 * TASKS).then_some(())).await;
        CalledTwice { db, instance, receiver, ids, answers }
    }

    async fn assert_all_run(&self) {
        for id in &self.ids {
            let task = self.instance.api.wait_for(id, "Running").await;
            assert_eq!((&task["run"], &task["attempt"]), (&json!(0), &json!(0)));
        }
    }

    /// The workers of both calls report, and all their reports are accepted.
    async fn assert_reports_are_taken(&self) {
        for call in self.receiver.at("/start") {
            let answer = self.instance.api.patch(&at(&call), &json!({"status": "Success"})).await;
            assert_eq!(answer.status, 200, "{}", answer.body);
        }
        self.db.assert_counters_match().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_failed_call_of_a_lost_claim_does_not_fail_the_task() {
    let called = CalledTwice::new(|url| Instance::start(url, &SETTINGS)).await;
    called.answers.send_modify(|answers| answers[0] = Some(Reply::status(500)));
    // Answers are written in order: once later calls have failed, those of the first calls are written.
    for _ in 0..3 {
        let api = &called.instance.api;
        let refused = json!([{"name": "n", "kind": "k", "on_start": called.receiver.action("/refused")}]);
        api.wait_for(&api.create(&refused).await[0], "Failure").await;
    }
    let statuses = join_all(called.ids.iter().map(|id| called.instance.api.status(id))).await;
    let claimed = statuses.iter().filter(|status| *status == "Claimed").count();
    assert_eq!(claimed, TASKS, "the second calls are still open: {statuses:?}");
    called.answers.send_modify(|answers| answers[1] = Some(Reply::ok()));
    called.assert_all_run().await;
    called.assert_reports_are_taken().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_successful_call_of_a_lost_claim_does_not_start_the_task() {
    let called = CalledTwice::new(|url| Instance::start(url, &SETTINGS)).await;
    // The second call is refused, and that counts.
    called.answers.send_modify(|answers| answers[1] = Some(Reply::status(500)));
    for id in &called.ids {
        called.instance.api.wait_for(id, "Failure").await;
    }
    called.answers.send_modify(|answers| answers[0] = Some(Reply::ok()));
    let api = &called.instance.api;
    let next = json!([{"name": "n", "kind": "k", "on_start": called.receiver.action("/refused")}]);
    api.wait_for(&api.create(&next).await[0], "Failure").await;
    for id in &called.ids {
        assert_eq!(called.instance.api.status(id).await, "Failure");
    }
    called.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn answers_to_a_lost_and_a_current_claim_are_written_together() {
    let name = format!("two-answers-{}.log", std::process::id());
    let log = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let file = std::fs::File::create(&log).unwrap();
    let called = CalledTwice::new(|url| {
        let mut all = vec![("DATABASE_URL", url), ("PORT", "0"), ("POOL_MAX_SIZE", "10")];
        all.extend(SETTINGS);
        let mut command = command(&all);
        command.stderr(file);
        Instance::spawn(command)
    })
    .await;
    let reply = |path: &str| {
        let mut reply = Reply::ok();
        reply.body = called.receiver.action(path);
        Some(reply)
    };
    // No answer can be written before all of them have arrived.
    let answers: [Option<Reply>; 2] = [reply("/cancel/old"), reply("/cancel/new")];
    let holder = LockHolder::holding(&called.db, "select from task order by id for update").await;
    called.answers.send_replace(answers);
    eventually("all calls to be answered", async || {
        (called.instance.api.counter("reprise_webhook_calls_total").await == 2 * TASKS).then_some(())
    })
    .await;
    holder.release().await;
    called.assert_all_run().await;
    let stored: Vec<String> =
        sqlx::query_scalar("select action from cancel_action").fetch_all(&called.db.pool).await.unwrap();
    assert_eq!(stored.len(), TASKS);
    let urls = stored.iter().map(|action| serde_json::from_str::<Value>(action).unwrap().to_string());
    assert_eq!(
        urls.filter(|url| url.contains("/cancel/new")).count(),
        TASKS,
        "only the answer to the current claim counts"
    );
    called.assert_reports_are_taken().await;
    drop(called);
    let said = std::fs::read_to_string(&log).unwrap();
    std::fs::remove_file(&log).unwrap();
    assert_eq!(said, "", "no error was logged");
}
