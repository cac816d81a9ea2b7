//! `reprise bench`: that it measures its workloads, not how fast they are.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::support::instance::command;
use crate::support::{Database, Instance, eventually};

#[test]
fn the_benchmark_measures_each_workload_and_removes_its_data_directory() {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-{}", std::process::id()));
    let output = command(&[("REPRISE_DATA_DIR", dir.to_str().unwrap()), ("RUST_LOG", "warn")])
        .args([
            "bench",
            "create-1",
            "create-dag",
            "e2e-5k",
            "chain",
            "put",
            "--quick",
            "--scale",
            "0.02",
            "--json",
            "-",
        ])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&document["run"]["quick"], &document["run"]["url"]), (&true.into(), &Value::Null));
    let machine = &document["machine"];
    assert!(machine["cores"].as_u64().unwrap() > 0);
    assert_eq!(
        (&machine["postgres"]["fsync"], &machine["postgres"]["synchronous_commit"]),
        (&"on".into(), &"on".into())
    );
    let workloads = document["workloads"].as_array().unwrap();
    let names: Vec<&str> = workloads.iter().map(|one| one["workload"].as_str().unwrap()).collect();
    assert_eq!(names, ["create-1", "create-dag", "e2e-5k", "chain", "put"]);
    for one in workloads {
        assert!(one["failed"].is_null() && one["skipped"].is_null(), "{one}");
        assert!(one["count"].as_u64().unwrap() > 0);
        let main = &one["figures"][0];
        assert!(main["value"].as_f64().unwrap() > 0.0 && main["target"].is_f64(), "{one}");
        assert!(one["latency_ms"]["p50"].as_f64() <= one["latency_ms"]["p999"].as_f64(), "{one}");
        assert!(one["raw"]["ratio"].as_f64().unwrap() > 0.0, "{one}");
        if cfg!(target_os = "linux") {
            assert!(one["service_rss_bytes"].as_u64().unwrap() > 0, "{one}");
            for who in ["service", "postgres", "generator"] {
                assert!(one["cpu_seconds_per_1000"][who].as_f64().unwrap() >= 0.0, "{one}");
            }
        }
    }
    assert!(!dir.exists(), "{said}");
}

#[test]
fn the_benchmark_lists_its_workloads() {
    let list = command(&[]).args(["bench", "--list"]).output().unwrap();
    let text = String::from_utf8_lossy(&list.stdout);
    assert!(list.status.success() && text.contains("create-1 ") && text.contains("e2e-50k "), "{text}");
    let wrong = command(&[]).args(["bench", "everything"]).output().unwrap();
    let said = String::from_utf8_lossy(&wrong.stderr);
    assert!(!wrong.status.success() && said.contains("everything") && said.contains("create-1"), "{said}");
}

#[test]
fn the_benchmark_refuses_an_unwritable_json_file_before_it_measures() {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-json-{}", std::process::id()));
    let output = command(&[("REPRISE_DATA_DIR", dir.to_str().unwrap())])
        .args(["bench", "create-1", "--json", "no/such/place.json"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(!output.status.success() && said.contains("--json no/such/place.json: "), "{said}");
    assert!(!dir.exists());
}

fn bench(instance: &Instance, args: &[&str]) -> Command {
    let mut command = command(&[]);
    command.args(["bench", "--quick", "--url", instance.api.base()]).args(args);
    command
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_benchmark_does_not_wait_for_a_service_that_cannot_call_back() {
    let db = Database::new().await;
    let instance = Instance::start(&db.url, &[("WEBHOOK_ALLOW", "")]);
    let output = bench(&instance, &["latency", "http", "--scale", "0.02"]).output().unwrap();
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success());
    assert!(table.contains("latency") && table.contains("--sink") && table.contains("WEBHOOK_ALLOW"), "{table}");
    assert!(table.contains("requests/s"), "the other workload is measured: {table}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_benchmark_cancels_its_tasks_and_prints_its_results() {
    let db = Database::new().await;
    let instance = Instance::start(&db.url, &[]);
    let other = instance.api.create(&json!([{"name": "other", "kind": "bench", "timeout": 3600}])).await;
    let mut endless = bench(&instance, &["memory", "create-1", "--scale", "1000"]);
    let running = endless.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("tasks", async || (db.number("select count(*) from task").await > 100).then_some(())).await;
    kill_process(Pid::from_raw(running.id().cast_signed()).unwrap(), Signal::INT).unwrap();
    let output = running.wait_with_output().unwrap();
    let (table, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!output.status.success() && said.ends_with("reprise: interrupted\n"), "{said}");
    assert!(table.contains("memory ") && table.contains("failed: interrupted"), "{table}");
    // Each client may have had one request in flight.
    let alive = "select count(*) from task where ended_at is null";
    assert!(db.number(alive).await <= 65, "{}", db.number(alive).await);
    assert_ne!(instance.api.status(&other[0]).await, "Canceled");
}
