//! Deduplication: concurrent requests create one task, and children of a duplicate depend on the existing task.

use futures_util::future::join_all;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};

use crate::support::{Answer, Database, Fixture, eventually, text};

/// A task that is created once for each order, as long as it is alive.
fn one(order: &Value) -> Value {
    let mut task = plain("one", order);
    task["dedupe_strategy"] = json!([{"fields": ["order"]}]);
    task
}

/// A task without a dedupe strategy.
fn plain(id: &str, order: &Value) -> Value {
    json!({"id": id, "name": id, "kind": "k", "timeout": 86_400, "metadata": {"order": order}})
}

fn child(id: &str, parents: &[(&str, bool)]) -> Value {
    let needs: Vec<Value> =
        parents.iter().map(|(id, required)| json!({"id": id, "requires_success": required})).collect();
    json!({"id": id, "name": id, "kind": "child", "timeout": 86_400, "dependencies": needs})
}

fn ids(answer: &Answer) -> Vec<String> {
    assert_eq!(answer.status, 201, "{}", answer.body);
    answer.body.as_array().unwrap().iter().map(|task| text(&task["id"])).collect()
}

fn batch(answer: &Answer) -> String {
    answer.headers["x-batch-id"].to_str().unwrap().to_owned()
}

async fn statuses(f: &Fixture, ids: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    for id in ids {
        found.push(f.api.status(id).await);
    }
    found
}

