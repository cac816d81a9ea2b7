//! Retention: old finished batches are deleted in chunks, and nothing else is.

use std::time::Duration;

use reprise::loops::retention::Retention;
use reprise::loops::runner::Loop;
use reprise::store::ledger::audit::{self, Extent};
use reprise::store::retention::{self, Deleted};
use reprise::store::{Patience, Session, Store};
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;

use crate::support::{Fixture, Receiver, Reply, eventually, text};

/// One transaction of the retention loop.
async fn delete_finished(store: &Store, days: u32, limit: i64) -> reprise::store::Result<Deleted> {
    let delete = |session: Session| async move { retention::delete_finished(&session, days, limit).await };
    store.retrying(Patience::Least, delete).await
}

async fn forget_stats(store: &Store, days: u32, limit: i64) -> reprise::store::Result<u64> {
    let forget = |session: Session| async move { retention::forget_stats(&session, days, limit).await };
    store.retrying(Patience::Least, forget).await
}

#[tokio::test]
async fn only_old_finished_and_delivered_batches_are_deleted() {
    let mut f = Fixture::with(&["--webhook-max-attempts", "1"]).await;
    let receiver = Receiver::start().await;
    receiver.answer(Reply::status(500));
    let done = f
        .api
        .create(&json!([{"id": "a", "name": "a", "kind": "k", "retry": {"max_retries": 1}},
                                    {"name": "b", "kind": "k", "dependencies": [{"id": "a"}]}]))
        .await;
    let untold = f.api.create(&json!([{"name": "c", "kind": "k", "on_success": [receiver.action("/x")]}])).await;
    let alive = f.api.create(&json!([{"name": "d", "kind": "k", "timeout": 86_400}, {"name": "e", "kind": "k"}])).await;
    f.claim().await;
    f.api.fail(&done[0]).await;
    f.advance(10);
    f.release().await;
    f.claim().await;
    f.api.succeed(&done[0]).await;
    f.claim().await;
    f.api.succeed(&done[1]).await;
    f.api.succeed(&untold[0]).await;
    f.api.succeed(&alive[1]).await;

    f.advance(6 * 86_400);
    assert_eq!(f.clean_up(7).await, 0, "not old enough");
    f.advance(2 * 86_400);
    assert_eq!(f.clean_up(7).await, 2);
    assert_eq!(f.clean_up(7).await, 0);
    assert_eq!(f.api.get(&format!("/task/{}", done[0])).await.status, 404);
    for id in [&untold[0], &alive[0], &alive[1]] {
        assert_eq!(f.api.get(&format!("/task/{id}")).await.status, 200);
    }
    for table in [
        "link",
        "attempt where task_id not in (select id from task)",
        "task_spec where id not in (select id from task)",
    ] {
        assert_eq!(f.db.number(&format!("select count(*) from {table}")).await, 0, "{table}");
    }
    f.db.assert_counters_match().await;

    f.deliver().await;
    assert_eq!(f.clean_up(7).await, 1, "an exhausted delivery counts as delivered");
    assert_eq!(f.db.number("select count(*) from outbox").await, 0);
    f.db.assert_counters_match().await;
}

/// A finished batch of that many tasks: a chain that succeeded if `chained`, single failed tasks otherwise.
async fn finished(f: &Fixture, tasks: usize, chained: bool) -> Vec<String> {
    let task = |n: usize| {
        let parents = if chained && n > 0 { json!([{"id": (n - 1).to_string()}]) } else { json!([]) };
        json!({"id": n.to_string(), "name": "n", "kind": "k", "expected_count": 7,
               "dependencies": parents})
    };
    let ids = f.api.create(&(0..tasks).map(task).collect()).await;
    for id in &ids {
        f.claim().await;
        assert_eq!(f.api.put(&format!("/task/{id}"), &json!({"new_success": 3, "new_failures": 1})).await.status, 202);
        let ended = if chained { f.api.succeed(id).await } else { f.api.fail(id).await };
        assert_eq!(ended.status, 200);
    }
    ids
}

