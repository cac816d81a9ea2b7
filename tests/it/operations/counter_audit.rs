//! The audit of counters: the doctor finds wrong counters and repairs them.

use std::time::Duration;

use reprise::store::ledger::audit::{self, Extent};
use serde_json::json;

use crate::support::instance::command;
use crate::support::{Fixture, text};

fn doctor(f: &Fixture, args: &[&str]) -> (bool, String) {
    let mut command = command(&[("DATABASE_URL", f.db.url.as_str())]);
    let output = command.arg("doctor").args(args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.success(), said)
}

/// A service with something in every counter: a taken slot, a blocked task, a waiting child.
async fn busy() -> (Fixture, Vec<String>) {
    let f = Fixture::new().await;
    let rule = json!([{"type": "Concurency", "max_concurency": 1, "matcher": {"kind": "k"}}]);
    let task = json!({"name": "n", "kind": "k", "rules": rule, "expected_count": 10});
    let child = json!({"name": "c", "kind": "c", "dependencies": [{"id": "p"}]});
    let mut parent = task.clone();
    parent["id"] = json!("p");
    let ids = f.api.create(&json!([parent, task, child])).await;
    f.claim().await;
    f.db.assert_counters_match().await;
    (f, ids)
}

#[tokio::test]
async fn the_doctor_finds_nothing_wrong_with_a_busy_service() {
    let (f, _) = busy().await;
    let (ok, said) = doctor(&f, &[]);
    assert!(ok, "{said}");
    assert_eq!(said.matches(" ok").count(), 6, "{said}");
}

#[tokio::test]
async fn the_doctor_finds_and_repairs_every_wrong_counter() {
    for (counter, damage) in [
        ("slots", "update slot set used = used + 1, load = 0"),
        ("blocked groups", "update parking set state = 0"),
        ("blocked groups", "update task set parked_on = 4711 where parked_on is not null"),
        ("batches", "update batch_count set pending = 7, success = 3"),
        ("batches", "update batch_count set total_expected = 3, total_failures = 9"),
        ("batches", "update batch set completed_at = now()"),
        ("waiting", "update task set wait_count = 5 where status = 'waiting'"),
        ("waiting", "update task set wait_count = 0 where status = 'waiting'"),
        ("totals", "update status_count set running = running + 1"),
        ("derived", "update task set kind_hash = 7 where status = 'waiting'"),
        ("derived", "update task_spec set timeout_secs = 7 where kind = 'c'"),
    ] {
        let (f, ids) = busy().await;
        f.db.execute(damage).await;
        let (ok, said) = doctor(&f, &[]);
        assert!(!ok && said.contains(&format!("{counter:<14}  1 wrong")), "{damage}: {said}");
        assert!(said.contains("1 difference; `reprise doctor --fix` repairs it"), "{damage}: {said}");
        assert_eq!(said.matches(" ok").count(), 5, "{damage}: {said}");
        let (ok, said) = doctor(&f, &["--fix"]);
        assert!(ok && said.contains("repaired"), "{damage}: {said}");
        f.db.assert_counters_match().await;
        // The service continues from there.
        f.api.succeed(&ids[0]).await;
        assert_eq!(f.claim().await, 2, "{damage}");
        assert_eq!(f.api.status(&ids[1]).await, "Running", "{damage}");
        assert_eq!(f.api.status(&ids[2]).await, "Running", "{damage}");
        f.db.assert_counters_match().await;
    }
}

#[tokio::test]
async fn the_doctor_fails_a_waiting_child_whose_parent_failed() {
    let (f, ids) = busy().await;
    // The parent ends without moving its child.
    f.db.execute("update task set flags = 0").await;
    f.api.fail(&ids[0]).await;
    assert_eq!(f.api.status(&ids[2]).await, "Waiting");
    f.db.execute("update task set flags = 16").await;
    assert!(!doctor(&f, &[]).0);
    assert!(doctor(&f, &["--fix"]).0);
    let child = f.api.task(&ids[2]).await;
    assert_eq!((text(&child["status"]), text(&child["failure_type"])), ("Failure".into(), "dependency".into()));
    f.db.assert_counters_match().await;
}

/// The audit may take longer than a transaction, and its statements end with its own limit.
#[tokio::test]
async fn the_audit_has_its_own_time_limit() {
    let f = Fixture::new().await;
    let mut holder = f.db.pool.begin().await.unwrap();
    sqlx::raw_sql("lock table task in access exclusive mode").execute(&mut *holder).await.unwrap();
    let error = audit::audit(&f.store, Extent::All, Duration::from_millis(200)).await.unwrap_err().to_string();
    assert!(error.contains("timeout"), "{error}");
    holder.rollback().await.unwrap();
    let slow = f.store.with_limit(Duration::from_millis(1));
    assert_eq!(audit::audit(&slow, Extent::All, Duration::from_secs(60)).await.unwrap(), []);
}

#[tokio::test]
async fn the_doctor_refuses_a_database_without_migrations() {
    let f = Fixture::new().await;
    f.db.execute("drop table _sqlx_migrations").await;
    let (ok, said) = doctor(&f, &[]);
    assert!(!ok && said.contains("reprise migrate"), "{said}");
}
