//! Counters of a batch: the row of a batch holds the exact sums of the counters of its tasks.

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::Fixture;

async fn sums(f: &Fixture, batch: &str) -> (i64, i64, i64) {
    let shown = f.api.get(&format!("/batch/{batch}")).await.body;
    let number = |name: &str| shown[name].as_i64().unwrap_or_else(|| panic!("{name} in {shown}"));
    (number("total_success"), number("total_failures"), number("total_expected"))
}

async fn batch_of(f: &Fixture, tasks: &Value) -> (String, Vec<String>) {
    let ids = f.api.create(tasks).await;
    (f.api.task(&ids[0]).await["batch_id"].as_str().unwrap().to_owned(), ids)
}

#[tokio::test]
async fn batch_sums_follow_every_change_of_a_counter() {
    let f = Fixture::new().await;
    let tasks = json!([{"name": "a", "kind": "k", "expected_count": 10}, {"name": "b", "kind": "k"},
                       {"name": "c", "kind": "k", "expected_count": 5}]);
    let (batch, ids) = batch_of(&f, &tasks).await;
    let (other, _) = batch_of(&f, &json!([{"name": "d", "kind": "k", "expected_count": 1}])).await;
    assert_eq!(sums(&f, &batch).await, (0, 0, 15));
    f.claim().await;
    let task = |i: usize| format!("/task/{}", ids[i]);
    f.api.put(&task(0), &json!({"new_success": 3, "new_failures": 1})).await;
    f.api.put(&task(1), &json!({"new_success": 2})).await;
    assert_eq!(sums(&f, &batch).await, (5, 1, 15));
    for (body, expected) in [
        (json!({"expected_count": 7}), (5, 1, 12)),
        (json!({"expected_count": 7}), (5, 1, 12)),
        (json!({"expected_count": 0, "new_failures": 2}), (5, 3, 5)),
        (json!({"expected_count": 10, "new_success": 1}), (6, 3, 15)),
    ] {
        assert_eq!(f.api.patch(&task(0), &body).await.status, 200);
        assert_eq!(sums(&f, &batch).await, expected, "{body}");
    }
    assert_eq!(f.api.patch(&task(1), &json!({"expected_count": 4})).await.status, 200);
    assert_eq!(sums(&f, &batch).await, (6, 3, 19), "there was none before");
    // Counts are added with the end of a task, and not after it.
    f.api.patch(&task(1), &json!({"status": "Success", "new_success": 4})).await;
    assert_eq!(f.api.put(&task(1), &json!({"new_success": 4})).await.status, 409);
    assert_eq!(sums(&f, &batch).await, (10, 3, 19));
    let foreign = f.api.put(&format!("{}?run=7", task(0)), &json!({"new_success": 4})).await;
    assert_eq!((foreign.status.as_u16(), sums(&f, &batch).await), (409, (10, 3, 19)));
    assert_eq!(sums(&f, &other).await, (0, 0, 1));
    f.api.delete(&format!("/batch/{batch}")).await;
    f.api.post(&format!("/task/{}/retry", ids[0]), &json!({})).await;
    assert_eq!(sums(&f, &batch).await, (10, 3, 19), "neither the end nor a retry takes anything away");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn requests_without_counters_do_not_write_the_batch_row() {
    let f = Fixture::new().await;
    let (batch, ids) = batch_of(&f, &json!([{"name": "a", "kind": "k", "expected_count": 3}])).await;
    f.claim().await;
    let version = format!("select xmin::text::bigint from batch_count where batch_id = '{batch}'");
    let before = f.db.number(&version).await;
    let task = format!("/task/{}", ids[0]);
    assert_eq!(f.api.put(&task, &json!({})).await.status, 202);
    assert_eq!(f.api.put(&task, &json!({"new_success": 0})).await.status, 202);
    assert_eq!(f.api.patch(&task, &json!({"expected_count": 3, "priority": 5})).await.status, 200);
    assert_eq!(f.db.number(&version).await, before);
    assert_eq!(f.api.put(&task, &json!({"new_success": 1})).await.status, 202);
    assert_ne!(f.db.number(&version).await, before);
    f.db.assert_counters_match().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_counter_updates_lose_nothing() {
    let f = Fixture::new().await;
    let tasks: Vec<Value> = (0..4).map(|_| json!({"name": "n", "kind": "k"})).collect();
    let (batch, ids) = batch_of(&f, &json!(tasks)).await;
    f.claim().await;
    let calls = (0..16usize).map(|worker| {
        let (api, ids) = (f.api.clone(), ids.clone());
        tokio::spawn(async move {
            for round in 0..20usize {
                let task = format!("/task/{}", ids[(worker + round) % ids.len()]);
                let expected = json!({"expected_count": worker * 100 + round, "new_failures": 1});
                assert_eq!(api.patch(&task, &expected).await.status, 200);
                assert_eq!(api.put(&task, &json!({"new_success": 2})).await.status, 202);
            }
        })
    });
    for call in join_all(calls).await {
        call.unwrap();
    }
    let (success, failures, _) = sums(&f, &batch).await;
    assert_eq!((success, failures), (640, 320));
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn the_migration_sums_up_existing_batches() {
    let f = Fixture::new().await;
    let (_, ids) =
        batch_of(&f, &json!([{"name": "a", "kind": "k", "expected_count": 3}, {"name": "b", "kind": "k"}])).await;
    f.api.put(&format!("/task/{}", ids[0]), &json!({"new_success": 2, "new_failures": 1})).await;
    batch_of(&f, &json!([{"name": "c", "kind": "k"}])).await;
    f.db.execute(
        "drop view batch_counts;
         alter table batch_count drop column total_success, drop column total_failures, drop column total_expected",
    )
    .await;
    f.db.execute(include_str!("../../../migrations/0014_batch_sums.sql")).await;
    // A later migration builds on these columns.
    let later = include_str!("../../../migrations/0018_deferred_counts.sql");
    f.db.execute(&later[later.find("create view").unwrap()..]).await;
    f.db.assert_counters_match().await;
}
