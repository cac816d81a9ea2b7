//! Measures PostgreSQL alone with the same kind of rows: as many connections as the workload has clients, the same
//! server and durability, and copies of the tables with the same indexes and settings.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use sqlx::PgConnection;
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{RawDatabase, database_error};
use crate::bench::load::{Latencies, Measured};
use crate::bench::progress::Progress;

const SCHEMA: &str = "reprise_bench";

/// The work of PostgreSQL alone that a workload is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference {
    /// Inserts one task per transaction.
    Insert,
    /// Ends one running task per transaction.
    Update,
    /// Raises the counters of one running task per transaction.
    Count,
    /// Inserts tasks with `COPY`, `rows` per transaction, with `links` links each.
    Copy { rows: usize, links: usize },
}

impl Reference {
    pub fn describe(self) -> String {
        match self {
            Reference::Insert => "single-row inserts".into(),
            Reference::Update | Reference::Count => "single-row updates".into(),
            Reference::Copy { rows, .. } => format!("COPY, {rows} rows each"),
        }
    }
}

const INSERT: &str = "with s as (
        insert into reprise_bench.task_spec (id, batch_id, name, kind, actions, created_at)
        values ($1, $2, 'bench', 'bench', $3, now())
    )
    insert into reprise_bench.task (id, batch_id, status, priority, flags, timeout_secs, created_at, last_updated)
    values ($1, $2, 'pending', 0, 0, 60, now(), now())";
const UPDATE: &str =
    "update reprise_bench.task set status = 'success', ended_at = now(), timeout_at = null, claimed_by = null,
        last_updated = now() where id = $1 and status = $2::text::task_status";
const COUNT: &str = "update reprise_bench.task set success = success + 1, last_updated = now()
    where id = $1 and status = $2::text::task_status";
const RUNNING: &str = "insert into reprise_bench.task (id, batch_id, status, priority, flags, timeout_secs, created_at,
        started_at, last_updated, claimed_by, claimed_run, timeout_at)
    select id, $2, 'running', 0, 0, 60, now(), now(), now(), $2, 0, now() + interval '1 day' from unnest($1::uuid[]) u(id)";
/// The actions of an ordinary task.
const ACTIONS: &str = r#"{"on_start":{"kind":"Webhook","params":{"url":"http://127.0.0.1:65535/","verb":"Post"}}}"#;

/// Measures one kind of work in copies of the tables, and drops them afterwards.
pub async fn measure(
    database: &RawDatabase,
    kind: Reference,
    connections: usize,
    count: usize,
    progress: &Progress,
) -> Result<Measured, String> {
    copy_tables(database).await?;
    let measured = run(database, kind, connections, count, progress).await;
    database.execute(&format!("drop schema {SCHEMA} cascade")).await?;
    measured
}

/// Copies the tables with their indexes and constraints and with their storage settings, which `like` omits.
async fn copy_tables(database: &RawDatabase) -> Result<(), String> {
    let mut statements = format!("drop schema if exists {SCHEMA} cascade; create schema {SCHEMA};");
    let mut connection = database.connect().await?;
    for table in ["task", "task_spec", "link"] {
        let _ = write!(statements, "create table {SCHEMA}.{table} (like public.{table} including all);");
        let settings: Option<String> =
            sqlx::query_scalar("select array_to_string(reloptions, ', ') from pg_class where oid = $1::text::regclass")
                .bind(table)
                .fetch_one(&mut connection)
                .await
                .map_err(database_error)?;
        if let Some(settings) = settings {
            let _ = write!(statements, "alter table {SCHEMA}.{table} set ({settings});");
        }
    }
    database.execute(&statements).await
}

