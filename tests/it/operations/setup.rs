//! Setup: from an empty directory to a running service, and its restart after every kind of end.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::Output;

use serde_json::json;

use crate::support::database::admin;
use crate::support::instance::{Instance, command};
use crate::support::{Database, Receiver, eventually};

struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        Dir(dir)
    }

    fn settings(&self) -> [(&str, &str); 3] {
        [("REPRISE_DATA_DIR", self.0.to_str().unwrap()), ("PORT", "0"), ("RUST_LOG", "warn")]
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn run(settings: &[(&str, &str)], args: &[&str]) -> Output {
    command(settings).args(args).output().unwrap()
}

/// The one line with which the binary refused to start.
fn refusal(output: &Output) -> String {
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let lines: Vec<&str> = text.lines().filter(|line| !line.contains(" WARN ")).collect();
    assert_eq!(lines.len(), 1, "{text}");
    lines[0].to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_private_postgres_survives_every_kind_of_kill() {
    let dir = Dir::new("own");
    let first = Instance::spawn(command(&dir.settings()));
    let ids = first
        .api
        .create(&json!([{"name": "a", "kind": "k", "timeout": 3600}, {"name": "b", "kind": "k", "timeout": 3600}]))
        .await;
    for id in &ids {
        first.api.wait_for(id, "Running").await;
    }
    assert_eq!(first.api.put(&format!("/task/{}", ids[0]), &json!({"new_success": 5})).await.status, 202);

    first.kill();
    let third = Instance::spawn(command(&dir.settings()));
    assert_eq!(third.api.task(&ids[0]).await["success"], 5, "after kill -9 of the service");
    assert_eq!(third.api.succeed(&ids[0]).await.status, 200);

    let killed = kill_postgres(&dir);
    // Connections outlive the server for a moment and still answer: a new server has to be seen first.
    eventually("a new server", async || server_of(&dir).filter(|pid| *pid != killed)).await;
    eventually("the database to come back", async || (third.api.get("/ready").await.status == 200).then_some(())).await;
    assert_eq!(third.api.status(&ids[0]).await, "Success", "after kill -9 of postgres");

    kill_postgres(&dir);
    third.kill();
    let fourth = Instance::spawn(command(&dir.settings()));
    assert_eq!(fourth.api.status(&ids[0]).await, "Success", "after kill -9 of both");
    assert_eq!(fourth.api.status(&ids[1]).await, "Running");
    assert!(fourth.terminate().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_instance_joins_the_running_private_postgres() {
    let dir = Dir::new("shared");
    let first = Instance::spawn(command(&dir.settings()));
    let ids = first.api.create(&json!([{"name": "a", "kind": "k", "timeout": 3600}])).await;
    first.api.wait_for(&ids[0], "Running").await;
    let server = server_of(&dir).unwrap();

    for args in [["doctor"], ["migrate"]] {
        let output = run(&dir.settings(), &args);
        assert!(output.status.success(), "{args:?}: {output:?}");
    }
    let said = greeting(&dir);
    assert!(said.contains(dir.0.to_str().unwrap()) && said.contains("of another instance"), "{said}");

    let log = dir.0.join("second.log");
    let mut second = command(&dir.settings());
    second.stderr(std::fs::File::create(&log).unwrap());
    let second = Instance::spawn(second);
    assert_eq!(second.api.status(&ids[0]).await, "Running");
    assert_eq!(server_of(&dir), Some(server), "no second server was started");

    // The server stops with its owner, and the other instance reports that.
    assert!(first.terminate().success());
    eventually("no database", async || (second.api.get("/ready").await.status == 503).then_some(())).await;
    assert_eq!(second.api.get("/health").await.status, 200);
    let said = async || {
        Some(()).filter(|()| std::fs::read_to_string(&log).unwrap().contains("stopped with the process that ran it"))
    };
    eventually("a line in the log", said).await;

    let owner = Instance::spawn(command(&dir.settings()));
    eventually("the database", async || (second.api.get("/ready").await.status == 200).then_some(())).await;
    assert_eq!(second.api.succeed(&ids[0]).await.status, 200);
    assert!(second.terminate().success());
    assert_eq!(owner.api.status(&ids[0]).await, "Success", "an instance that joined a server does not stop it");
}

/// The output of an instance that is ready.
fn greeting(dir: &Dir) -> String {
    let mut child = command(&dir.settings()).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let said: Vec<String> = lines.take_while(|line| !line.starts_with("Try")).collect();
    child.kill().unwrap();
    child.wait().unwrap();
    said.join("\n")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_instances_started_at_once_share_a_new_postgres() {
    let dir = Dir::new("at-once");
    let path = dir.0.clone();
    let start = move || {
        let settings = [("REPRISE_DATA_DIR", path.to_str().unwrap()), ("PORT", "0"), ("RUST_LOG", "warn")];
        Instance::spawn(command(&settings))
    };
    let both = (tokio::task::spawn_blocking(start.clone()), tokio::task::spawn_blocking(start));
    let (one, other) = (both.0.await.unwrap(), both.1.await.unwrap());
    let ids = one.api.create(&json!([{"name": "a", "kind": "k"}])).await;
    other.api.wait_for(&ids[0], "Running").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_workers_are_allowed_with_a_private_postgres() {
    let dir = Dir::new("local");
    let receiver = Receiver::start().await;
    let instance = Instance::spawn(command(&dir.settings()));
    let elsewhere = json!({"kind": "Webhook", "params": {"url": "http://10.0.0.1/", "verb": "Post"}});
    let tasks = json!([{"name": "a", "kind": "k", "on_start": receiver.action("/start")},
                       {"name": "b", "kind": "k", "on_start": elsewhere}]);
    let ids = instance.api.create(&tasks).await;
    instance.api.wait_for(&ids[0], "Running").await;
    let refused = instance.api.wait_for(&ids[1], "Failure").await;
    assert_eq!(refused["failure_reason"], "on_start: 10.0.0.1 is not an allowed address (WEBHOOK_ALLOW)");
}

fn server_of(dir: &Dir) -> Option<i32> {
    let file = std::fs::read_to_string(dir.0.join("pgdata/postmaster.pid")).ok()?;
    file.lines().next()?.parse().ok()
}

fn kill_postgres(dir: &Dir) -> i32 {
    let pid = server_of(dir).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), rustix::process::Signal::KILL).unwrap();
    pid
}

#[test]
fn bad_settings_are_refused_with_one_line() {
    let cases: [(&[(&str, &str)], &str); 5] = [
        (&[("PORT", "http")], "reprise: PORT=http: must be a whole number from 0 to 65535"),
        (&[("LOG_FORMAT", "xml")], "reprise: LOG_FORMAT=xml: must be text or json"),
        (&[("AUTO_MIGRATE", "maybe")], "reprise: AUTO_MIGRATE=maybe: must be 0, 1, true or false"),
        (&[("DATABASE_URL", "nonsense")], "reprise: DATABASE_URL"),
        (&[("POSTGRES_BIN_DIR", "/nowhere")], "reprise: POSTGRES_BIN_DIR"),
    ];
    let dir = Dir::new("bad");
    for (settings, line) in cases {
        let all: Vec<(&str, &str)> =
            dir.settings().into_iter().filter(|(name, _)| *name != "PORT").chain(settings.iter().copied()).collect();
        let said = refusal(&run(&all, &[]));
        assert!(said.starts_with(line), "{said}");
    }
    let unreachable = refusal(&run(&[("DATABASE_URL", "postgres://localhost:1/x"), ("RUST_LOG", "warn")], &[]));
    assert!(unreachable.contains("DATABASE_URL"), "{unreachable}");
}

#[test]
fn a_taken_port_is_named_in_the_error() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let dir = Dir::new("taken");
    let settings = [("REPRISE_DATA_DIR", dir.0.to_str().unwrap()), ("PORT", port.as_str()), ("RUST_LOG", "warn")];
    let said = refusal(&run(&settings, &[]));
    assert!(said.starts_with(&format!("reprise: PORT={port}")), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ten_instances_started_at_once_migrate_the_database_together() {
    let db = Database::new().await;
    let name = db.url.rsplit('/').next().unwrap().split('?').next().unwrap().to_owned();
    db.pool.close().await;
    admin(&format!("drop database {name}")).await;
    admin(&format!("create database {name}")).await;
    let url = db.url.clone();
    let apart = [("DATABASE_URL", url.as_str()), ("AUTO_MIGRATE", "0"), ("PORT", "0"), ("RUST_LOG", "warn")];
    let said = refusal(&run(&apart, &[]));
    assert!(said.contains("AUTO_MIGRATE=0") && said.contains("reprise migrate"), "{said}");

    let starts = (0..10).map(|_| {
        let url = url.clone();
        tokio::task::spawn_blocking(move || Instance::start(&url, &[("POOL_MAX_SIZE", "5")]))
    });
    let instances: Vec<Instance> =
        futures_util::future::join_all(starts).await.into_iter().map(Result::unwrap).collect();
    let ids = instances[0].api.create(&json!([{"name": "n", "kind": "k"}])).await;
    instances[9].api.wait_for(&ids[0], "Running").await;
    assert!(run(&[("DATABASE_URL", url.as_str())], &["migrate"]).status.success(), "nothing left to do is fine");
    let apart = Instance::start(&url, &[("AUTO_MIGRATE", "0")]);
    assert_eq!(apart.api.get("/ready").await.status, 200);
}

#[test]
fn help_and_openapi_need_no_database() {
    let help = run(&[], &["--help"]);
    assert!(help.status.success());
    let text = String::from_utf8_lossy(&help.stdout);
    for name in [
        "DATABASE_URL",
        "WORKER_CLAIM_TIMEOUT_SECS",
        "RETRY_MAX_DELAY_LIMIT",
        "LOG_FORMAT",
        "serve",
        "migrate",
        "openapi",
    ] {
        assert!(text.contains(name), "{name}");
    }
    let description = run(&[], &["openapi"]);
    assert_eq!(String::from_utf8_lossy(&description.stdout), include_str!("../../../openapi/openapi.json"));
}

#[test]
fn a_closed_standard_output_is_not_an_error() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = command(&[]).arg("openapi").stdout(writer).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    if !cfg!(target_os = "linux") {
        return;
    }
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let line = refusal(&command(&[]).arg("openapi").stdout(full).output().unwrap());
    assert!(line.starts_with("reprise: standard output: "), "{line}");
}
