//! Manual retries: which tasks they revive, which stay as they are, and that no run is executed twice.

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::{Fixture, Receiver, text};

fn task(id: &str, needs: &[(&str, bool)]) -> Value {
    let dependencies: Vec<Value> =
        needs.iter().map(|(id, required)| json!({"id": id, "requires_success": required})).collect();
    json!({"id": id, "name": id, "kind": "k", "timeout": 86_400, "dependencies": dependencies})
}

fn retry(id: &str) -> String {
    format!("/task/{id}/retry")
}

async fn states(f: &Fixture, ids: &[String]) -> Vec<(String, i64)> {
    let mut found = Vec::new();
    for id in ids {
        let task = f.api.task(id).await;
        found.push((text(&task["status"]), task["run"].as_i64().unwrap()));
    }
    found
}

fn expected(list: &[(&str, i64)]) -> Vec<(String, i64)> {
    list.iter().map(|(status, run)| ((*status).to_owned(), *run)).collect()
}

#[tokio::test]
async fn a_manual_retry_restarts_the_task_and_revives_its_failed_children() {
    let f = Fixture::new().await;
    let mut tasks = vec![
        task("a", &[]),
        task("b", &[("a", true)]),
        task("c", &[("b", true)]),
        task("d", &[("a", false)]),
        task("other", &[]),
        task("both", &[("a", true), ("other", true)]),
    ];
    tasks[0]["retry"] = json!({"max_retries": 1, "initial_delay_secs": 1, "jitter_ms": 0});
    let ids = f.api.create(&json!(tasks)).await;
    f.claim().await;
    f.api.fail(&ids[0]).await;
    f.advance(1);
    f.release().await;
    f.claim().await;
    f.api.fail(&ids[0]).await;
    f.api.fail(&ids[4]).await;
    f.claim().await;
    f.api.succeed(&ids[3]).await;
    assert_eq!(
        states(&f, &ids).await,
        expected(&[("Failure", 1), ("Failure", 0), ("Failure", 0), ("Success", 0), ("Failure", 0), ("Failure", 0)])
    );

    let dry = f.api.post(&retry(&ids[0]), &json!({"dry_run": true})).await;
    assert_eq!(
        (dry.status.as_u16(), &dry.body["dry_run"], &dry.body["task"]["status"]),
        (200, &json!(true), &json!("Pending"))
    );
    assert_eq!(dry.body["revived"], json!([ids[1], ids[2]]));
    assert_eq!(f.api.status(&ids[0]).await, "Failure", "a dry run changes nothing");

    let done = f.api.post(&retry(&ids[0]), &json!({"requested_by": "ada"})).await;
    assert_eq!((done.status.as_u16(), &done.body["revived"]), (200, &dry.body["revived"]), "{}", done.body);
    let shown = &done.body["task"];
    assert_eq!((&shown["attempt"], &shown["run"], &shown["failure_reason"]), (&json!(0), &json!(2), &Value::Null));
    // `both` also failed because of `other`; a succeeded task stays.
    assert_eq!(
        states(&f, &ids).await,
        expected(&[("Pending", 2), ("Waiting", 1), ("Waiting", 1), ("Success", 0), ("Failure", 0), ("Failure", 0)])
    );
    f.db.assert_counters_match().await;

    let events = f.api.get(&format!("/task/{}/events", ids[0])).await.body;
    let last = events.as_array().unwrap().last().unwrap().clone();
    assert_eq!((&last["cause"], &last["actor"]), (&json!("manual"), &json!("ada")));
    f.claim().await;
    f.api.succeed(&ids[0]).await;
    assert_eq!(states(&f, &ids[..3]).await, expected(&[("Success", 2), ("Pending", 1), ("Waiting", 1)]));
    f.claim().await;
    f.api.succeed(&ids[1]).await;
    let of_child = f.api.get(&format!("/task/{}/attempts", ids[1])).await.body;
    assert_eq!((&of_child[0]["run"], &of_child[0]["retry_type"]), (&json!(1), &json!("manual")));
    let attempts = f.api.get(&format!("/task/{}/attempts", ids[0])).await.body;
    let kinds: Vec<&Value> = attempts.as_array().unwrap().iter().map(|a| &a["retry_type"]).collect();
    assert_eq!(kinds, [&Value::Null, &json!("automatic"), &json!("manual")]);

    let second = f.api.post(&retry(&ids[4]), &json!({})).await;
    assert_eq!(second.body["revived"], json!([ids[5]]), "no other parent blocks it now");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_manual_retry_without_cascade_revives_only_the_named_task() {
    let f = Fixture::new().await;
    let ids = f.api.create(&json!([task("a", &[]), task("b", &[("a", true)])])).await;
    f.claim().await;
    f.api.fail(&ids[0]).await;
    let blocked = f.api.post(&retry(&ids[1]), &json!({})).await;
    assert_eq!(blocked.status, 409);
    assert!(
        blocked.body["detail"].as_str().unwrap().contains(&ids[0]),
        "the answer names the blocking parent: {}",
        blocked.body
    );
    let done = f.api.post(&retry(&ids[0]), &json!({"cascade": false})).await;
    assert_eq!(done.body["revived"], json!([]));
    assert_eq!(states(&f, &ids).await, expected(&[("Pending", 1), ("Failure", 0)]));
    let waiting = f.api.post(&retry(&ids[1]), &json!({})).await;
    assert_eq!(waiting.body["task"]["status"], "Waiting", "its parent is open again");
    f.claim().await;
    f.api.succeed(&ids[0]).await;
    assert_eq!(f.api.status(&ids[1]).await, "Pending");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_manual_retry_depends_on_the_status_of_the_task() {
    let f = Fixture::with(&["--stuck-after-secs", "100"]).await;
    let mut waits = task("waits", &[]);
    waits["retry"] = json!({"max_retries": 3, "initial_delay_secs": 50, "jitter_ms": 0});
    let ids =
        f.api.create(&json!([task("runs", &[]), task("done", &[]), task("gone", &[]), waits, task("held", &[])])).await;
    f.api.patch(&format!("/task/pause/{}", ids[4]), &json!({})).await;
    f.claim().await;
    f.api.succeed(&ids[1]).await;
    f.api.delete(&format!("/task/{}", ids[2])).await;
    f.api.fail(&ids[3]).await;
    for i in [0, 1, 4] {
        assert_eq!(f.api.post(&retry(&ids[i]), &json!({})).await.status, 409, "{i}");
    }
    let gone = f.api.post(&retry(&ids[2]), &json!({})).await.body;
    assert_eq!((&gone["task"]["status"], &gone["task"]["run"]), (&json!("Pending"), &json!(1)));
    let early = f.api.post(&retry(&ids[3]), &json!({})).await.body;
    assert_eq!(
        (&early["task"]["status"], &early["task"]["run"], &early["task"]["attempt"]),
        (&json!("Pending"), &json!(1), &json!(0)),
        "the run had risen before"
    );
    assert_eq!(early["task"]["next_retry_at"], Value::Null);
    f.advance(99);
    assert_eq!(f.release().await, 0, "the scheduled retry is dropped");
    assert_eq!(f.api.post(&retry(&ids[0]), &json!({})).await.status, 409, "not stuck yet");
    f.advance(1);
    let stuck = f.api.post(&retry(&ids[0]), &json!({})).await.body;
    assert_eq!((&stuck["task"]["status"], &stuck["task"]["run"]), (&json!("Pending"), &json!(1)));
    let late = f.api.patch(&format!("/task/{}?run=0", ids[0]), &json!({"status": "Success"})).await;
    assert_eq!(late.status, 409, "the old run is fenced off");
    assert_eq!(f.api.get(&format!("/task/{}/attempts", ids[0])).await.body[0]["outcome"], "lost");
    assert_eq!(f.api.post(&retry(&uuid::Uuid::now_v7().to_string()), &json!({})).await.status, 404);
    assert_eq!(f.api.post(&retry(&ids[0]), &json!({"by": "me"})).await.status, 400);
    f.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_manual_retries_start_one_run() {
    let f = Fixture::new().await;
    let ids = f.api.create(&json!((0..20).map(|i| task(&i.to_string(), &[])).collect::<Vec<_>>())).await;
    f.claim().await;
    for id in &ids {
        f.api.fail(id).await;
        let presses = (0..4).map(|_| {
            let (api, path) = (f.api.clone(), retry(id));
            tokio::spawn(async move { api.post(&path, &json!({})).await })
        });
        for answer in join_all(presses).await {
            let answer = answer.unwrap();
            assert!([200, 409].contains(&answer.status.as_u16()), "{}", answer.body);
        }
        assert_eq!(f.api.task(id).await["run"], 1, "never two runs");
    }
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_retried_batch_completes_again() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let body = json!({"on_batch_complete": [receiver.action("/done")],
        "tasks": [task("a", &[]), task("b", &[("a", true)]), task("c", &[]), task("d", &[("c", true)]), task("e", &[])]});
    let answer = f.api.post("/task", &body).await;
    let batch = answer.headers["x-batch-id"].to_str().unwrap().to_owned();
    let ids: Vec<String> = answer.body.as_array().unwrap().iter().map(|t| text(&t["id"])).collect();
    f.claim().await;
    f.api.fail(&ids[0]).await;
    f.api.delete(&format!("/task/{}", ids[2])).await;
    f.api.succeed(&ids[4]).await;
    assert_eq!(f.deliver().await, 1);
    let path = format!("/batch/{batch}/retry");
    let dry = f.api.post(&path, &json!({"dry_run": true})).await.body;
    let done = f.api.post(&path, &json!({"requested_by": "ada"})).await.body;
    assert_eq!(done, json!({"batch_id": batch, "retried": [ids[0]], "revived": [ids[1]], "dry_run": false}));
    assert_eq!((&dry["retried"], &dry["revived"]), (&done["retried"], &done["revived"]));
    let shown = f.api.get(&format!("/batch/{batch}")).await.body;
    assert_eq!(shown["completed_at"], Value::Null, "it is alive again");
    assert_eq!(
        states(&f, &ids).await,
        expected(&[("Pending", 1), ("Waiting", 1), ("Canceled", 0), ("Failure", 0), ("Success", 0)])
    );
    f.db.assert_counters_match().await;
    f.claim().await;
    f.api.succeed(&ids[0]).await;
    f.claim().await;
    f.api.succeed(&ids[1]).await;
    assert_eq!(f.deliver().await, 1);
    let keys = receiver.keys();
    assert_eq!(keys, [format!("batch:{batch}:complete:0"), format!("batch:{batch}:complete:1")]);
    let nothing = f.api.post(&path, &json!({})).await;
    assert_eq!((nothing.status.as_u16(), &nothing.body["retried"]), (200, &json!([])));
    assert_eq!(f.api.post(&format!("/batch/{}/retry", uuid::Uuid::now_v7()), &json!({})).await.status, 404);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_child_waits_again_for_a_manually_retried_parent() {
    let f = Fixture::new().await;
    let ids = f
        .api
        .create(&json!([
            task("a", &[]),
            task("b", &[]),
            task("c", &[("a", false), ("b", true)]),
            task("p", &[("a", false), ("b", true)])
        ]))
        .await;
    f.api.patch(&format!("/task/pause/{}", ids[3]), &json!({})).await;
    f.claim().await;
    f.api.fail(&ids[0]).await;
    // Both wait for `b` alone now. With `a` open again they wait for both again.
    f.api.post(&retry(&ids[0]), &json!({})).await;
    f.db.assert_counters_match().await;
    f.claim().await;
    f.api.succeed(&ids[0]).await;
    assert_eq!(f.api.status(&ids[2]).await, "Waiting", "for b");
    f.api.succeed(&ids[1]).await;
    assert_eq!((f.api.status(&ids[2]).await, f.api.status(&ids[3]).await), ("Pending".into(), "Paused".into()));
    f.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_batch_retries_retry_each_task_once() {
    let f = Fixture::with(&["--webhook-concurrency", "100"]).await;
    let answer = f.api.post("/task", &json!((0..50).map(|i| task(&i.to_string(), &[])).collect::<Vec<_>>())).await;
    let batch = answer.headers["x-batch-id"].to_str().unwrap().to_owned();
    f.claim().await;
    for task in answer.body.as_array().unwrap() {
        f.api.fail(task["id"].as_str().unwrap()).await;
    }
    let presses = (0..4).map(|_| {
        let (api, path) = (f.api.clone(), format!("/batch/{batch}/retry"));
        tokio::spawn(async move { api.post(&path, &json!({})).await })
    });
    let mut retried = 0;
    for answer in join_all(presses).await {
        let answer = answer.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.body);
        retried += answer.body["retried"].as_array().unwrap().len();
    }
    assert_eq!(retried, 50, "each task once");
    assert_eq!(f.db.number("select max(run)::bigint from task").await, 1);
    f.db.assert_counters_match().await;
}