async fn assert_doctor_is_content(f: &Fixture) {
    let found = audit::audit(&f.store, Extent::All, Duration::from_secs(60)).await.unwrap();
    assert_eq!(found, []);
    f.db.assert_counters_match().await;
}

const TABLES: [&str; 8] = ["task", "task_spec", "link", "attempt", "event", "outbox", "batch_count", "batch"];

async fn assert_nothing_left(f: &Fixture) {
    for table in TABLES {
        assert_eq!(f.db.number(&format!("select count(*) from {table}")).await, 0, "{table}");
    }
}

#[tokio::test]
async fn deleting_a_batch_in_chunks_keeps_the_counters_right() {
    let f = Fixture::new().await;
    let ids = finished(&f, 10, true).await;
    f.advance(8 * 86_400);
    for left in [7, 4, 1] {
        let deleted = delete_finished(&f.store, 7, 3).await.unwrap();
        assert_eq!(deleted, Deleted { tasks: 3, more: true });
        assert_doctor_is_content(&f).await;
        // Children before parents.
        assert_eq!(f.api.get(&format!("/task/{}", ids[left])).await.status, 404);
        let last = f.api.task(&ids[left - 1]).await;
        let batch = f.api.get(&format!("/batch/{}", text(&last["batch_id"]))).await.body;
        let left = i64::try_from(left).unwrap();
        assert_eq!((&batch["total_tasks"], &batch["total_success"]), (&json!(left), &json!(left * 3)));
        assert_eq!((&batch["total_expected"], &batch["status_counts"]["success"]), (&json!(left * 7), &json!(left)));
        assert_eq!(f.db.number("select count(*) from link").await, left - 1);
    }
    assert_eq!(delete_finished(&f.store, 7, 3).await.unwrap().tasks, 1);
    // History is deleted in chunks, too: ten events for each task of the limit.
    while delete_finished(&f.store, 7, 1).await.unwrap().more {
        assert_doctor_is_content(&f).await;
    }
    assert_nothing_left(&f).await;
    assert_doctor_is_content(&f).await;
}

#[tokio::test]
async fn history_is_deleted_in_chunks_after_the_tasks() {
    let f = Fixture::new().await;
    finished(&f, 2, true).await;
    f.db.execute(
        "insert into event (at, batch_id, to_status, cause, actor, instance, run, attempt, task_ids)
         select at, batch_id, to_status, cause, actor, instance, run, attempt, '{}' from event, generate_series(1, 45)
         where seq = (select min(seq) from event)",
    )
    .await;
    let events = f.db.number("select count(*) from event").await;
    f.advance(8 * 86_400);
    assert_eq!(delete_finished(&f.store, 7, 1).await.unwrap().tasks, 1);
    assert_eq!(f.db.number("select count(*) from event").await, events, "a remaining task keeps its events");
    for left in (0..=(events - 1) / 10).rev() {
        assert!(delete_finished(&f.store, 7, 1).await.unwrap().more);
        assert_eq!(f.db.number("select count(*) from batch").await, left.min(1));
    }
    assert_nothing_left(&f).await;
}

