//! The boundaries between the layers, checked in the source.

use std::collections::{BTreeMap, BTreeSet};
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

/// Modules by path, such as `store::tasks::lock`, with the modules that each imports. Unit tests do not count.
fn imports(src: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let mut sources: BTreeMap<String, String> = BTreeMap::new();
    for file in files(src) {
        let name = file.strip_prefix(src).unwrap().with_extension("").to_string_lossy().replace('/', "::");
        if name.contains("::tests") || ["lib", "main"].contains(&name.as_str()) {
            continue;
        }
        let text = std::fs::read_to_string(&file).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap().to_owned();
        sources.insert(name.trim_end_matches("::mod").to_owned(), code);
    }
    let module = |path: &[String]| {
        let prefixes = (1..=path.len()).rev().map(|end| path[..end].join("::"));
        prefixes.into_iter().find(|prefix| sources.contains_key(prefix))
    };
    let imported = |name: &str, code: &str| {
        let own: Vec<String> = name.split("::").map(str::to_owned).collect();
        let lines: Vec<&str> = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        let code = format!("\n{}", lines.join("\n"));
        let statements = code.split("\nuse ").chain(code.split("\npub use ")).skip(1);
        let paths = statements.flat_map(|rest| leaves(rest.split(';').next().unwrap()));
        paths
            .filter_map(|path| match path.iter().take_while(|part| *part == "super").count() {
                0 if path[0] == "crate" => module(&path[1..]),
                0 => module(&[own.clone(), path].concat()).filter(|found| found.starts_with(name)),
                up => module(&[&own[..own.len() - up], &path[up..]].concat()),
            })
            .filter(|found| found != name)
            .collect()
    };
    sources.iter().map(|(name, code)| (name.clone(), imported(name, code))).collect()
}

/// The paths of a `use` statement, such as `a::{b, c::d}`, each as its parts.
fn leaves(text: &str) -> Vec<Vec<String>> {
    let (mut depth, mut items) = (0, vec![String::new()]);
    for c in text.chars() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if c == ',' && depth == 0 { items.push(String::new()) } else { items.last_mut().unwrap().push(c) }
    }
    let parts =
        |path: &str| path.split("::").map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect();
    let mut found = Vec::new();
    for item in items.iter().map(|item| item.trim()).filter(|item| !item.is_empty()) {
        match item.split_once('{') {
            None => found.push(parts(item)),
            Some((prefix, group)) => {
                let prefix: Vec<String> = parts(prefix);
                let group = group.rsplit_once('}').unwrap().0;
                found.extend(leaves(group).into_iter().map(|leaf| [prefix.clone(), leaf].concat()));
            }
        }
    }
    found
}

#[test]
fn no_two_modules_import_each_other() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut seen = 0;
    for src in [root.join("src"), root.join("crates/private-postgres/src")] {
        let imports = imports(&src);
        seen += imports.values().map(BTreeSet::len).sum::<usize>();
        for (a, targets) in &imports {
            for b in targets {
                // A folder's `mod.rs` may use its files, and its files what it defines.
                let related = a.starts_with(&format!("{b}::")) || b.starts_with(&format!("{a}::"));
                let back = imports.get(b).is_some_and(|targets| targets.contains(a));
                assert!(related || !back, "{a} and {b} import each other");
            }
        }
    }
    assert!(seen > 500, "only {seen} imports found");
}

#[test]
fn folders_and_files_stay_small_enough_to_survey() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders: BTreeMap<PathBuf, BTreeSet<PathBuf>> = BTreeMap::new();
    for file in files(&root.join("src")).into_iter().chain(files(&root.join("tests"))) {
        let lines = std::fs::read_to_string(&file).unwrap().lines().count();
        let is_source = file.starts_with(root.join("src")) && !file.to_string_lossy().contains("/tests");
        assert!(!is_source || lines <= 460, "{} has {lines} lines", file.display());
        for child in file.ancestors().take_while(|path| *path != root) {
            folders.entry(child.parent().unwrap().to_owned()).or_default().insert(child.to_owned());
        }
    }
    folders.remove(root);
    for (folder, entries) in folders {
        assert!(entries.len() <= 22, "{} has {} entries", folder.display(), entries.len());
    }
}

#[test]
fn a_type_name_stands_for_one_type() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in files(&root.join("src")) {
        let name = file.strip_prefix(root).unwrap().to_string_lossy().into_owned();
        if name.contains("/tests") {
            continue;
        }
        for line in std::fs::read_to_string(&file).unwrap().lines() {
            let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
            let declares = |word: &&str| ["struct", "enum", "trait", "type"].contains(word);
            let is_code = line.starts_with("pub") || line.split(' ').next().is_some_and(|word| declares(&word));
            if is_code && words.any(|word| declares(&word)) {
                found.entry(words.next().unwrap_or_default().to_owned()).or_default().push(name.clone());
            }
        }
    }
    assert!(found.len() > 200, "only {} types found", found.len());
    // Each layer has its own error.
    let doubled = found.into_iter().filter(|(name, files)| files.len() > 1 && name != "Error" && name != "Result");
    assert_eq!(doubled.collect::<Vec<_>>(), Vec::new());
}

#[test]
fn the_docs_name_only_files_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["store/", "domain/", "loops/", "http/", "service/", "webhook/", "bench/", "config/", "telemetry/"];
    let mut seen = 0;
    for entry in std::fs::read_dir(root.join("docs")).unwrap() {
        let page = entry.unwrap().path();
        let text = std::fs::read_to_string(&page).unwrap();
        let is_path = |word: &&str| folders.iter().any(|folder| word.starts_with(folder)) && !word.contains([' ', '*']);
        for path in text.split('`').skip(1).step_by(2).filter(is_path) {
            seen += 1;
            assert!(root.join("src").join(path).exists(), "{} names {path}", page.display());
        }
        for path in text.split('`').skip(1).step_by(2).filter(|word| word.starts_with("tests/it/")) {
            assert!(root.join(path).exists(), "{} names {path}", page.display());
        }
    }
    assert!(seen > 30, "only {seen} paths found");
}
