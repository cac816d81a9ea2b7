//! Dependencies: when children wait, are released, or fail with their parents.

use serde_json::{Value, json};

use crate::support::{Fixture, text};

fn task(id: &str, needs: &[(&str, bool)]) -> Value {
    let dependencies: Vec<Value> =
        needs.iter().map(|(id, required)| json!({"id": id, "requires_success": required})).collect();
    json!({"id": id, "name": id, "kind": "k", "dependencies": dependencies})
}

async fn statuses(f: &Fixture, ids: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    for id in ids {
        found.push(f.api.status(id).await);
    }
    found
}

#[tokio::test]
async fn a_child_waits_for_all_its_parents() {
    let f = Fixture::new().await;
    let ids = f.api.create(&json!([task("a", &[]), task("b", &[]), task("c", &[("a", true), ("b", true)])])).await;
    assert_eq!(statuses(&f, &ids).await, ["Pending", "Pending", "Waiting"]);
    f.claim().await;
    f.api.succeed(&ids[0]).await;
    assert_eq!(f.api.status(&ids[2]).await, "Waiting");
    f.api.succeed(&ids[1]).await;
    assert_eq!(f.api.status(&ids[2]).await, "Pending");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_failure_cascades_over_required_links_only() {
    let f = Fixture::new().await;
    let ids = f
        .api
        .create(&json!([
            task("a", &[]),
            task("b", &[("a", true)]),
            task("c", &[("b", true)]),
            task("cleanup", &[("b", false)]),
            task("other", &[]),
            task("late", &[("c", true), ("other", true)]),
        ]))
        .await;
    f.claim().await;
    f.api.fail(&ids[0]).await;
    assert_eq!(statuses(&f, &ids).await, ["Failure", "Failure", "Failure", "Pending", "Running", "Failure"]);
    let fallen = f.api.task(&ids[2]).await;
    assert_eq!((&fallen["failure_type"], &fallen["run"]), (&json!("dependency"), &json!(0)));
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_canceled_task_fails_its_children_and_sends_no_on_failure() {
    let f = Fixture::new().await;
    let hook = json!([{"kind": "Webhook", "params": {"url": "http://127.0.0.1:9/", "verb": "Post"}}]);
    let mut tasks = json!([task("a", &[]), task("b", &[("a", true)]), task("c", &[("a", false)])]);
    tasks[0]["on_failure"] = hook.clone();
    tasks[1]["on_failure"] = hook;
    let ids = f.api.create(&tasks).await;
    let answer = f.api.delete(&format!("/task/{}", ids[0])).await;
    assert_eq!((answer.status.as_u16(), &answer.body["status"]), (200, &json!("Canceled")));
    assert_eq!(statuses(&f, &ids).await, ["Canceled", "Failure", "Pending"]);
    let deliveries = f.api.get("/webhook-deliveries").await.body;
    let of: Vec<String> = deliveries.as_array().unwrap().iter().map(|d| text(&d["task_id"])).collect();
    assert_eq!(of, [ids[1].clone()], "the fallen child's on_failure, not the canceled task's");
    assert_eq!(f.api.delete(&format!("/task/{}", ids[0])).await.status, 200, "again changes nothing");
    assert_eq!(f.api.delete(&format!("/task/{}", ids[1])).await.status, 409);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_paused_child_counts_ended_parents_and_stays_paused() {
    let f = Fixture::new().await;
    let ids = f.api.create(&json!([task("a", &[]), task("b", &[("a", true)]), task("c", &[("a", true)])])).await;
    for id in &ids[1..] {
        assert_eq!(f.api.patch(&format!("/task/pause/{id}"), &json!({})).await.body["status"], "Paused");
    }
    f.claim().await;
    f.api.patch(&format!("/task/resume/{}", ids[2]), &json!({})).await;
    assert_eq!(statuses(&f, &ids).await, ["Running", "Paused", "Waiting"], "still unmet: back to Waiting");
    f.api.succeed(&ids[0]).await;
    assert_eq!(statuses(&f, &ids).await, ["Success", "Paused", "Pending"]);
    let resumed = f.api.patch(&format!("/task/resume/{}", ids[1]), &json!({})).await;
    assert_eq!(resumed.body["status"], "Pending");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_paused_child_fails_with_its_parent() {
    let f = Fixture::new().await;
    let ids = f.api.create(&json!([task("a", &[]), task("b", &[("a", true)])])).await;
    f.api.patch(&format!("/task/pause/{}", ids[1]), &json!({})).await;
    f.claim().await;
    f.api.fail(&ids[0]).await;
    assert_eq!(statuses(&f, &ids).await, ["Failure", "Failure"]);
}

#[tokio::test]
async fn a_failure_cascades_through_ten_thousand_tasks() {
    for shape in ["chain", "layers", "fan-out"] {
        let f = Fixture::new().await;
        let tasks: Vec<Value> = (0..10_000usize)
            .map(|i| {
                let parents: Vec<usize> = match shape {
                    "chain" => i.checked_sub(1).into_iter().collect(),
                    "layers" if i < 100 => Vec::from_iter((i > 0).then_some(0)),
                    "layers" => vec![i - 100, i - 99, i - 98].into_iter().filter(|p| p / 100 < i / 100).collect(),
                    _ => Vec::from_iter((i > 0).then_some(0)),
                };
                let needs: Vec<Value> = parents.iter().map(|p| json!({"id": p.to_string()})).collect();
                json!({"id": i.to_string(), "name": "n", "kind": "k", "dependencies": needs})
            })
            .collect();
        let ids = f.api.create(&json!(tasks)).await;
        assert_eq!(f.claim().await, 1, "{shape}");
        assert_eq!(f.api.fail(&ids[0]).await.body["status"], "Failure");
        assert_eq!(f.db.number("select count(*) from task where status = 'failure'").await, 10_000, "{shape}");
        let batch = f.api.get("/batches").await.body[0].clone();
        assert_eq!(batch["status_counts"]["failure"], 10_000, "{shape}");
        f.db.assert_counters_match().await;
    }
}

#[tokio::test]
async fn the_last_of_3000_parents_releases_their_child() {
    let f = Fixture::with(&["--webhook-concurrency", "10000"]).await;
    let mut tasks: Vec<Value> = (0..3000).map(|i| json!({"id": i.to_string(), "name": "n", "kind": "k"})).collect();
    let needs: Vec<Value> = (0..3000).map(|i| json!({"id": i.to_string()})).collect();
    tasks.push(json!({"id": "join", "name": "join", "kind": "k", "dependencies": needs}));
    let ids = f.api.create(&json!(tasks)).await;
    while f.claim().await > 0 {}
    // As if all parents but one had ended.
    f.db.execute("update task set wait_count = 1 where status = 'waiting'").await;
    assert_eq!(f.api.succeed(&ids[0]).await.status, 200);
    assert_eq!(f.api.status(&ids[3000]).await, "Pending");
}

#[tokio::test]
async fn the_graph_of_a_batch_shows_its_tasks_and_links() {
    let f = Fixture::new().await;
    let answer = f.api.post("/task", &json!([task("a", &[]), task("b", &[("a", false)])])).await;
    let batch = answer.headers["x-batch-id"].to_str().unwrap().to_owned();
    let dag = f.api.get(&format!("/dag/{batch}")).await.body;
    assert_eq!(dag["tasks"].as_array().unwrap().len(), 2);
    assert_eq!(dag["tasks"][0]["name"], "a");
    assert!(dag["tasks"][0].get("next_retry_at").is_some() && dag["tasks"][0].get("attempt").is_some());
    let link = json!({"parent_id": answer.body[0]["id"], "child_id": answer.body[1]["id"], "requires_success": false});
    assert_eq!(dag["links"], json!([link]));
    assert_eq!(f.api.get(&format!("/dag/{}", uuid::Uuid::now_v7())).await.status, 404);
}