async fn run(
    database: &RawDatabase,
    kind: Reference,
    connections: usize,
    count: usize,
    progress: &Progress,
) -> Result<Measured, String> {
    let ids: Arc<Vec<Uuid>> = Arc::new((0..count).map(|_| Uuid::now_v7()).collect());
    if matches!(kind, Reference::Update | Reference::Count) {
        let mut connection = database.connect().await?;
        sqlx::query(RUNNING)
            .bind(&ids[..])
            .bind(Uuid::now_v7())
            .execute(&mut connection)
            .await
            .map_err(database_error)?;
    }
    let (next, mut running) = (Arc::new(AtomicUsize::new(0)), JoinSet::new());
    let mut open = Vec::new();
    for _ in 0..connections {
        open.push(database.connect().await?);
    }
    let started = Instant::now();
    for connection in open {
        let client = ReferenceClient {
            connection,
            kind,
            ids: Arc::clone(&ids),
            next: Arc::clone(&next),
            progress: progress.clone(),
        };
        running.spawn(client.run());
    }
    let mut latencies = Latencies::default();
    while let Some(ended) = running.join_next().await {
        latencies.extend(&ended.map_err(|error| error.to_string())?.map_err(database_error)?);
    }
    Ok(Measured { elapsed: started.elapsed(), latencies })
}

/// A connection that does its share of the work.
struct ReferenceClient {
    connection: PgConnection,
    kind: Reference,
    ids: Arc<Vec<Uuid>>,
    next: Arc<AtomicUsize>,
    progress: Progress,
}

impl ReferenceClient {
    async fn run(mut self) -> Result<Latencies, sqlx::Error> {
        let mut latencies = Latencies::default();
        let rows = if let Reference::Copy { rows, .. } = self.kind { rows } else { 1 };
        loop {
            let first = self.next.fetch_add(rows, Ordering::Relaxed);
            if first >= self.ids.len() {
                return Ok(latencies);
            }
            let range = first..(first + rows).min(self.ids.len());
            let started = Instant::now();
            self.transact(&self.ids.clone()[range.clone()]).await?;
            latencies.add(started.elapsed());
            self.progress.add(range.len() as u64);
        }
    }

    async fn transact(&mut self, ids: &[Uuid]) -> Result<(), sqlx::Error> {
        let connection = &mut self.connection;
        let statement = match self.kind {
            Reference::Insert => sqlx::query(INSERT).bind(ids[0]).bind(ids[0]).bind(ACTIONS),
            Reference::Update => sqlx::query(UPDATE).bind(ids[0]).bind("running"),
            Reference::Count => sqlx::query(COUNT).bind(ids[0]).bind("running"),
            Reference::Copy { links, .. } => return copy(connection, ids, links).await,
        };
        let done = statement.execute(connection).await?;
        if done.rows_affected() == 1 { Ok(()) } else { Err(sqlx::Error::RowNotFound) }
    }
}

async fn copy(connection: &mut PgConnection, ids: &[Uuid], links: usize) -> Result<(), sqlx::Error> {
    let (batch, now) = (ids[0], "now");
    let (mut specs, mut tasks, mut edges) = (String::new(), String::new(), String::new());
    for (i, id) in ids.iter().enumerate() {
        let _ = writeln!(specs, "{id}\t{batch}\tbench\tbench\t{ACTIONS}\t{now}");
        let _ = writeln!(tasks, "{id}\t{batch}\tpending\t0\t0\t60\t{now}\t{now}");
        for parent in ids[..i].iter().rev().take(links) {
            let _ = writeln!(edges, "{parent}\t{id}\tt");
        }
    }
    sqlx::raw_sql("begin").execute(&mut *connection).await?;
    let tables = [
        ("task_spec (id, batch_id, name, kind, actions, created_at)", specs),
        ("task (id, batch_id, status, priority, flags, timeout_secs, created_at, last_updated)", tasks),
        ("link (parent_id, child_id, requires_success)", edges),
    ];
    for (columns, rows) in tables {
        if !rows.is_empty() {
            let statement = format!("copy {SCHEMA}.{columns} from stdin");
            let mut copying = connection.copy_in_raw(&statement).await?;
            copying.send(rows.as_bytes()).await?;
            copying.finish().await?;
        }
    }
    sqlx::raw_sql("commit").execute(connection).await?;
    Ok(())
}
