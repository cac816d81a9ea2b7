//! The boundaries between the layers, checked in the source.

use std::path::{Path, PathBuf};

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
    found
}

/// Files below src outside `allowed` in which one of `words` occurs, unit tests aside.
fn offenders(allowed: &[&str], words: &[&str]) -> Vec<String> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    for file in files(&src) {
        let name = file.strip_prefix(&src).unwrap().to_string_lossy().into_owned();
        if allowed.iter().any(|part| name.starts_with(part)) || name.contains("/tests/") || name.ends_with("/tests.rs")
        {
            continue;
        }
        let text = std::fs::read_to_string(&file).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap();
        let code: String =
            code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
        found.extend(words.iter().filter(|word| code.contains(**word)).map(|word| format!("{name}: {word}")));
    }
    found
}

/// Directories and files at the top of src, but for these.
fn all_but(these: &[&str]) -> Vec<String> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let names = std::fs::read_dir(src).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    names.filter(|name| !these.contains(&name.as_str())).collect()
}

#[test]
fn sql_is_in_the_store_only() {
    // The benchmark compares the service with the database alone.
    assert_eq!(offenders(&["store", "bench/raw"], &["sqlx::", "query!", "PgPool"]), Vec::<String>::new());
}

#[test]
fn http_is_at_the_edge_only() {
    assert_eq!(offenders(&["http"], &["axum", "hyper"]), Vec::<String>::new());
    assert_eq!(offenders(&["webhook"], &["reqwest"]), Vec::<String>::new());
}

#[test]
fn handlers_change_tasks_on_behalf_of_the_caller() {
    assert_eq!(offenders(&[], &["api.service.clone()"]), Vec::<String>::new());
}

#[test]
fn the_domain_is_pure() {
    let others = all_but(&["domain"]);
    let others: Vec<&str> = others.iter().map(String::as_str).collect();
    let words = [
        "sqlx",
        "axum",
        "tokio",
        "rand::",
        "Utc::now",
        "SystemTime",
        "Instant",
        "std::env",
        "crate::store",
        "crate::service",
        "crate::http",
        "crate::loops",
        "crate::webhook",
        "now_v7",
    ];
    assert_eq!(offenders(&others, &words), Vec::<String>::new());
}

#[test]
fn calls_go_down_only() {
    let layers: [(&str, &[&str]); 4] = [
        ("store", &["crate::service", "crate::http", "crate::loops", "crate::webhook", "crate::app"]),
        ("service", &["crate::http", "crate::loops", "crate::webhook", "crate::app"]),
        ("loops", &["crate::http", "crate::app"]),
        ("webhook", &["crate::store", "crate::service", "crate::http", "crate::loops"]),
    ];
    for (layer, above) in layers {
        let others = all_but(&[layer]);
        let others: Vec<&str> = others.iter().map(String::as_str).collect();
        assert_eq!(offenders(&others, above), Vec::<String>::new(), "{layer}");
    }
}

#[test]
fn the_benchmark_uses_no_internals_of_the_service() {
    let others = all_but(&["bench"]);
    let others: Vec<&str> = others.iter().map(String::as_str).collect();
    let words = ["crate::store", "crate::service", "crate::http", "crate::loops", "crate::webhook", "crate::domain"];
    assert_eq!(offenders(&others, &words), Vec::<String>::new());
}

#[test]
fn the_status_of_a_task_is_written_in_one_place() {
    // The tables that the benchmark writes to are copies of its own.
    let allowed = ["store/tasks/transitions", "store/tasks/create.rs", "store/outbox", "bench/raw"];
    assert_eq!(offenders(&allowed, &["set status", "status = u."]), Vec::<String>::new());
    for file in files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/store/outbox")) {
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(!text.contains("update task"), "{}: the outbox writes its own status only", file.display());
    }
}

#[test]
fn only_listed_files_read_the_clock_or_spawn_tasks() {
    assert_eq!(offenders(&["clock.rs"], &["Utc::now"]), Vec::<String>::new());
    let allowed = ["app.rs", "main.rs", "loops", "http/mod.rs", "http/server.rs", "bench"];
    assert_eq!(offenders(&allowed, &["tokio::spawn", ".spawn("]), Vec::<String>::new());
}
