//! An instance has at most `POOL_MAX_SIZE` server processes and one that listens, even if clients hang up.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use crate::support::{Database, Instance, LockHolder};

/// `POOL_MAX_SIZE`
const POOL: usize = 8;
/// Far longer than the service keeps a transaction.
const SIEGE: Duration = Duration::from_secs(10);

fn start(db: &Database) -> Instance {
    Instance::start(&db.url, &[("RUST_LOG", "error"), ("POOL_MAX_SIZE", "8"), ("DATABASE_TIMEOUT_SECS", "2")])
}

/// Starts clients that repeatedly send a request and hang up a moment later. `request` makes it of their number.
fn hang_up(instance: &Instance, clients: u64, request: impl Fn(u64) -> String) -> CancellationToken {
    let stop = CancellationToken::new();
    for i in 0..clients {
        let (stop, request) = (stop.clone(), request(i));
        let address = instance.api.base().strip_prefix("http://").unwrap().to_owned();
        let patience = Duration::from_millis(20 + 7 * (i % 20));
        tokio::spawn(async move {
            while !stop.is_cancelled() {
                if let Ok(mut stream) = TcpStream::connect(&address).await {
                    let _ = stream.write_all(request.as_bytes()).await;
                    tokio::time::sleep(patience).await;
                }
            }
        });
    }
    stop
}

/// Counts server processes for as long as the siege takes. An idle process whose connection was closed needs a moment to
/// end. So a process counts if it was at work three times in a row, or was there for five seconds.
async fn assert_bounded(db: &Database) {
    let processes = "select pid, state is distinct from 'idle' from pg_stat_activity \
                     where datname = current_database() and application_name = 'reprise'";
    let (mut before, mut last): (HashSet<i32>, HashSet<i32>) = Default::default();
    let mut since: HashMap<i32, Instant> = HashMap::new();
    let (started, mut seen) = (Instant::now(), 0);
    while started.elapsed() < SIEGE {
        let found: Vec<(i32, bool)> = sqlx::query_as(processes).fetch_all(&db.pool).await.unwrap();
        since.retain(|pid, _| found.iter().any(|(there, _)| there == pid));
        let now: HashSet<i32> = found.iter().filter(|(_, works)| *works).map(|(pid, _)| *pid).collect();
        let stays = |pid: &i32, works: bool| works && last.contains(pid) && before.contains(pid);
        let mut stay = 0;
        for (pid, works) in &found {
            let first = *since.entry(*pid).or_insert_with(Instant::now);
            stay += usize::from(stays(pid, *works) || first.elapsed() > Duration::from_secs(5));
        }
        assert!(stay <= POOL + 1, "{stay} server processes");
        seen = seen.max(stay);
        (before, last) = (last, now);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(seen > 0, "no server process was seen");
}

async fn assert_alive(instance: &Instance) {
    let ids = instance.api.create(&json!([{"name": "n", "kind": "alive"}])).await;
    instance.api.wait_for(&ids[0], "Running").await;
    assert_eq!(instance.api.succeed(&ids[0]).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn clients_that_hang_up_on_slow_lists_leave_no_server_processes_behind() {
    let db = Database::new().await;
    let instance = start(&db);
    // No task has succeeded, so a list of succeeded tasks of this kind reads all of them.
    db.execute(
        "insert into batch (id, kinds, total, created_at) values (gen_random_uuid(), '{slow}', 300000, now());
         insert into task_spec (id, batch_id, name, kind, metadata, created_at)
         select gen_random_uuid(), b.id, 'slow', 'slow', jsonb_build_object('n', n), now()
         from batch b, generate_series(1, 300000) n;
         insert into task (id, batch_id, status, priority, flags, timeout_secs, created_at, ended_at, last_updated)
         select id, batch_id, 'canceled', 0, 0, 60, created_at, now(), now() from task_spec",
    )
    .await;
    let stop = hang_up(&instance, 40, |i| {
        let path = match i % 3 {
            0 => "/task?status=Success&kind=slow".to_owned(),
            1 => format!("/task?kind=slow&page={}&page_size=100", 900 + i),
            _ => format!("/task?status=Success&name=slow&page={i}&page_size=100"),
        };
        format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
    });
    assert_bounded(&db).await;
    stop.cancel();
    assert_alive(&instance).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn clients_that_hang_up_while_they_wait_for_a_lock_leave_no_server_processes_behind() {
    let db = Database::new().await;
    let instance = start(&db);
    let created = instance.api.post("/task", &json!([{"name": "n", "kind": "k", "timeout": 3600}])).await;
    let batch = created.headers["x-batch-id"].to_str().unwrap().to_owned();
    let id = created.body[0]["id"].as_str().unwrap().to_owned();
    instance.api.wait_for(&id, "Running").await;
    let holder = LockHolder::holding(&db, "select from task for update").await;
    let stop = hang_up(&instance, 40, |i| {
        let (method, path, body) = match i % 6 {
            0 => ("PATCH", format!("/task/{id}"), "{\"new_success\": 1}"),
            1 => ("PUT", format!("/task/{id}"), "{\"new_success\": 1}"),
            2 => ("DELETE", format!("/task/{id}"), "{}"),
            3 => ("PATCH", format!("/task/pause/{id}"), "{}"),
            4 => ("POST", format!("/task/{id}/retry"), "{}"),
            _ => ("DELETE", format!("/batch/{batch}"), "{}"),
        };
        let length = body.len();
        format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        )
    });
    assert_bounded(&db).await;
    stop.cancel();
    holder.release_after(SIEGE).await;
    assert_alive(&instance).await;
    db.assert_counters_match().await;
}
