//! Upgrades: instances of the previous version work on the newest tables, and the doctor fills what they leave out.
//!
//! `previous_statements.sql` holds the statements of the version that runs before the newest migrations are released.
//! `tests/previous_statements` writes it from a revision; run it after a release with migrations.

use reprise::store::ledger::audit::{self, Extent};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Executor, SqlSafeStr};
use std::time::Duration;
use uuid::Uuid;

use crate::support::instance::command;
use crate::support::{Fixture, text};

fn statements() -> Vec<&'static str> {
    include_str!("previous_statements.sql").split("---- statement\n").skip(1).map(str::trim).collect()
}

/// The one statement that contains all these words.
fn statement(words: &[&str]) -> &'static str {
    let found: Vec<_> = statements().into_iter().filter(|sql| words.iter().all(|word| sql.contains(word))).collect();
    assert_eq!(found.len(), 1, "{words:?}");
    found[0]
}

/// Runs a statement of the previous version, with values as text.
async fn run(f: &Fixture, words: &[&str], values: &[&str]) {
    let values: Vec<String> = values
        .iter()
        .map(|value| if *value == "null" { "null".into() } else { format!("'{}'", value.replace('\'', "''")) })
        .collect();
    let sql = format!("prepare old as {}; execute old({}); deallocate old", statement(words), values.join(", "));
    f.db.execute(&sql).await;
}

#[tokio::test]
async fn every_statement_of_the_previous_version_can_be_prepared() {
    let f = Fixture::new().await;
    assert!(statements().len() > 100);
    let mut failed = Vec::new();
    for sql in statements() {
        let mut connection = f.db.pool.acquire().await.unwrap();
        if let Err(error) = (&mut *connection).prepare(AssertSqlSafe(sql).into_sql_str()).await {
            failed.push(format!("{error}: {sql}"));
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// A batch of one task, as an instance of the previous version creates it.
async fn created_by_the_previous_version(f: &Fixture) -> (Uuid, Uuid) {
    let (batch, task) = (Uuid::now_v7(), Uuid::now_v7());
    let now = "2026-01-01T00:00:00Z";
    let list = |value: &dyn std::fmt::Display| format!("{{{value}}}");
    let (batches, tasks) = (list(&batch), list(&task));
    run(
        f,
        &["insert into batch (", "insert into batch_count"],
        &[&batches, "{null}", "{null}", r#"{"[\"old\"]"}"#, "{1}", "{null}", "{0}", "{0}", now],
    )
    .await;
    let null = "{null}";
    let values = [
        &batches,
        now,
        &tasks,
        "{pending}",
        "{0}",
        "{0}",
        "{0}",
        "{300}",
        null,
        null,
        "{n}",
        "{old}",
        null,
        null,
        null,
        "{f}",
        null,
        "{0}",
        null,
        null,
    ];
    run(f, &["insert into task_spec", "insert into task ("], &values).await;
    let mut values = vec!["{}"; 13];
    let instance = Uuid::now_v7().to_string();
    values.extend([now, "api", &instance, &tasks, "{1}", "{1}", &batches, "{null}", "{pending}", "{create}"]);
    values.extend(["{0}", "{0}", "{0,1,0,0,0,0,0,0,0}"]);
    run(f, &["insert into event", "insert into status_count", "update batch_count"], &values).await;
    (batch, task)
}

fn doctor(f: &Fixture, args: &[&str]) -> (bool, String) {
    let output = command(&[("DATABASE_URL", f.db.url.as_str())]).arg("doctor").args(args).output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

async fn listed(f: &Fixture, query: &str) -> Vec<String> {
    let answer = f.api.get(&format!("/task?{query}")).await;
    let ids = answer.body.as_array().unwrap().iter().map(|task: &Value| text(&task["id"]));
    ids.collect()
}

#[tokio::test]
async fn a_task_of_the_previous_version_is_repaired_and_executed() {
    let f = Fixture::new().await;
    let (_, task) = created_by_the_previous_version(&f).await;
    f.db.assert_counters_match().await;
    assert!(doctor(&f, &["--fix"]).0, "the doctor repairs what the previous version left out");
    let (ok, said) = doctor(&f, &[]);
    assert!(ok, "{said}");

    let task = task.to_string();
    assert_eq!(f.claim().await, 1);
    assert_eq!(f.api.fail(&task).await.status, 200);
    f.db.assert_counters_match().await;
    assert_eq!(listed(&f, "status=Failure&kind=old&timeout=300").await, [task.as_str()]);
}

/// The columns are as a version leaves them that does not know them.
#[tokio::test]
async fn missing_derived_columns_are_found_and_repaired() {
    let f = Fixture::new().await;
    let other = f.api.create(&json!([{"name": "n", "kind": "other", "timeout": 300}])).await;
    let (_, old) = created_by_the_previous_version(&f).await;
    let old = old.to_string();
    f.claim().await;
    f.db.execute("update task set kind_hash = default; update task_spec set timeout_secs = default").await;
    let alive = audit::audit(&f.store, Extent::Alive, Duration::from_secs(60)).await.unwrap();
    assert_eq!(alive.len(), 2, "{alive:?}");
    for id in [&old, &other[0]] {
        assert_eq!(f.api.fail(id).await.status, 200);
    }
    assert_eq!(audit::audit(&f.store, Extent::Alive, Duration::from_secs(60)).await.unwrap(), []);

    // The filter by kind finds the task without the derived column.
    assert_eq!(listed(&f, "status=Failure&kind=old").await, [old.as_str()]);
    assert_eq!(listed(&f, "status=Failure&timeout=300").await.len(), 0);
    let (ok, said) = doctor(&f, &[]);
    assert!(!ok && said.contains("derived         2 wrong") && said.contains(&old), "{said}");
    // The repair does not wait for a locked task.
    let mut holder = f.db.pool.begin().await.unwrap();
    sqlx::query("select from task where id = $1::uuid for update").bind(&old).execute(&mut *holder).await.unwrap();
    let found = audit::audit(&f.store, Extent::All, Duration::from_secs(60)).await.unwrap();
    audit::repair(&f.store, &found).await.unwrap();
    assert_eq!(audit::audit(&f.store, Extent::All, Duration::from_secs(60)).await.unwrap().len(), 1);
    holder.rollback().await.unwrap();
    let (ok, said) = doctor(&f, &["--fix"]);
    assert!(ok && said.contains("repaired"), "{said}");
    assert_eq!(f.db.number("select count(*) from task where kind_hash = 0").await, 0);
    assert_eq!(listed(&f, "status=Failure&timeout=300").await.len(), 2);
    assert_eq!(listed(&f, "status=Failure&kind=old").await, [old.as_str()]);
    f.db.assert_counters_match().await;
}
