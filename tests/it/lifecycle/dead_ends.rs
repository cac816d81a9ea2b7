//! Dead ends: after a task ends badly, its alive ancestors on which nothing alive depends are canceled.

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::{Database, Fixture, Receiver, Reply, text};

const ON: [&str; 2] = ["--dead-end-cancel", "1"];

fn task(id: &str, needs: &[(&str, bool)]) -> Value {
    let dependencies: Vec<Value> =
        needs.iter().map(|(id, required)| json!({"id": id, "requires_success": required})).collect();
    json!({"id": id, "name": id, "kind": "k", "timeout": 86_400, "dependencies": dependencies})
}

fn with(mut task: Value, name: &str, value: Value) -> Value {
    task[name] = value;
    task
}

async fn statuses(f: &Fixture, ids: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    for id in ids {
        found.push(f.api.status(id).await);
    }
    found
}

async fn cancel(f: &Fixture, id: &str) {
    let answer = f.api.delete(&format!("/task/{id}")).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
}

/// The last event of a task: its status, cause and actor.
async fn last_move(f: &Fixture, id: &str) -> (String, String, String) {
    let events = f.api.get(&format!("/task/{id}/events")).await.body;
    let last = events.as_array().unwrap().last().unwrap().clone();
    (text(&last["to"]), text(&last["cause"]), text(&last["actor"]))
}

/// Two roots with one child.
fn fan_in() -> Value {
    json!([task("a", &[]), task("b", &[]), task("c", &[("a", true), ("b", true)])])
}

#[tokio::test]
async fn dead_ends_are_canceled_only_if_the_setting_or_the_batch_says_so() {
    for (setting, said, canceled) in [
        (None, None, false),
        (None, Some(false), false),
        (None, Some(true), true),
        (Some("true"), None, true),
        (Some("true"), Some(false), false),
        (Some("0"), Some(true), true),
    ] {
        let args: Vec<&str> = setting.into_iter().flat_map(|value| ["--dead-end-cancel", value]).collect();
        let f = Fixture::with(&args).await;
        let mut body = json!({"tasks": fan_in()});
        if let Some(said) = said {
            body["dead_end_cancel"] = json!(said);
        }
        let ids = f.api.create(&body).await;
        f.claim().await;
        assert_eq!(f.api.fail(&ids[0]).await.body["status"], "Failure");
        let other = if canceled { "Canceled" } else { "Running" };
        assert_eq!(statuses(&f, &ids).await, ["Failure", other, "Failure"], "{setting:?} and {said:?}");
        f.db.assert_counters_match().await;
    }
    let f = Fixture::with(&ON).await;
    let ids = f.api.create(&fan_in()).await;
    cancel(&f, &ids[2]).await;
    assert_eq!(statuses(&f, &ids).await, ["Canceled", "Canceled", "Canceled"], "an array of tasks uses the setting");
}

