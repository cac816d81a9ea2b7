//! An instance has at most `POOL_MAX_SIZE` server processes and one that listens, even if clients hang up.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use crate::support::{Database, Instance, LockHolder, eventually};

/// `POOL_MAX_SIZE`
const POOL: usize = 8;
/// Requests whose clients hang up: far more than there are connections.
const HANG_UPS: usize = 3000;

fn start(db: &Database) -> Instance {
    Instance::start(&db.url, &[("RUST_LOG", "error"), ("POOL_MAX_SIZE", "8"), ("DATABASE_TIMEOUT_SECS", "2")])
}

/// Clients that repeatedly send a request and hang up a moment later.
struct Siege {
    stop: CancellationToken,
    hang_ups: Arc<AtomicUsize>,
}

/// Starts such clients. `request` makes the request of a client of its number.
fn hang_up(instance: &Instance, clients: u64, request: impl Fn(u64) -> String) -> Siege {
    let (stop, hang_ups) = (CancellationToken::new(), Arc::new(AtomicUsize::default()));
    let siege = Siege { stop: stop.clone(), hang_ups: Arc::clone(&hang_ups) };
    for i in 0..clients {
        let (stop, hang_ups, request) = (stop.clone(), Arc::clone(&hang_ups), request(i));
        let address = instance.api.base().strip_prefix("http://").unwrap().to_owned();
        let patience = Duration::from_millis(20 + 7 * (i % 20));
        tokio::spawn(async move {
            while !stop.is_cancelled() {
                if let Ok(mut stream) = TcpStream::connect(&address).await {
                    let _ = stream.write_all(request.as_bytes()).await;
                    // Some of the requests are being worked on by then.
                    tokio::time::sleep(patience).await;
                    hang_ups.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }
    siege
}

/// Counts the server processes that work, until enough clients have hung up. One whose connection was closed may need a
/// moment to end, so a few more than the pool has are no fault.
async fn assert_bounded(db: &Database, siege: &Siege) {
    let working = "select count(*) from pg_stat_activity where datname = current_database() and \
                   application_name = 'reprise' and state is distinct from 'idle'";
    let mut seen = 0;
    eventually("enough clients to hang up", async || {
        let now = usize::try_from(db.number(working).await).unwrap();
        seen = seen.max(now);
        assert!(now <= 2 * POOL, "{now} server processes work");
        (siege.hang_ups.load(Ordering::Relaxed) >= HANG_UPS).then_some(())
    })
    .await;
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
    let siege = hang_up(&instance, 40, |i| {
        let path = match i % 3 {
            0 => "/task?status=Success&kind=slow".to_owned(),
            1 => format!("/task?kind=slow&page={}&page_size=100", 900 + i),
            _ => format!("/task?status=Success&name=slow&page={i}&page_size=100"),
        };
        format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
    });
    assert_bounded(&db, &siege).await;
    siege.stop.cancel();
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
    let siege = hang_up(&instance, 40, |i| {
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
    assert_bounded(&db, &siege).await;
    siege.stop.cancel();
    holder.release().await;
    assert_alive(&instance).await;
    db.assert_counters_match().await;
}
