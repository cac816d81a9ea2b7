//! The only place of the benchmark with SQL: what PostgreSQL can do by itself, tables filled without the service, and facts
//! about the server. Not checked by the compiler, because the tables it writes to are made here.

pub mod fill;
pub mod limits;

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection};

use super::process;

/// Rows as the server counts them, and bytes: of the table, of the indexes that its loops walk, and of its key.
#[derive(Clone, Copy, Debug)]
pub struct TaskTable {
    pub live: f64,
    pub dead: f64,
    pub heap: u64,
    pub loops: u64,
    pub key: u64,
}

/// A server, and a database on it that the benchmark may connect to.
#[derive(Clone, Debug)]
pub struct Database {
    pub url: String,
}

impl Database {
    pub fn new(url: &str) -> Database {
        Database { url: url.to_owned() }
    }

    /// Another database on the same server.
    pub fn named(&self, name: &str) -> Result<Database, String> {
        let mut url = url::Url::parse(&self.url).map_err(|error| format!("DATABASE_URL: {error}"))?;
        url.set_path(&format!("/{name}"));
        Ok(Database { url: url.into() })
    }

    pub async fn connect(&self) -> Result<PgConnection, String> {
        let options: PgConnectOptions = self.url.parse().map_err(|error| format!("DATABASE_URL: {error}"))?;
        // Filling tables takes long, and that is no news.
        let options = options.disable_statement_logging();
        PgConnection::connect_with(&options).await.map_err(|error| format!("DATABASE_URL: cannot connect: {error}"))
    }

    pub async fn execute(&self, statement: &str) -> Result<(), String> {
        let mut connection = self.connect().await?;
        sqlx::raw_sql(AssertSqlSafe(statement.to_owned())).execute(&mut connection).await.map_err(said)?;
        connection.close().await.map_err(said)
    }

    /// Settings that decide about speed, and the version.
    pub async fn facts(&self) -> Result<Vec<(String, String)>, String> {
        let mut connection = self.connect().await?;
        let names = [
            "server_version",
            "fsync",
            "synchronous_commit",
            "full_page_writes",
            "shared_buffers",
            "max_wal_size",
            "checkpoint_timeout",
            "wal_compression",
            "max_connections",
        ];
        sqlx::query_as("select name, current_setting(name) from unnest($1::text[]) name")
            .bind(&names[..])
            .fetch_all(&mut connection)
            .await
            .map_err(said)
    }

    /// How the table of tasks is doing.
    pub async fn task_table(&self) -> Result<TaskTable, String> {
        let mut connection = self.connect().await?;
        let (live, dead, heap, loops, key): (f64, f64, i64, i64, i64) = sqlx::query_as(
            "select n_live_tup::float8, n_dead_tup::float8, pg_relation_size('task'),
                    pg_relation_size('task_start_idx') + pg_relation_size('task_timeout_idx')
                    + pg_relation_size('task_retry_idx') + pg_relation_size('task_due_idx'),
                    pg_relation_size('task_pkey')
             from pg_stat_user_tables where relid = 'task'::regclass",
        )
        .fetch_one(&mut connection)
        .await
        .map_err(said)?;
        let [heap, loops, key] = [heap, loops, key].map(i64::unsigned_abs);
        Ok(TaskTable { live, dead, heap, loops, key })
    }

    /// The process of the server, if it is on this machine.
    pub async fn process(&self) -> Result<Option<i32>, String> {
        let mut connection = self.connect().await?;
        let backend: i32 =
            sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut connection).await.map_err(said)?;
        Ok(process::server_of(backend))
    }
}

fn said(error: sqlx::Error) -> String {
    match error {
        sqlx::Error::Database(error) => format!("PostgreSQL: {}", error.message()),
        error => format!("PostgreSQL: {error}"),
    }
}