#[tokio::test]
async fn a_dead_end_is_canceled_in_every_alive_status() {
    let f = Fixture::with(&ON).await;
    let retry = json!({"max_retries": 3, "jitter_ms": 0});
    for state in ["Pending", "Running", "RetryPending", "Paused", "Waiting"] {
        let mut tasks = vec![
            task("root", &[]),
            with(task("parent", &[]), "retry", retry.clone()),
            task("child", &[("parent", false)]),
        ];
        tasks[1]["dependencies"] = if state == "Waiting" { json!([{"id": "root"}]) } else { json!([]) };
        let ids = f.api.create(&json!(tasks)).await;
        let parent = &ids[1];
        if matches!(state, "Running" | "RetryPending") {
            f.claim().await;
        }
        match state {
            "RetryPending" => drop(f.api.fail(parent).await),
            "Paused" => drop(f.api.patch(&format!("/task/pause/{parent}"), &json!({})).await),
            _ => {}
        }
        assert_eq!(f.api.status(parent).await, state);
        cancel(&f, &ids[2]).await;
        let found = f.api.task(parent).await;
        assert_eq!((&found["status"], &found["next_retry_at"]), (&json!("Canceled"), &Value::Null), "{state}");
        assert!(found["ended_at"].is_string());
        assert_eq!(last_move(&f, parent).await, ("Canceled".into(), "dead_end".into(), "api".into()), "{state}");
        let above = f.api.status(&ids[0]).await;
        assert_eq!(above == "Canceled", state == "Waiting", "{state}: the root is above the waiting one only");
        let attempts = f.api.get(&format!("/task/{parent}/attempts")).await.body;
        let outcomes: Vec<String> = attempts.as_array().unwrap().iter().map(|a| text(&a["outcome"])).collect();
        let expected: &[&str] = match state {
            "Running" => &["canceled"],
            "RetryPending" => &["retried"],
            _ => &[],
        };
        assert_eq!(outcomes, expected, "{state}");
    }
    f.advance(86_400 * 2);
    assert_eq!(f.release().await, 0, "canceled is final");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_success_cancels_no_parent_and_an_alive_child_keeps_it() {
    let f = Fixture::with(&ON).await;
    // Both children can end while their parent is alive: it is retried manually after they began.
    let ids = f.api.create(&json!([task("p", &[]), task("c", &[("p", false)]), task("d", &[("p", false)])])).await;
    f.claim().await;
    f.api.fail(&ids[0]).await;
    f.claim().await;
    assert_eq!(f.api.post(&format!("/task/{}/retry", ids[0]), &json!({})).await.status, 200);
    f.api.fail(&ids[1]).await;
    assert_eq!(statuses(&f, &ids).await, ["Pending", "Failure", "Running"]);
    f.api.succeed(&ids[2]).await;
    assert_eq!(statuses(&f, &ids).await, ["Pending", "Failure", "Success"], "a success triggers no cancellation");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_child_that_waits_for_its_retry_keeps_its_parent_alive() {
    let f = Fixture::with(&ON).await;
    let retry = json!({"max_retries": 1, "initial_delay_secs": 10, "jitter_ms": 0});
    let tasks = json!([
        task("p", &[]),
        with(task("c", &[("p", false)]), "retry", retry),
        task("x", &[]),
        task("d", &[("p", false), ("x", false)]),
        task("e", &[("x", false)]),
    ]);
    let ids = f.api.create(&tasks).await;
    f.claim().await;
    f.api.fail(&ids[0]).await;
    f.claim().await;
    f.api.fail(&ids[1]).await;
    f.api.post(&format!("/task/{}/retry", ids[0]), &json!({})).await;
    assert_eq!(statuses(&f, &ids).await, ["Pending", "RetryPending", "Running", "Waiting", "Waiting"]);
    cancel(&f, &ids[3]).await;
    assert_eq!(statuses(&f, &ids[..2]).await, ["Pending", "RetryPending"], "its child is alive");
    f.advance(10);
    f.release().await;
    f.claim().await;
    f.api.fail(&ids[1]).await;
    assert_eq!(statuses(&f, &ids).await, ["Canceled", "Failure", "Running", "Canceled", "Waiting"]);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_failure_cascades_down_before_dead_ends_are_canceled_upward() {
    let f = Fixture::with(&ON).await;
    let ids = f
        .api
        .create(&json!([
            task("a", &[]),
            task("root", &[]),
            task("middle", &[("root", true)]),
            task("low", &[("a", true), ("middle", true)]),
            task("lower", &[("low", true), ("middle", false)]),
            task("side", &[]),
            task("kept", &[("side", true)]),
            task("last", &[("lower", true), ("side", true)]),
        ]))
        .await;
    f.claim().await;
    f.api.fail(&ids[0]).await;
    assert_eq!(
        statuses(&f, &ids).await,
        ["Failure", "Canceled", "Canceled", "Failure", "Failure", "Running", "Waiting", "Failure"]
    );
    for (i, cause) in [(0, "report"), (1, "dead_end"), (2, "dead_end"), (3, "dependency"), (7, "dependency")] {
        assert_eq!(last_move(&f, &ids[i]).await.1, cause, "task {i}");
    }
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_dead_end_barrier_is_canceled_and_its_parents_stay() {
    let f = Fixture::with(&ON).await;
    let tasks = json!([
        task("top", &[]),
        with(task("barrier", &[("top", true)]), "dead_end_barrier", json!(true)),
        task("below", &[("barrier", true)]),
        task("lowest", &[("below", true)]),
    ]);
    let ids = f.api.create(&tasks).await;
    f.claim().await;
    cancel(&f, &ids[3]).await;
    assert_eq!(statuses(&f, &ids).await, ["Running", "Canceled", "Canceled", "Canceled"]);
    let ids = f.api.create(&tasks).await;
    cancel(&f, &ids[1]).await;
    assert_eq!(
        statuses(&f, &ids).await,
        ["Pending", "Canceled", "Failure", "Failure"],
        "the end of the barrier itself does not pass it either"
    );
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_running_dead_end_gets_its_cancel_call() {
    let mut f = Fixture::with(&ON).await;
    let receiver = Receiver::start().await;
    let (cancel_action, done) = (receiver.action("/cancel"), receiver.action("/done"));
    receiver.answer(Reply { body: cancel_action, ..Reply::ok() });
    let mut a = with(task("a", &[]), "on_start", receiver.action("/start"));
    a["on_failure"] = json!([receiver.action("/failed")]);
    let body = json!({"tasks": [a, task("b", &[("a", true)])], "on_batch_complete": [done]});
    let ids = f.api.create(&body).await;
    f.start().await;
    cancel(&f, &ids[1]).await;
    assert_eq!(statuses(&f, &ids).await, ["Canceled", "Canceled"]);
    assert_eq!(f.deliver().await, 2);
    let call = receiver.at("/cancel").pop().unwrap();
    assert_eq!(call.key(), format!("{}:cancel:success:0", ids[0]));
    assert_eq!((receiver.at("/done").len(), receiver.at("/failed").len()), (1, 0));
    let attempt = f.api.get(&format!("/task/{}/attempts", ids[0])).await.body[0].clone();
    assert_eq!(attempt["reason"], "canceled as a dead end: no task that depends on it is alive");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn timeouts_and_failed_starts_cancel_dead_ends() {
    let mut f = Fixture::with(&ON).await;
    let receiver = Receiver::start().await;
    receiver.answer(Reply::status(500));
    // In each trio one parent times out or fails to start; the child fails, and the other parent is a dead end.
    let mut tasks = Vec::new();
    for i in 0..40 {
        let (a, b) = (format!("a{i}"), format!("b{i}"));
        tasks.extend([
            with(task(&a, &[]), "timeout", json!(10)),
            task(&b, &[]),
            task(&format!("c{i}"), &[(&a, true), (&b, false)]),
        ]);
    }
    let slow = f.api.create(&json!(tasks)).await;
    f.claim().await;
    for trio in tasks.chunks_mut(3) {
        trio[0]["on_start"] = receiver.action("/start");
    }
    let failing = f.api.create(&json!(tasks)).await;
    f.start().await;
    while f.db.number("select count(*) from task where status = 'claimed'").await > 0 {
        f.write_answers().await;
    }
    f.advance(10);
    f.expire().await;
    for ids in [&slow, &failing] {
        for trio in ids.chunks(3) {
            assert_eq!(statuses(&f, trio).await, ["Failure", "Canceled", "Failure"]);
        }
    }
    assert_eq!(last_move(&f, &slow[1]).await, ("Canceled".into(), "dead_end".into(), "timeout".into()));
    assert_eq!(last_move(&f, &failing[1]).await, ("Canceled".into(), "dead_end".into(), "start".into()));
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_stopped_batch_counts_no_dead_ends() {
    let f = Fixture::with(&ON).await;
    let tasks: Vec<Value> = (0..4500usize)
        .map(|i| {
            let needs: Vec<Value> = i.checked_sub(1).into_iter().map(|p| json!({"id": p.to_string()})).collect();
            json!({"id": i.to_string(), "name": "n", "kind": "k", "dependencies": needs})
        })
        .collect();
    let answer = f.api.post("/task", &json!(tasks)).await;
    let batch = answer.headers["x-batch-id"].to_str().unwrap().to_owned();
    f.claim().await;
    let stopped = f.api.delete(&format!("/batch/{batch}")).await.body;
    let numbers = ["canceled_waiting", "canceled_running", "already_terminal"].map(|name| stopped[name].clone());
    assert_eq!(numbers, [json!(4499), json!(1), json!(0)]);
    assert_eq!(f.db.number("select count(*) from event where cause = 'dead_end'").await, 0);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn thousands_of_dead_ends_are_canceled_by_one_request() {
    for shape in ["chain", "ladder", "fan-in"] {
        let f = Fixture::with(&ON).await;
        let count = 2000usize;
        let tasks: Vec<Value> = (0..count)
            .map(|i| {
                let parents: Vec<usize> = match shape {
                    "chain" => i.checked_sub(1).into_iter().collect(),
                    "ladder" => [2, 3, 7].into_iter().filter_map(|back| i.checked_sub(back)).collect(),
                    _ if i == count - 1 => (0..count - 1).collect(),
                    _ => Vec::new(),
                };
                let needs: Vec<Value> = parents.iter().map(|p| json!({"id": p.to_string()})).collect();
                json!({"id": i.to_string(), "name": "n", "kind": "k", "dependencies": needs})
            })
            .collect();
        let ids = f.api.create(&json!(tasks)).await;
        f.claim().await;
        if shape == "ladder" {
            cancel(&f, &ids[count - 2]).await;
        }
        cancel(&f, &ids[count - 1]).await;
        let canceled = f.db.number("select count(*) from task where status = 'canceled'").await;
        assert_eq!(usize::try_from(canceled).unwrap(), count, "{shape}");
        f.db.assert_counters_match().await;
    }
}

#[tokio::test]
async fn canceling_one_of_many_children_reads_few_of_the_others() {
    let f = Fixture::with(&ON).await;
    let mut tasks = vec![task("root", &[])];
    tasks.extend((0..5000).map(|i| task(&i.to_string(), &[("root", true)])));
    let ids = f.api.create(&json!(tasks)).await;
    f.db.execute("analyze").await;
    let read = "select (idx_scan + seq_tup_read)::bigint from pg_stat_user_tables where relname = 'task'";
    let before = f.db.number(read).await;
    cancel(&f, &ids[1]).await;
    f.db.close(&f.store).await;
    assert!(f.db.number(read).await - before < 100, "{} reads", f.db.number(read).await - before);
}

#[tokio::test]
async fn a_dead_end_can_be_retried_manually() {
    let f = Fixture::with(&ON).await;
    let ids = f.api.create(&fan_in()).await;
    f.claim().await;
    f.api.fail(&ids[0]).await;
    assert_eq!(statuses(&f, &ids).await, ["Failure", "Canceled", "Failure"]);
    let retry = |id: &str| format!("/task/{id}/retry");
    assert_eq!(f.api.post(&retry(&ids[0]), &json!({})).await.status, 200);
    assert_eq!(statuses(&f, &ids).await, ["Pending", "Canceled", "Failure"], "the child needs the other one, too");
    assert_eq!(f.api.post(&retry(&ids[1]), &json!({})).await.status, 200);
    assert_eq!(statuses(&f, &ids).await, ["Pending", "Pending", "Waiting"]);
    f.claim().await;
    f.api.succeed(&ids[0]).await;
    f.api.succeed(&ids[1]).await;
    f.claim().await;
    f.api.succeed(&ids[2]).await;
    assert_eq!(statuses(&f, &ids).await, ["Success", "Success", "Success"]);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_link_between_batches_needs_dead_end_cancel_in_both() {
    for (earlier, later) in [(true, true), (true, false), (false, true)] {
        for stop in [false, true] {
            let f = Fixture::new().await;
            let mut made = Vec::new();
            for said in [earlier, later] {
                let answer = f.api.post("/task", &json!({"tasks": fan_in(), "dead_end_cancel": said})).await;
                let ids: Vec<String> = answer.body.as_array().unwrap().iter().map(|t| text(&t["id"])).collect();
                made.push((answer.headers["x-batch-id"].to_str().unwrap().to_owned(), ids));
            }
            let ((_, above), (batch, below)) = (&made[0], &made[1]);
            // The earlier batch's child becomes the parent of the later one's.
            f.db.execute(&format!(
                "insert into link values ('{}', '{}', true);
                 update task set wait_count = 3 where id = '{1}';
                 update task set flags = flags | 16 | 128 where id = '{0}'",
                above[2], below[2]
            ))
            .await;
            if stop {
                assert_eq!(f.api.delete(&format!("/batch/{batch}")).await.body["canceled_pending"], 2);
            } else {
                cancel(&f, &below[2]).await;
            }
            let both = if earlier && later { "Canceled" } else { "Pending" };
            let child = if earlier && later { "Canceled" } else { "Waiting" };
            assert_eq!(statuses(&f, above).await, [both, both, child], "{earlier} {later} {stop}");
            let own = if later || stop { "Canceled" } else { "Pending" };
            assert_eq!(statuses(&f, below).await, [own, own, "Canceled"], "{earlier} {later} {stop}");
            f.db.assert_counters_match().await;
        }
    }
}

async fn two() -> (Fixture, Fixture) {
    let args = ["--dead-end-cancel", "1", "--webhook-concurrency", "1000"];
    let f = Fixture::with(&args).await;
    let same = Database { url: f.db.url.clone(), pool: f.db.pool.clone() };
    let g = Fixture::on(same, &args).await;
    (f, g)
}

async fn deadlocks(db: &Database) -> i64 {
    db.number("select deadlocks from pg_stat_database where datname = current_database()").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_last_children_that_end_at_once_cancel_their_parent() {
    let (f, g) = two().await;
    for round in 0..60 {
        let tasks = json!([
            task("top", &[]),
            task("p", &[("top", true)]),
            task("c", &[("p", true)]),
            task("d", &[("p", true)])
        ]);
        let ids = f.api.create(&tasks).await;
        if round % 2 == 0 {
            f.claim().await;
        }
        tokio::join!(cancel(&f, &ids[2]), cancel(&g, &ids[3]));
        assert_eq!(statuses(&f, &ids).await, ["Canceled"; 4], "round {round}");
    }
    f.db.assert_counters_match().await;
    g.store.close();
    f.db.close(&f.store).await;
    assert_eq!(deadlocks(&f.db).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn parents_that_end_at_once_do_not_deadlock() {
    let (f, g) = two().await;
    for round in 0..8usize {
        let mut tasks: Vec<Value> = (0..12).map(|i| task(&i.to_string(), &[])).collect();
        for child in 0..3 {
            let needs: Vec<Value> =
                (0..12).map(|i| json!({"id": i.to_string(), "requires_success": child > 0})).collect();
            tasks.push(with(task(&format!("c{child}"), &[]), "dependencies", json!(needs)));
        }
        let ids = f.api.create(&json!(tasks)).await;
        while f.claim().await > 0 {}
        let reports = ids[..12].iter().enumerate().map(|(i, id)| {
            let (api, id) = (if i % 2 == 0 { f.api.clone() } else { g.api.clone() }, id.clone());
            tokio::spawn(async move {
                let answer = if (i + round) % 3 == 0 { api.fail(&id).await } else { api.succeed(&id).await };
                answer.status.as_u16()
            })
        });
        for status in join_all(reports).await {
            assert!([200, 409].contains(&status.unwrap()), "409 answers the report of a canceled task");
        }
        // The child that does not require success is alive and keeps all its parents alive.
        let alive = f.api.status(&ids[12]).await;
        assert_eq!(alive, "Pending");
        assert_eq!(statuses(&f, &ids[13..]).await, ["Failure", "Failure"]);
        assert_eq!(f.db.number("select count(*) from event where cause = 'dead_end'").await, 0);
    }
    f.db.assert_counters_match().await;
    g.store.close();
    f.db.close(&f.store).await;
    assert_eq!(deadlocks(&f.db).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn parents_that_fail_at_once_cancel_the_others_in_one_transaction() {
    let (f, g) = two().await;
    for round in 0..8usize {
        let mut tasks: Vec<Value> = (0..16).map(|i| task(&i.to_string(), &[])).collect();
        let needs: Vec<Value> = (0..16).map(|i| json!({"id": i.to_string()})).collect();
        tasks.push(with(task("join", &[]), "dependencies", json!(needs)));
        let ids = f.api.create(&json!(tasks)).await;
        while f.claim().await > 0 {}
        let reports = ids[..16].iter().enumerate().map(|(i, id)| {
            let (api, id) = (if i % 2 == 0 { f.api.clone() } else { g.api.clone() }, id.clone());
            tokio::spawn(async move {
                let ends_well = (i + round) % 5 == 0;
                let answer = if ends_well { api.succeed(&id).await } else { api.fail(&id).await };
                answer.status.as_u16()
            })
        });
        let answers: Vec<u16> = join_all(reports).await.into_iter().map(Result::unwrap).collect();
        assert!(answers.iter().all(|status| [200, 409].contains(status)), "{answers:?}");
        let found = statuses(&f, &ids).await;
        assert_eq!(found[16], "Failure");
        for (status, answer) in found[..16].iter().zip(&answers) {
            let expected: &[&str] = if *answer == 200 { &["Failure", "Success"] } else { &["Canceled"] };
            assert!(expected.contains(&status.as_str()), "{status} was answered with {answer}");
        }
        // The first failures are one transaction, which cancels all other parents.
        let ended = format!(
            "select count(distinct xmin::text) from task where status <> 'success'
             and batch_id = (select batch_id from task where id = '{}')",
            ids[0]
        );
        assert_eq!(f.db.number(&ended).await, 1, "{found:?}");
    }
    f.db.assert_counters_match().await;
    g.store.close();
    f.db.close(&f.store).await;
    assert_eq!(deadlocks(&f.db).await, 0);
}
