//! Concurrency and capacity rules: limits hold, no slot is lost, and unblocked tasks do not wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use reprise::store::tasks::transitions;
use reprise::store::{self, Actor, Patience, Session};
use serde_json::{Value, json};

use crate::support::{Fixture, text};

/// A task of which at most `max` per tenant may execute.
fn limited(max: i32, tenant: &str) -> Value {
    json!({"name": "n", "kind": "k", "timeout": 30, "metadata": {"tenant": tenant}, "rules": [
        {"type": "Concurency", "max_concurency": max, "matcher": {"kind": "k", "status": "Running", "fields": ["tenant"]}}
    ]})
}

fn many(n: usize, task: &Value) -> Value {
    json!(vec![task; n])
}

async fn statuses(f: &Fixture, ids: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    for id in ids {
        found.push(f.api.status(id).await);
    }
    found
}

#[tokio::test]
async fn a_rule_limits_what_executes_and_the_rest_follow_in_order() {
    let f = Fixture::new().await;
    let ids = f.api.create(&many(5, &limited(2, "a"))).await;
    let others = f.api.create(&many(2, &limited(2, "b"))).await;
    assert_eq!(f.claim().await, 4);
    assert_eq!(statuses(&f, &ids).await, ["Running", "Running", "Pending", "Pending", "Pending"]);
    assert_eq!(statuses(&f, &others).await, ["Running", "Running"]);
    assert_eq!(f.claim().await, 0);
    assert_eq!(f.db.number("select count(*) from task where parked_on is not null").await, 3);
    f.api.succeed(&ids[1]).await;
    assert_eq!(f.claim().await, 1);
    assert_eq!(statuses(&f, &ids).await, ["Running", "Success", "Running", "Pending", "Pending"]);
    f.api.succeed(&ids[0]).await;
    f.api.succeed(&ids[2]).await;
    assert_eq!(f.claim().await, 2);
    f.db.assert_counters_match().await;
    for id in &ids[3..] {
        f.api.succeed(id).await;
    }
    assert_eq!(f.claim().await, 0);
    assert_eq!(f.db.number("select sum(used)::bigint from slot").await, 2, "the other tenant's");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_blocked_task_of_higher_priority_starts_first() {
    let f = Fixture::new().await;
    let mut tasks = vec![limited(1, "a"); 4];
    tasks[3]["priority"] = json!(5);
    tasks[0]["priority"] = json!(9);
    let ids = f.api.create(&json!(tasks)).await;
    f.claim().await;
    f.api.patch(&format!("/task/{}", ids[2]), &json!({"priority": 7})).await;
    for expected in [2, 3, 1] {
        let running = f.api.get("/task?status=Running").await.body;
        f.api.succeed(running[0]["id"].as_str().unwrap()).await;
        assert_eq!(f.claim().await, 1);
        assert_eq!(f.api.status(&ids[expected]).await, "Running");
    }
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn every_end_of_an_execution_frees_its_slot() {
    let f = Fixture::new().await;
    let mut retried = limited(1, "a");
    retried["retry"] = json!({"max_retries": 1, "jitter_ms": 0, "initial_delay_secs": 5});
    for exit in ["success", "failure", "retry", "cancel", "timeout", "retry by timeout", "stop"] {
        let task = if exit.starts_with("retry") { retried.clone() } else { limited(1, "a") };
        let answer = f.api.post("/task", &json!([task])).await;
        let batch = answer.headers["x-batch-id"].to_str().unwrap().to_owned();
        let first = text(&answer.body[0]["id"]);
        let second = f.api.create(&json!([limited(1, "a")])).await.remove(0);
        assert_eq!(f.claim().await, 1, "{exit}");
        assert_eq!((f.api.status(&first).await, f.api.status(&second).await), ("Running".into(), "Pending".into()));
        let ended = match exit {
            "success" => f.api.succeed(&first).await.status == 200,
            "failure" | "retry" => f.api.fail(&first).await.status == 200,
            "cancel" => f.api.delete(&format!("/task/{first}")).await.status == 200,
            "stop" => f.api.delete(&format!("/batch/{batch}")).await.status == 200,
            _ => {
                f.advance(30);
                f.expire().await == 1
            }
        };
        assert!(ended, "{exit}");
        f.db.assert_counters_match().await;
        f.claim().await;
        assert_eq!(f.api.status(&second).await, "Running", "{exit}");
        f.api.succeed(&second).await;
        f.api.delete(&format!("/task/{first}")).await;
        f.db.assert_counters_match().await;
    }
    assert_eq!(f.db.number("select coalesce(sum(used), 0)::bigint from slot").await, 0);
}

async fn claim_ten(session: Session) -> store::Result<Vec<transitions::Claimed>> {
    let mut tx = session.begin_claim(Actor::Loop("start")).await?;
    let claims = transitions::claim(&mut tx, 10, 10, std::time::Duration::from_secs(30)).await?;
    tx.commit().await?;
    Ok(claims.tasks)
}

#[tokio::test]
async fn claims_that_end_before_the_start_free_their_slot() {
    let f = Fixture::new().await;
    // No receiver answers at this port: the tasks stay Claimed.
    let mut task = limited(1, "a");
    task["on_start"] = json!({"kind": "Webhook", "params": {"url": "http://127.0.0.1:9/", "verb": "Post"}});
    let ids = f.api.create(&many(2, &task)).await;
    let claim = || async { f.store.retrying(Patience::Brief, claim_ten).await.unwrap() };
    let claimed = claim().await;
    assert_eq!(claimed.len(), 1);
    f.db.assert_counters_match().await;
    let claim_id = claimed[0].claim_id();
    let give_back = |session: Session| async move {
        let mut tx = session.begin(Actor::Loop("start")).await?;
        transitions::give_back(&mut tx, &[claim_id]).await?;
        tx.commit().await
    };
    f.store.retrying(Patience::Brief, give_back).await.unwrap();
    f.db.assert_counters_match().await;
    assert_eq!(claim().await[0].id.to_string(), ids[0], "it keeps its place in the queue");
    f.advance(31);
    assert_eq!(f.expire().await, 1);
    f.db.assert_counters_match().await;
    assert_eq!(claim().await[0].id.to_string(), ids[0]);
    assert!(claim().await.is_empty());
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_rule_counts_tasks_without_the_rule_and_of_other_kinds() {
    let f = Fixture::new().await;
    // These run before a matcher counts them.
    let early = f.api.create(&json!([{"name": "n", "kind": "import"}, {"name": "n", "kind": "import"}])).await;
    f.claim().await;
    let report = json!({"name": "n", "kind": "report", "rules": [
        {"type": "Concurrency", "max_concurrency": 2, "matcher": {"kind": "import"}}]});
    f.api.create(&json!([report, report])).await;
    assert_eq!(f.claim().await, 0, "two imports are running");
    f.db.assert_counters_match().await;
    f.api.succeed(&early[0]).await;
    assert_eq!(f.claim().await + f.claim().await, 2, "reports do not count themselves");
    let late = f.api.create(&json!([{"name": "n", "kind": "import"}, {"name": "n", "kind": "import"}])).await;
    assert_eq!(f.claim().await, 2, "imports carry no rule");
    let report = f.api.create(&json!([report])).await;
    assert_eq!(f.claim().await, 0);
    f.api.succeed(&late[0]).await;
    assert_eq!(f.claim().await, 0, "there are still two");
    f.api.succeed(&late[1]).await;
    assert_eq!(f.claim().await, 1);
    assert_eq!(f.api.status(&report[0]).await, "Running");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn blocked_tasks_do_not_delay_unblocked_ones() {
    let f = Fixture::new().await;
    let mut urgent = limited(1, "a");
    urgent["priority"] = json!(100);
    f.api.create(&many(500, &urgent)).await;
    let plain = f.api.create(&json!([{"name": "n", "kind": "plain"}])).await;
    let loose = f.api.create(&json!([limited(400, "a")])).await;
    while f.claim().await > 0
        || f.db.number("select count(*) from task where status = 'pending' and parked_on is null").await > 0
    {}
    assert_eq!(f.api.status(&plain[0]).await, "Running");
    assert_eq!(f.api.status(&loose[0]).await, "Running", "the same key with a higher limit");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_task_starts_only_if_all_its_rules_pass() {
    let f = Fixture::new().await;
    let task = |tenant: &str| {
        json!({"name": "n", "kind": "k", "metadata": {"tenant": tenant}, "rules": [
            {"type": "Concurency", "max_concurency": 1, "matcher": {"kind": "k", "fields": ["tenant"]}},
            {"type": "Concurency", "max_concurency": 2, "matcher": {"kind": "k", "fields": []}}]})
    };
    let ids = f.api.create(&json!([task("a"), task("a"), task("b"), task("c")])).await;
    assert_eq!(f.claim().await, 2);
    assert_eq!(statuses(&f, &ids).await, ["Running", "Pending", "Running", "Pending"]);
    f.db.assert_counters_match().await;
    f.api.succeed(&ids[2]).await;
    assert_eq!(f.claim().await, 1);
    assert_eq!(statuses(&f, &ids).await, ["Running", "Pending", "Success", "Running"], "its tenant is at its limit");
    f.api.succeed(&ids[0]).await;
    assert_eq!(f.claim().await, 1);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn heartbeats_free_capacity() {
    let f = Fixture::new().await;
    let task = |n: i32| {
        json!({"name": "n", "kind": "k", "expected_count": n, "rules": [
            {"type": "Capacity", "max_capacity": 100, "matcher": {"kind": "k", "status": "Running", "fields": []}}]})
    };
    let ids = f.api.create(&json!([task(60), task(60), task(10)])).await;
    assert_eq!(f.claim().await, 2, "60 are below 100, 120 are not");
    f.api.put(&format!("/task/{}", ids[0]), &json!({"new_success": 15, "new_failures": 5})).await;
    assert_eq!(f.claim().await, 0, "100 are not below 100");
    f.db.assert_counters_match().await;
    f.api.put(&format!("/task/{}", ids[1]), &json!({"new_success": 1})).await;
    assert_eq!(f.claim().await, 1);
    // A count above the expected one frees the whole load and no more.
    f.api.put(&format!("/task/{}", ids[0]), &json!({"new_success": 500})).await;
    f.api.patch(&format!("/task/{}", ids[1]), &json!({"expected_count": 1000})).await;
    f.db.assert_counters_match().await;
    f.api.patch(&format!("/task/{}", ids[1]), &json!({"status": "Success", "new_success": 3})).await;
    f.api.succeed(&ids[0]).await;
    f.api.succeed(&ids[2]).await;
    assert_eq!(f.db.number("select sum(used + load)::bigint from slot").await, 0);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn changed_rules_apply_at_once() {
    let f = Fixture::new().await;
    let answer = f.api.post("/task", &many(6, &limited(1, "a"))).await;
    let batch = answer.headers["x-batch-id"].to_str().unwrap().to_owned();
    assert_eq!(f.claim().await, 1);
    let path = format!("/batch/{batch}/rules");
    let rule =
        |max: i32| json!({"type": "Concurency", "max_concurency": max, "matcher": {"kind": "k", "fields": ["tenant"]}});
    let changed = f.api.patch(&path, &json!({"kind": "k", "rules": [rule(3)]})).await;
    assert_eq!(changed.status, 200, "{}", changed.body);
    assert_eq!(changed.body, json!({"batch_id": batch, "kind": "k", "updated_count": 6}));
    assert_eq!(f.claim().await, 2);
    f.db.assert_counters_match().await;
    let one = f.api.get("/task?status=Pending").await.body;
    assert_eq!(f.api.task(one[0]["id"].as_str().unwrap()).await["rules"][0]["max_concurency"], 3);
    assert_eq!(f.api.patch(&path, &json!({"kind": "k", "rules": []})).await.status, 200);
    assert_eq!(f.claim().await, 3);
    f.db.assert_counters_match().await;

    assert_eq!(f.api.patch(&path, &json!({"kind": "other", "rules": []})).await.body["updated_count"], 0);
    let unknown = "/batch/01900000-0000-7000-8000-000000000000/rules";
    assert_eq!(f.api.patch(unknown, &json!({"kind": "k", "rules": []})).await.status, 404);
    let strange = json!({"type": "Capacity", "max_capacity": 3, "matcher": {"fields": ["color"]}});
    let refused = f.api.patch(&path, &json!({"kind": "k", "rules": [strange]})).await;
    assert_eq!(refused.status, 400);
    assert!(text(&refused.body["details"][0]).starts_with("rules: task "), "{}", refused.body);
    assert_eq!(f.api.patch(&path, &json!({"rules": {}})).await.status, 400);
}

#[tokio::test]
async fn a_blocked_task_follows_its_changed_metadata() {
    let f = Fixture::new().await;
    let ids = f.api.create(&many(2, &limited(1, "a"))).await;
    f.claim().await;
    f.api.patch(&format!("/task/{}", ids[1]), &json!({"metadata": {"tenant": "b"}})).await;
    assert_eq!(f.claim().await, 1, "it belongs to another tenant now");
    // An executing task keeps its slot.
    f.api.patch(&format!("/task/{}", ids[1]), &json!({"metadata": {"tenant": "a"}})).await;
    f.db.assert_counters_match().await;
    f.api.succeed(&ids[1]).await;
    f.api.succeed(&ids[0]).await;
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_rule_that_cannot_be_evaluated_is_refused() {
    let f = Fixture::new().await;
    let mut without = limited(1, "a");
    without["metadata"] = json!({});
    let capacity = json!({"name": "n", "kind": "k", "rules": [{"type": "Capacity", "max_capacity": 1, "matcher": {}}]});
    let answer = f.api.post("/task", &json!([without, capacity])).await;
    assert_eq!(answer.status, 400);
    let details: Vec<String> = answer.body["details"].as_array().unwrap().iter().map(text).collect();
    assert!(details[0].starts_with("[0].rules[0]: ") && details[0].contains("tenant"), "{details:?}");
    assert!(details[1].starts_with("[1].rules[0]: ") && details[1].contains("expected_count"), "{details:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn limits_hold_at_every_instant_across_instances() {
    let f = Fixture::new().await;
    let others = [Fixture::on(f.db.clone(), &[]).await, Fixture::on(f.db.clone(), &[]).await];
    let fixtures = [&f, &others[0], &others[1]];
    let task = |i: usize| {
        let retry = (i.is_multiple_of(3)).then(|| json!({"max_retries": 1, "strategy": "immediate", "jitter_ms": 0}));
        json!({"name": "n", "kind": "k", "metadata": {"tenant": i % 3}, "expected_count": 2, "retry": retry, "rules": [
            {"type": "Concurency", "max_concurency": 3, "matcher": {"kind": "k", "fields": ["tenant"]}},
            {"type": "Concurency", "max_concurency": 7, "matcher": {"kind": "k", "fields": []}},
            {"type": "Capacity", "max_capacity": 13, "matcher": {"kind": "k", "fields": []}}]})
    };
    let tasks: Vec<Value> = (0..120).map(task).collect();
    f.api.create(&json!(tasks)).await;
    let done = Arc::new(AtomicBool::new(false));
    let watch = {
        let (done, db) = (Arc::clone(&done), f.db.clone());
        tokio::spawn(async move {
            let executing = "select coalesce(max(n), 0)::bigint from (select count(*) n from task t join task_spec s \
                             on s.id = t.id where t.status in ('claimed', 'running') group by s.metadata) x";
            let all = "select count(*) from task where status in ('claimed', 'running')";
            let (mut most, mut looks) = (0, 0);
            while !done.load(Ordering::Relaxed) {
                let found = db.number(executing).await;
                assert!(found <= 3, "{found} of one tenant at once");
                let found = db.number(all).await;
                assert!(found <= 7, "{found} at once");
                most = most.max(found);
                looks += 1;
            }
            (most, looks)
        })
    };
    let work = |me: usize| {
        let f = fixtures[me];
        async move {
            loop {
                f.claim().await;
                f.release().await;
                let running = f.api.get("/task?status=Running&page_size=7").await.body;
                let running = running.as_array().unwrap();
                if running.is_empty() && f.db.number("select count(*) from task where ended_at is null").await == 0 {
                    return;
                }
                for (i, task) in running.iter().enumerate() {
                    let id = task["id"].as_str().unwrap();
                    // All of them report for the same tasks; the second report is refused.
                    match (i + me) % 4 {
                        0 => f.api.put(&format!("/task/{id}"), &json!({"new_success": 1})).await,
                        1 => f.api.fail(id).await,
                        2 if me == 1 => f.api.delete(&format!("/task/{id}")).await,
                        _ => f.api.succeed(id).await,
                    };
                }
            }
        }
    };
    tokio::join!(work(0), work(1), work(2));
    done.store(true, Ordering::Relaxed);
    let (most, looks) = watch.await.unwrap();
    assert!(most > 1 && looks > 10, "{most} at once in {looks} looks");
    assert_eq!(f.db.number("select coalesce(sum(used + load), 0)::bigint from slot").await, 0);
    f.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_new_rule_counts_tasks_that_are_being_claimed() {
    for _ in 0..10 {
        let f = Fixture::with(&["--webhook-concurrency", "1000"]).await;
        let plain: Vec<Value> =
            (0..60).map(|i| json!({"name": "n", "kind": "k", "metadata": {"tenant": i % 2}})).collect();
        f.api.create(&json!(plain)).await;
        let mut ruled = limited(1, "x");
        ruled["metadata"] = json!({"tenant": 1});
        let ruled = json!([ruled]);
        let (claims, created) = tokio::join!(
            async {
                let mut claimed = 0;
                for _ in 0..6 {
                    claimed += f.store.retrying(Patience::Long, claim_ten).await.unwrap().len();
                }
                claimed
            },
            f.api.create(&ruled),
        );
        assert_eq!(claims, 60);
        f.db.assert_slots_match().await;
        f.claim().await;
        assert_eq!(f.api.status(&created[0]).await, "Pending");
        f.db.assert_counters_match().await;
    }
}

#[tokio::test]
async fn unused_slots_and_blocked_groups_are_deleted() {
    let f = Fixture::new().await;
    let ids = f.api.create(&json!([limited(1, "a"), limited(1, "a"), limited(1, "b")])).await;
    f.claim().await;
    f.clean_up(0).await;
    assert_eq!(f.db.number("select count(*) from slot").await, 2);
    assert_eq!(f.db.number("select count(*) from parking").await, 1);
    f.api.succeed(&ids[2]).await;
    f.api.delete(&format!("/task/{}", ids[1])).await;
    f.clean_up(0).await;
    assert_eq!(f.db.number("select count(*) from slot where used > 0").await, 1);
    assert_eq!(f.db.number("select count(*) from slot").await, 1);
    assert_eq!(f.db.number("select count(*) from parking").await, 0);
    let again = f.api.create(&json!([limited(1, "a"), limited(1, "b")])).await;
    assert_eq!(f.claim().await, 1);
    f.api.succeed(&ids[0]).await;
    assert_eq!(f.claim().await, 1);
    assert_eq!(statuses(&f, &again).await, ["Running", "Running"]);
    f.db.assert_counters_match().await;
}