#[tokio::test]
async fn chunks_shrink_until_one_can_be_deleted() {
    let f = Fixture::new().await;
    let large: Vec<Value> = (0..300).map(|n| json!({"name": n.to_string(), "kind": "k"})).collect();
    for tasks in [json!(large), json!([{"name": "n", "kind": "k"}])] {
        let ids = f.api.create(&tasks).await;
        let batch = text(&f.api.task(&ids[0]).await["batch_id"]);
        assert_eq!(f.api.delete(&format!("/batch/{batch}")).await.status, 200);
        f.advance(60);
    }
    f.advance(8 * 86_400);
    // Stands for a database in which deleting more takes too long.
    f.db.execute(
        "create function refuse() returns trigger language plpgsql as $$ begin
             if (select count(*) from gone) > 100 then raise 'too many'; end if; return null; end $$;
         create trigger refuse after delete on task referencing old table as gone for each statement
             execute function refuse()",
    )
    .await;
    let retention = Retention::new(f.store.clone(), 7, Duration::from_secs(86_400));
    let open = "select count(*) from pg_stat_activity where datname = current_database() and \
                application_name = 'reprise' and xact_start is not null";
    let mut failed = 0;
    while f.db.number("select count(*) from batch").await > 0 {
        match retention.tick().await {
            Ok(tick) => {
                assert!(tick.processed > 0, "nothing is locked, so something is deleted");
                assert_doctor_is_content(&f).await;
            }
            Err(_) => failed += 1,
        }
        assert!(failed <= 12, "a chunk halves each time, until it can be deleted");
        // The server may hold the locks of a failed transaction a little longer, and the next tick would skip the batch.
        eventually("the transaction to end", async || (f.db.number(open).await == 0).then_some(())).await;
    }
    assert_nothing_left(&f).await;
}

#[tokio::test]
async fn a_locked_batch_is_skipped() {
    for held in ["task", "task_spec", "batch_count", "batch"] {
        let f = Fixture::new().await;
        let first = finished(&f, 3, true).await;
        f.advance(60);
        let second = finished(&f, 3, true).await;
        f.advance(8 * 86_400);
        let column = if held == "batch_count" { "batch_id" } else { "id" };
        let id =
            if held.starts_with("task") { first[2].clone() } else { text(&f.api.task(&first[0]).await["batch_id"]) };
        let mut holder = f.db.pool.begin().await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(format!("select from {held} where {column} = '{id}' for update")))
            .execute(&mut *holder)
            .await
            .unwrap();
        // A limit of one makes both batches large.
        for limit in [1, 1, 5000] {
            assert!(delete_finished(&f.store, 7, limit).await.unwrap().tasks > 0, "{held} is waited for");
        }
        assert!(!delete_finished(&f.store, 7, 5000).await.unwrap().more, "{held}");
        assert_eq!(f.api.status(&first[2]).await, "Success");
        assert_eq!(f.api.get(&format!("/task/{}", second[0])).await.status, 404);
        assert_doctor_is_content(&f).await;
        holder.rollback().await.unwrap();
        assert_eq!(delete_finished(&f.store, 7, 5000).await.unwrap(), Deleted { tasks: 3, more: true });
        assert_nothing_left(&f).await;
    }
}

#[tokio::test]
async fn a_revived_batch_is_not_deleted() {
    let f = Fixture::new().await;
    let ids = finished(&f, 4, false).await;
    f.advance(8 * 86_400);
    assert_eq!(delete_finished(&f.store, 7, 2).await.unwrap().tasks, 2);
    assert_eq!(f.api.post(&format!("/task/{}/retry", ids[0]), &json!({})).await.status, 200);
    assert_eq!(delete_finished(&f.store, 7, 2).await.unwrap(), Deleted::default());
    assert_doctor_is_content(&f).await;
    f.claim().await;
    f.api.succeed(&ids[0]).await;
    assert_doctor_is_content(&f).await;
    f.advance(8 * 86_400);
    while delete_finished(&f.store, 7, 1).await.unwrap().more {
        assert_doctor_is_content(&f).await;
    }
    assert_nothing_left(&f).await;
}

#[tokio::test]
async fn statistics_are_deleted_in_chunks() {
    let f = Fixture::new().await;
    f.db.execute(
        "insert into retry_stat (bucket, kind, attempt, failure_type, shard)
         select '2025-12-01', 'k' || n, 0, '', 0 from generate_series(1, 7000) n",
    )
    .await;
    assert_eq!(forget_stats(&f.store, 7, 5000).await.unwrap(), 5000);
    f.clean_up(7).await;
    assert_eq!(f.db.number("select count(*) from retry_stat").await, 0);
}