/// The answer shows each task as it is stored.
async fn assert_as_stored(f: &Fixture, answer: &Answer) {
    for told in answer.body.as_array().unwrap() {
        let stored = f.api.task(told["id"].as_str().unwrap()).await;
        for field in ["name", "status", "batch_id", "created_at", "ended_at"] {
            assert_eq!(told[field], stored[field], "{field}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn fifty_concurrent_requests_create_one_task() {
    let f = Fixture::new().await;
    for round in 0..4 {
        let body = json!([one(&json!(round))]);
        let posts = (0..50).map(|_| {
            let (api, body) = (f.api.clone(), body.clone());
            tokio::spawn(async move { api.post("/task", &body).await })
        });
        let answers: Vec<Answer> = join_all(posts).await.into_iter().map(Result::unwrap).collect();
        let count = |status: u16| answers.iter().filter(|a| a.status.as_u16() == status).count();
        assert_eq!((count(201), count(204)), (1, 49));
        assert!(answers.iter().all(|a| a.headers.contains_key("x-batch-id")));
    }
    assert_eq!(f.db.number("select count(*) from task").await, 4);
    assert_eq!(f.db.number("select count(*) from batch").await, 4, "nothing is stored of the others");
    f.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn deduplication_holds_across_instances() {
    let f = Fixture::new().await;
    let same = Database { url: f.db.url.clone(), pool: f.db.pool.clone() };
    let g = Fixture::on(same, &[]).await;
    // Kinds that exclude each other, and several orders in any sequence.
    let of = |kind: &str, other: &str, order: i32| {
        json!({"name": "n", "kind": kind, "metadata": {"order": order}, "dedupe_strategy":
               [{"kind": other, "fields": ["order"]}, {"fields": ["order"]}]})
    };
    let excludes = |kind: &str, other: &str, order: i32| {
        json!({"name": "n", "kind": kind, "metadata": {"order": order}, "dedupe_strategy":
               [{"kind": other, "fields": ["order"]}]})
    };
    for round in 0..10 {
        let posts = (0..24).map(|n: i32| {
            let api = if n % 2 == 0 { f.api.clone() } else { g.api.clone() };
            let body = match n % 4 {
                0 => json!([of("a", "b", round), of("b", "a", round + 100), of("a", "b", round + 200)]),
                1 => json!([of("b", "a", round + 200), of("a", "b", round + 100), of("b", "a", round)]),
                2 => json!([excludes("c", "d", round)]),
                _ => json!([excludes("d", "c", round)]),
            };
            tokio::spawn(async move { api.post("/task", &body).await.status })
        });
        for status in join_all(posts).await {
            assert!([201, 204].contains(&status.unwrap().as_u16()));
        }
    }
    assert_eq!(f.db.number("select count(*) from task_spec where kind in ('a', 'b')").await, 30);
    let either = "select count(distinct (kind, metadata)) from task_spec where kind in ('c', 'd')";
    assert_eq!(f.db.number(either).await, 10, "of two kinds that exclude each other there is one");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn only_the_duplicates_of_a_request_are_skipped() {
    let f = Fixture::new().await;
    let task = |id: &str, kind: &str, order: i32| {
        let mut task = one(&json!(order));
        (task["id"], task["name"], task["kind"]) = (json!(id), json!(id), json!(kind));
        task
    };
    f.api.create(&json!([task("a", "k", 1)])).await;
    let tasks = json!([task("b", "k", 1), task("c", "k", 3), task("d", "k", 3), task("e", "other", 1)]);
    let answer = f.api.post("/task", &json!({"scope": "s", "tasks": tasks})).await;
    let names: Vec<&Value> = answer.body.as_array().unwrap().iter().map(|task| &task["name"]).collect();
    assert_eq!((answer.status.as_u16(), names), (201, vec![&json!("c"), &json!("e")]), "in the order of the request");
    assert_as_stored(&f, &answer).await;
    let summary = f.api.get("/batches?scope=s").await.body[0].clone();
    assert_eq!((&summary["total_tasks"], &summary["kinds"]), (&json!(2), &json!(["k", "other"])));
    assert_eq!(summary["status_counts"]["pending"], 2);

    let mut rest = json!({"scope": "none", "tasks": [task("f", "k", 1), task("g", "k", 3)]});
    let nothing = f.api.post("/task", &rest).await;
    assert_eq!((nothing.status.as_u16(), &nothing.body), (204, &json!("")));
    assert_eq!(f.api.get(&format!("/batch/{}", batch(&nothing))).await.status, 404);
    assert_eq!(f.api.get("/batches?scope=none").await.body, json!([]));
    rest["tasks"] = json!([]);
    assert_eq!(f.api.post("/task", &rest).await.status, 204, "like a request without tasks");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn children_of_a_duplicate_wait_for_the_existing_task() {
    let mut f = Fixture::new().await;
    let mut first = one(&json!(1));
    first["retry"] = json!({"max_retries": 1, "initial_delay_secs": 1, "jitter_ms": 0});
    let there = f.api.create(&json!([first])).await.remove(0);
    let mut required = child("required", &[("one", true)]);
    required["on_failure"] = json!([{"kind": "Webhook", "params": {"url": "http://127.0.0.1:9/", "verb": "Post"}}]);
    let body =
        json!([one(&json!(1)), required, child("loose", &[("one", false)]), child("below", &[("required", true)])]);
    let pending = f.api.post("/task", &body).await;
    f.claim().await;
    let running = f.api.post("/task", &body).await;
    assert_as_stored(&f, &pending).await;
    assert_as_stored(&f, &running).await;
    f.db.assert_counters_match().await;
    assert_eq!(statuses(&f, &ids(&running)).await, ["Waiting"; 3]);
    f.api.fail(&there).await;
    let retrying = f.api.post("/task", &body).await;
    assert_eq!(f.api.status(&there).await, "RetryPending");
    for answer in [&pending, &running, &retrying] {
        assert_eq!(statuses(&f, &ids(answer)).await, ["Waiting"; 3], "a retry moves no child");
    }
    f.advance(1);
    f.release().await;
    f.claim().await;
    f.db.assert_counters_match().await;
    f.api.fail(&there).await;
    for answer in [&pending, &running, &retrying] {
        assert_eq!(statuses(&f, &ids(answer)).await, ["Failure", "Pending", "Failure"]);
    }
    let fallen = f.api.task(&ids(&pending)[0]).await;
    assert_eq!(fallen["failure_type"], "dependency");
    assert_eq!(f.deliver().await, 3, "on_failure of the required ones");
    f.db.assert_counters_match().await;

    let again = f.api.create(&json!([one(&json!(1))])).await.remove(0);
    let later = ids(&f.api.post("/task", &body).await);
    f.claim().await;
    f.api.succeed(&again).await;
    assert_eq!(statuses(&f, &later).await, ["Pending", "Pending", "Waiting"]);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn children_of_an_ended_existing_task_follow_its_outcome() {
    for (end, expected) in [
        ("Success", ["Pending", "Pending", "Waiting", "Waiting", "Waiting"]),
        ("Failure", ["Failure", "Pending", "Failure", "Pending", "Failure"]),
        ("Canceled", ["Failure", "Pending", "Failure", "Pending", "Failure"]),
    ] {
        let mut f = Fixture::new().await;
        let old = f.api.create(&json!([plain("a", &json!(1)), child("old", &[("a", false)])])).await;
        f.claim().await;
        match end {
            "Success" => f.api.succeed(&old[0]).await,
            "Failure" => f.api.fail(&old[0]).await,
            _ => f.api.delete(&format!("/task/{}", old[0])).await,
        };
        let mut duplicate = plain("one", &json!(1));
        duplicate["dedupe_strategy"] = json!([{"status": end, "fields": ["order"]}]);
        let hook = json!([{"kind": "Webhook", "params": {"url": "http://127.0.0.1:9/", "verb": "Post"}}]);
        let mut required = child("required", &[("one", true)]);
        required["on_failure"] = hook.clone();
        let body = json!({"on_batch_complete": hook, "tasks": [
            duplicate,
            required,
            child("loose", &[("one", false)]),
            child("below", &[("required", true)]),
            child("beside", &[("required", false)]),
            child("both", &[("required", true), ("loose", true)]),
        ]});
        let before = f.api.task(&old[1]).await;
        let answer = f.api.post("/task", &body).await;
        assert_eq!(statuses(&f, &ids(&answer)).await, expected, "{end}");
        assert_as_stored(&f, &answer).await;
        assert_eq!(f.api.task(&old[1]).await, before, "children that had been there are not moved again");
        f.db.assert_counters_match().await;
        let events = f.api.get(&format!("/task/{}/events", ids(&answer)[0])).await.body;
        let causes: Vec<&Value> = events.as_array().unwrap().iter().map(|event| &event["cause"]).collect();
        if end == "Success" {
            assert_eq!(causes, ["create"]);
        } else {
            assert_eq!(causes, ["create", "dependency"]);
            assert_eq!(f.deliver().await, 1, "on_failure");
            let only = json!({"tasks": [body["tasks"][0], body["tasks"][1]], "on_batch_complete": hook});
            let answer = f.api.post("/task", &only).await;
            assert_eq!(statuses(&f, &ids(&answer)).await, ["Failure"]);
            assert!(f.api.get(&format!("/batch/{}", batch(&answer))).await.body["completed_at"].is_string());
            assert_eq!(f.deliver().await, 2, "on_failure, and the batch is complete");
        }
        while f.claim().await > 0 {}
        f.db.assert_counters_match().await;
    }
}

#[tokio::test]
async fn tasks_of_the_same_request_are_deduplicated() {
    let f = Fixture::new().await;
    let mut second = one(&json!(1));
    second["id"] = json!("second");
    let body = json!([
        plain("first", &json!(1)),
        second,
        child("a", &[("first", false), ("second", true)]),
        child("b", &[("second", true)])
    ]);
    let created = f.api.create(&body).await;
    assert_eq!(statuses(&f, &created).await, ["Pending", "Waiting", "Waiting"]);
    let links = f.db.number("select count(*) from link where requires_success").await;
    assert_eq!((links, f.db.number("select count(*) from link").await), (2, 2), "two of one are one, and required");
    f.db.assert_counters_match().await;
    f.claim().await;
    f.api.fail(&created[0]).await;
    assert_eq!(statuses(&f, &created).await, ["Failure", "Failure", "Failure"]);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_dedupe_matcher_compares_the_status_it_names() {
    let f = Fixture::new().await;
    let with = |status: Value, order: i32| {
        let mut task = one(&json!(order));
        task["dedupe_strategy"][0]["status"] = status;
        json!([task])
    };
    let skips = async |status: Value, order: i32| {
        let body = with(status, order);
        let answer = f.api.post("/task", &body).await.status.as_u16();
        assert!([201, 204].contains(&answer));
        answer == 204
    };
    assert!(!skips(json!("Pending"), 1).await);
    assert!(skips(json!("pending"), 1).await);
    f.claim().await;
    assert!(!skips(json!("Pending"), 1).await, "that one is Running");
    assert!(skips(json!("Running"), 1).await);
    assert!(skips(json!("PENDING"), 1).await);
    assert!(skips(Value::Null, 1).await, "any that is alive");

    let there = f.api.create(&json!([plain("a", &json!(2))])).await.remove(0);
    f.api.patch(&format!("/task/pause/{there}"), &json!({})).await;
    assert!(skips(json!("Paused"), 2).await && skips(Value::Null, 2).await);
    f.api.delete(&format!("/task/{there}")).await;
    assert!(
        skips(json!("Canceled"), 2).await && !skips(Value::Null, 2).await,
        "an ended task does not count unless its status is named"
    );
    // Several matchers: one is enough. Another kind: only that one counts.
    let mut task = one(&json!(2));
    task["dedupe_strategy"] = json!([{"status": "Success", "fields": ["order"]}, {"status": "Canceled"}]);
    assert_eq!(f.api.post("/task", &json!([task])).await.status, 204);
    task["dedupe_strategy"] = json!([{"kind": "other"}, {"kind": "other", "fields": ["order"]}]);
    assert_eq!(f.api.post("/task", &json!([task])).await.status, 201);
    task["kind"] = json!("other");
    task["dedupe_strategy"] = json!([{"kind": "k", "fields": ["order"]}]);
    assert_eq!(f.api.post("/task", &json!([task])).await.status, 204);
    task["metadata"] = Value::Null;
    task["dedupe_strategy"] = json!([{"kind": "k"}]);
    assert_eq!(f.api.post("/task", &json!([task])).await.status, 204, "the kind alone");
    task["dedupe_strategy"] = json!([{"fields": []}]);
    task["kind"] = json!("third");
    assert_eq!(f.api.post("/task", &json!([task])).await.status, 201);
    assert_eq!(f.api.post("/task", &json!([task])).await.status, 204);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn dedupe_values_are_compared_as_postgresql_compares_them() {
    let values: Vec<Value> = [
        "1",
        "1.0",
        "10e-1",
        "\"1\"",
        "0",
        "-0.0",
        "null",
        "\"null\"",
        "false",
        "[]",
        "[1]",
        "[1, 2]",
        "[2, 1]",
        "[1, 1]",
        "{}",
        r#"{"x": 1}"#,
        r#"{"x": 1.00}"#,
        r#"{"x": 1, "y": 2}"#,
        r#"{"y": 2, "x": 1}"#,
        r#"{"x": {"z": 1}}"#,
        r#"{"x": {"z": 1, "w": [1]}}"#,
        "1e19",
        "10000000000000000000",
        "9007199254740993",
        "9007199254740992",
        "9007199254740992.0",
        "1.5",
        "0.1",
        "0.10",
        "1e-7",
        "\"a\"",
        "\"A\"",
    ]
    .iter()
    .map(|text| serde_json::from_str(text).unwrap())
    .collect();
    // One request with all tasks and one request for each skip the same tasks.
    let all = Fixture::new().await;
    let mut tasks: Vec<Value> = values.iter().map(one).collect();
    for (i, task) in tasks.iter_mut().enumerate() {
        task["id"] = json!(i.to_string());
        task["name"] = json!(i.to_string());
    }
    let together = all.api.post("/task", &json!(tasks)).await;
    let names = |tasks: &Value| tasks.as_array().unwrap().iter().map(|task| text(&task["name"])).collect::<Vec<_>>();
    let apart = Fixture::new().await;
    let mut created = Vec::new();
    for task in &tasks {
        let answer = apart.api.post("/task", &json!([task])).await;
        if answer.status == 201 {
            created.extend(names(&answer.body));
        }
    }
    assert_eq!(names(&together.body), created);
    let skipped: Vec<usize> = (0..values.len()).filter(|i| !created.contains(&i.to_string())).collect();
    assert_eq!(skipped, [1, 2, 5, 16, 18, 22, 25, 28]);

    // An existing task may have further fields; it must have those that are compared.
    let lacks =
        json!({"name": "n", "kind": "k", "metadata": {"b": 1, "a": 1}, "dedupe_strategy": [{"fields": ["b", "a"]}]});
    let f = Fixture::new().await;
    f.api.create(&json!([{"name": "n", "kind": "k", "metadata": {"a": 1}}, {"name": "n", "kind": "k"}])).await;
    assert_eq!(f.api.post("/task", &json!([lacks])).await.status, 201);
    let more = json!({"name": "n", "kind": "k", "metadata": {"c": 5, "b": 1.0, "a": 1}, "dedupe_strategy": [{"fields": ["a", "b"]}]});
    assert_eq!(f.api.post("/task", &json!([more])).await.status, 204);
}

#[tokio::test]
async fn a_repeated_deduplicated_request_gets_its_first_answer() {
    let f = Fixture::new().await;
    let post = async |key: &str, body: &Value| f.api.post_with("/task", &[("Idempotency-Key", key)], body).await;
    let there = f.api.create(&json!([one(&json!(1)), plain("a", &json!(2))])).await;
    f.claim().await;
    f.api.fail(&there[1]).await;
    let mut failed = plain("failed", &json!(2));
    failed["dedupe_strategy"] = json!([{"status": "failure", "fields": ["order"]}]);
    let body = json!([
        one(&json!(1)),
        child("waits", &[("one", true)]),
        failed,
        child("falls", &[("failed", true)]),
        child("goes", &[("failed", false)]),
        plain("new", &json!(3)),
    ]);
    let first = post("key", &body).await;
    assert_eq!(statuses(&f, &ids(&first)).await, ["Waiting", "Failure", "Pending", "Pending"]);
    assert_as_stored(&f, &first).await;
    f.advance(60);
    f.claim().await;
    f.api.succeed(&there[0]).await;
    let again = post("key", &body).await;
    assert_eq!((again.status, &again.body), (first.status, &first.body), "as it was answered, not as it is now");
    assert_eq!(batch(&again), batch(&first));
    assert_eq!(post("key", &json!([one(&json!(1))])).await.status, 422);

    let all = json!([one(&json!(4))]);
    f.api.create(&all).await;
    let nothing = post("none", &all).await;
    assert_eq!(nothing.status, 204);
    let there = f.api.get("/task?status=pending&kind=k").await.body;
    for task in there.as_array().unwrap() {
        f.api.delete(&format!("/task/{}", task["id"].as_str().unwrap())).await;
    }
    let again = post("none", &all).await;
    assert_eq!((again.status.as_u16(), batch(&again)), (204, batch(&nothing)), "although it could be created now");
    assert_eq!(f.api.post("/task", &all).await.status, 201);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn every_problem_of_a_dedupe_matcher_is_named() {
    let f = Fixture::new().await;
    let body = json!([{"name": "n", "kind": "k", "metadata": {"a": 1}, "dedupe_strategy":
        [{"fields": ["a", "b"]}, {"status": "done"}, {"knid": "x"}, {"fields": "a"}]}]);
    let answer = f.api.post("/task", &body).await;
    assert_eq!(answer.status, 400);
    let mut details: Vec<String> = answer.body["details"].as_array().unwrap().iter().map(text).collect();
    details.sort();
    let start = |line: &String| line.split(": ").next().unwrap().to_owned();
    let paths = ["fields[1]", "status", "knid", "fields"];
    let expected: Vec<String> =
        paths.iter().enumerate().map(|(i, path)| format!("[0].dedupe_strategy[{i}].{path}")).collect();
    assert_eq!(details.iter().map(start).collect::<Vec<_>>(), expected, "{details:?}");
    assert_eq!(f.db.number("select count(*) from task").await, 0);
}

#[tokio::test]
async fn a_stopped_batch_moves_its_children_in_other_batches() {
    let f = Fixture::new().await;
    let first = f.api.post("/task", &json!([one(&json!(1)), child("own", &[("one", true)])])).await;
    let body = json!([
        one(&json!(1)),
        child("a", &[("one", true)]),
        child("b", &[("one", false)]),
        child("c", &[("a", true)])
    ]);
    let second = f.api.post("/task", &body).await;
    let stopped = f.api.delete(&format!("/batch/{}", batch(&first))).await;
    assert_eq!((&stopped.body["canceled_pending"], &stopped.body["canceled_waiting"]), (&json!(1), &json!(1)));
    assert_eq!(statuses(&f, &ids(&first)).await, ["Canceled", "Canceled"], "no child in the batch itself fails");
    assert_eq!(statuses(&f, &ids(&second)).await, ["Failure", "Pending", "Failure"]);
    f.db.assert_counters_match().await;

    let third = f.api.post("/task", &json!([one(&json!(1)), child("own", &[("one", true)])])).await;
    let fourth = f.api.post("/task", &body).await;
    f.api.delete(&format!("/batch/{}", batch(&fourth))).await;
    assert_eq!(statuses(&f, &ids(&third)).await, ["Pending", "Waiting"], "parents in other batches continue");
    assert_eq!(statuses(&f, &ids(&fourth)).await, ["Canceled"; 3]);
    f.claim().await;
    f.api.succeed(&ids(&third)[0]).await;
    assert_eq!(statuses(&f, &ids(&third)).await, ["Success", "Pending"]);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_manual_retry_revives_children_in_other_batches() {
    let f = Fixture::new().await;
    let retry = async |id: &str| f.api.post(&format!("/task/{id}/retry"), &json!({})).await;
    let there = f.api.create(&json!([one(&json!(1))])).await.remove(0);
    let body = json!([
        one(&json!(1)),
        plain("other", &json!(2)),
        child("needs", &[("one", true), ("other", true)]),
        child("loose", &[("one", false), ("other", true)]),
        child("below", &[("needs", true)]),
    ]);
    let answer = f.api.post("/task", &body).await;
    let children = ids(&answer);
    f.claim().await;
    f.api.fail(&there).await;
    assert_eq!(statuses(&f, &children).await, ["Running", "Failure", "Waiting", "Failure"]);
    let blocked = retry(&children[1]).await;
    assert_eq!(blocked.status, 409);
    assert!(blocked.body["detail"].as_str().unwrap().contains(&there), "a parent in another batch blocks it");
    let done = retry(&there).await;
    assert_eq!(done.body["revived"], json!([children[1], children[3]]), "{}", done.body);
    f.db.assert_counters_match().await;
    // A child that had counted it as ended waits for it again.
    f.api.succeed(&children[0]).await;
    assert_eq!(statuses(&f, &children[1..]).await, ["Waiting", "Waiting", "Waiting"]);
    f.claim().await;
    f.api.succeed(&there).await;
    assert_eq!(statuses(&f, &children[1..]).await, ["Pending", "Pending", "Waiting"]);
    f.db.assert_counters_match().await;

    // A child that was created after its parent had failed is revived as well.
    let there = f.api.create(&json!([plain("a", &json!(5))])).await.remove(0);
    while f.claim().await > 0 {}
    f.api.fail(&there).await;
    let mut duplicate = plain("one", &json!(5));
    duplicate["dedupe_strategy"] = json!([{"status": "Failure", "fields": ["order"]}]);
    let body = json!([duplicate, child("required", &[("one", true)]), child("loose", &[("one", false)])]);
    let answer = f.api.post("/task", &body).await;
    let late = ids(&answer);
    assert_eq!(statuses(&f, &late).await, ["Failure", "Pending"]);
    let nothing = f.api.post(&format!("/batch/{}/retry", batch(&answer)), &json!({})).await;
    assert_eq!((nothing.status.as_u16(), &nothing.body["retried"]), (200, &json!([])));
    assert_eq!(retry(&there).await.body["revived"], json!([late[0]]));
    assert_eq!(statuses(&f, &late).await, ["Waiting", "Pending"]);
    f.db.assert_counters_match().await;
    f.claim().await;
    f.api.succeed(&there).await;
    assert_eq!(statuses(&f, &late).await, ["Pending", "Running"]);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_graph_shows_the_links_to_other_batches() {
    let f = Fixture::new().await;
    let first = f.api.post("/task", &json!([one(&json!(1)), child("own", &[("one", true)])])).await;
    let second = f.api.post("/task", &json!([one(&json!(1)), child("a", &[("one", false)])])).await;
    let (old, new) = (ids(&first), ids(&second));
    let link =
        |child: &str, required: bool| json!({"parent_id": old[0], "child_id": child, "requires_success": required});
    let dag = async |answer: &Answer| f.api.get(&format!("/dag/{}", batch(answer))).await.body;
    let (above, below) = (dag(&first).await, dag(&second).await);
    assert_eq!(above["links"], json!([link(&old[1], true), link(&new[0], false)]));
    assert_eq!(below["links"], json!([link(&new[0], false)]));
    assert_eq!((above["tasks"].as_array().unwrap().len(), below["tasks"].as_array().unwrap().len()), (2, 1));
}

#[tokio::test]
async fn retention_deletes_links_between_batches() {
    for newer_first in [false, true] {
        let f = Fixture::new().await;
        let first = f.api.post("/task", &json!([one(&json!(1))])).await;
        let second = f.api.post("/task", &json!([one(&json!(1)), child("a", &[("one", true)])])).await;
        f.claim().await;
        f.api.succeed(&ids(&first)[0]).await;
        if newer_first {
            f.db.execute("update batch set completed_at = null").await;
        }
        f.claim().await;
        if newer_first {
            f.api.succeed(&ids(&second)[0]).await;
        }
        f.advance(8 * 86_400);
        assert_eq!(f.clean_up(7).await, 1);
        assert_eq!(f.db.number("select count(*) from link").await, 0);
        if !newer_first {
            assert_eq!(f.api.status(&ids(&second)[0]).await, "Running");
            f.api.succeed(&ids(&second)[0]).await;
            f.db.assert_counters_match().await;
        }
    }
}

/// Waits until so many requests wait for a lock with `Patience::Long`. By then each has given up its first, brief try,
/// with the locks of that.
async fn blocked(f: &Fixture, count: usize) {
    eventually(&format!("{count} to be blocked"), async || {
        // A request that waits patiently keeps its permit until it is done, so the order of the two looks does not matter.
        let patient = f.store.lock_waiters() == count;
        (patient && usize::try_from(f.db.waiting_for_locks().await).unwrap() == count).then_some(())
    })
    .await;
}

/// Blocks requests that write links, but not those that read them, until the transaction ends.
async fn hold_links(db: &Database) -> PgConnection {
    let mut connection = PgConnection::connect(&db.url).await.unwrap();
    sqlx::raw_sql("begin; lock table link in share mode").execute(&mut connection).await.unwrap();
    connection
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_running_cascade_fails_children_added_meanwhile() {
    let f = Fixture::new().await;
    let mut above = json!([plain("above", &json!(0)), one(&json!(1))]);
    above[1]["dependencies"] = json!([{"id": "above"}]);
    let old = f.api.create(&above).await;
    f.claim().await;
    let mut held = hold_links(&f.db).await;
    let body = json!([one(&json!(1)), child("a", &[("one", true)]), child("b", &[("a", true)])]);
    let api = f.api.clone();
    let posted = tokio::spawn(async move { api.post("/task", &body).await });
    blocked(&f, 1).await;
    // The cascade has read the links before the new ones exist, and waits for the task that gets them.
    let (api, id) = (f.api.clone(), old[0].clone());
    let failed = tokio::spawn(async move { api.fail(&id).await });
    blocked(&f, 2).await;
    sqlx::raw_sql("commit").execute(&mut held).await.unwrap();
    let answer = posted.await.unwrap();
    assert_eq!(failed.await.unwrap().status, 200);
    assert_eq!(statuses(&f, &old).await, ["Failure", "Failure"]);
    assert_eq!(statuses(&f, &ids(&answer)).await, ["Failure", "Failure"]);
    f.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_running_manual_retry_counts_children_added_meanwhile() {
    let f = Fixture::new().await;
    let there = f.api.create(&json!([plain("a", &json!(1))])).await.remove(0);
    f.claim().await;
    f.api.fail(&there).await;
    let mut held = hold_links(&f.db).await;
    let mut duplicate = plain("one", &json!(1));
    duplicate["dedupe_strategy"] = json!([{"status": "Failure", "fields": ["order"]}]);
    let needs = [("one", false), ("other", true)];
    let body = json!([duplicate, plain("other", &json!(2)), child("a", &needs), child("b", &[("one", true)])]);
    let api = f.api.clone();
    let posted = tokio::spawn(async move { api.post("/task", &body).await });
    blocked(&f, 1).await;
    let (api, id) = (f.api.clone(), there.clone());
    let retried = tokio::spawn(async move { api.post(&format!("/task/{id}/retry"), &json!({})).await });
    blocked(&f, 2).await;
    sqlx::raw_sql("commit").execute(&mut held).await.unwrap();
    let children = ids(&posted.await.unwrap());
    assert_eq!(retried.await.unwrap().body["revived"], json!([children[2]]));
    f.db.assert_counters_match().await;
    f.claim().await;
    f.api.succeed(&there).await;
    assert_eq!(statuses(&f, &children).await, ["Running", "Waiting", "Pending"]);
    f.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_parent_that_ends_during_the_request_moves_its_new_children() {
    for success in [true, false] {
        let f = Fixture::new().await;
        let there = f.api.create(&json!([one(&json!(1))])).await.remove(0);
        f.claim().await;
        let body = json!([one(&json!(1)), child("a", &[("one", true)])]);
        let mut held = hold_links(&f.db).await;
        let api = f.api.clone();
        let posted = tokio::spawn(async move { api.post("/task", &body).await });
        blocked(&f, 1).await;
        let (api, id) = (f.api.clone(), there.clone());
        let ended = tokio::spawn(async move { if success { api.succeed(&id).await } else { api.fail(&id).await } });
        blocked(&f, 2).await;
        sqlx::raw_sql("commit").execute(&mut held).await.unwrap();
        let answer = posted.await.unwrap();
        assert_eq!((&answer.body[0]["status"], ended.await.unwrap().status.as_u16()), (&json!("Waiting"), 200));
        let expected = if success { "Pending" } else { "Failure" };
        assert_eq!(statuses(&f, &ids(&answer)).await, [expected]);
        f.db.assert_counters_match().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_task_that_ends_between_search_and_lock_is_still_the_parent() {
    let f = Fixture::new().await;
    let there = f.api.create(&json!([one(&json!(1))])).await.remove(0);
    f.claim().await;
    let mut held = PgConnection::connect(&f.db.url).await.unwrap();
    sqlx::raw_sql("begin; select from task for update").execute(&mut held).await.unwrap();
    let (api, id) = (f.api.clone(), there.clone());
    let ended = tokio::spawn(async move { api.fail(&id).await });
    blocked(&f, 1).await;
    let body = json!([one(&json!(1)), child("a", &[("one", true)]), child("b", &[("one", false)])]);
    let api = f.api.clone();
    let posted = tokio::spawn(async move { api.post("/task", &body).await });
    blocked(&f, 2).await;
    sqlx::raw_sql("commit").execute(&mut held).await.unwrap();
    assert_eq!(ended.await.unwrap().status, 200);
    let answer = posted.await.unwrap();
    assert_as_stored(&f, &answer).await;
    assert_eq!(statuses(&f, &ids(&answer)).await, ["Failure", "Pending"]);
    f.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_deduplicated_requests_leave_no_task_stuck() {
    let f = Fixture::with(&["--webhook-concurrency", "1000"]).await;
    let storms = (0..6).map(|worker: usize| {
        let api = f.api.clone();
        tokio::spawn(async move {
            for round in 0..25usize {
                let order = |n: usize| json!((worker + round + n) % 5);
                let mut tasks = vec![one(&order(0)), one(&order(1)), child("a", &[("x0", true), ("x1", false)])];
                tasks.push(child("b", &[("a", true)]));
                for (i, task) in tasks.iter_mut().take(2).enumerate() {
                    task["id"] = json!(format!("x{i}"));
                    let status = [Value::Null, json!("failure"), json!("success")][(worker + round) % 3].clone();
                    task["dedupe_strategy"]
                        .as_array_mut()
                        .unwrap()
                        .push(json!({"status": status, "fields": ["order"]}));
                }
                tasks[3]["metadata"] = json!({"order": order(2)});
                tasks[3]["kind"] = json!("k");
                let answer = api.post("/task", &json!(tasks)).await;
                assert_eq!(answer.status, 201, "{}", answer.body);
                let listed = api.get("/task?status=running,waiting,failure&page_size=20").await.body;
                for (i, task) in listed.as_array().unwrap().iter().enumerate() {
                    let id = task["id"].as_str().unwrap();
                    let done = match (i + worker + round) % 6 {
                        0 => api.fail(id).await,
                        1 => api.post(&format!("/task/{id}/retry"), &json!({})).await,
                        2 if round % 5 == 0 => api.delete(&format!("/task/{id}")).await,
                        3 if round % 7 == 0 => {
                            api.delete(&format!("/batch/{}", task["batch_id"].as_str().unwrap())).await
                        }
                        _ => api.succeed(id).await,
                    };
                    assert!([200, 409].contains(&done.status.as_u16()), "{}", done.body);
                }
            }
        })
    });
    let storms: Vec<_> = storms.collect();
    while !storms.iter().all(tokio::task::JoinHandle::is_finished) {
        f.claim().await;
    }
    for storm in storms {
        storm.await.unwrap();
    }
    f.db.assert_counters_match().await;
    // No task is stuck: with every report further tasks can start.
    loop {
        f.claim().await;
        let running = f.api.get("/task?status=running&page_size=100").await.body;
        if running.as_array().unwrap().is_empty() {
            break;
        }
        for task in running.as_array().unwrap() {
            f.api.succeed(task["id"].as_str().unwrap()).await;
        }
    }
    assert_eq!(f.db.number("select count(*) from task where ended_at is null").await, 0);
    f.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_request_with_thousands_of_dedupe_keys_takes_at_most_1024_locks() {
    let f = Fixture::new().await;
    let mut tasks: Vec<Value> = (0..5000)
        .map(|n| {
            let mut task = one(&json!(n));
            task["id"] = json!(n.to_string());
            task["dedupe_strategy"] = json!([{"fields": ["order"]}, {"status": "Success", "fields": ["order"]}]);
            task
        })
        .collect();
    tasks.push(child("last", &[("0", true)]));
    let mut held = hold_links(&f.db).await;
    let (api, body) = (f.api.clone(), json!(tasks));
    let posted = tokio::spawn(async move { api.post("/task", &body).await });
    blocked(&f, 1).await;
    // The lock table of the server has room for a few thousand locks of all sessions.
    let locks = "select count(*) from pg_locks where locktype = 'advisory' and granted and \
                 database = (select oid from pg_database where datname = current_database())";
    let locks = f.db.number(locks).await;
    assert!((900..=1024).contains(&locks), "{locks} locks");
    sqlx::raw_sql("commit").execute(&mut held).await.unwrap();
    assert_eq!(ids(&posted.await.unwrap()).len(), 5001);
    assert_eq!(f.api.post("/task", &json!(tasks[..5000])).await.status, 204);
    assert_eq!(f.db.number("select count(*) from task").await, 5001);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn ids_of_children_follow_a_parent_whose_clock_was_ahead() {
    let f = Fixture::new().await;
    let ahead = "0fffffff-ffff-7fff-bfff-ffffffffffff";
    let there = f.api.create(&json!([one(&json!(1))])).await.remove(0);
    f.db.execute(&format!(
        "update task set id = '{ahead}'; update task_spec set id = '{ahead}'; update event set task_ids = '{{{ahead}}}'"
    ))
    .await;
    let body = json!([one(&json!(1)), child("a", &[("one", true)]), child("b", &[("a", true)])]);
    let children = f.api.create(&body).await;
    assert!(there.as_str() < ahead && ahead < children[0].as_str() && children[0] < children[1], "{children:?}");
    f.claim().await;
    f.api.fail(ahead).await;
    assert_eq!(f.api.post(&format!("/task/{ahead}/retry"), &json!({})).await.body["revived"], json!(children));
    f.db.assert_counters_match().await;
}
