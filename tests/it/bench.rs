//! `reprise bench`: that it measures what it says, not how fast it is.

use std::path::PathBuf;

use serde_json::Value;

use crate::support::instance::command;

#[test]
fn everything_is_measured_and_nothing_is_left_behind() {
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
fn what_there_is_to_measure_can_be_asked_for() {
    let list = command(&[]).args(["bench", "--list"]).output().unwrap();
    let text = String::from_utf8_lossy(&list.stdout);
    assert!(list.status.success() && text.contains("create-1 ") && text.contains("e2e-50k "), "{text}");
    let wrong = command(&[]).args(["bench", "everything"]).output().unwrap();
    let said = String::from_utf8_lossy(&wrong.stderr);
    assert!(!wrong.status.success() && said.contains("everything") && said.contains("create-1"), "{said}");
}

#[test]
fn a_file_that_cannot_be_written_is_told_before_anything_is_measured() {
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
