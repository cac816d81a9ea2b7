//! All SQL of the benchmark: the reference measurements, filling tables without the service, and facts about the
//! server. The compiler does not check these statements, because some of their tables exist only during the benchmark.

pub mod fill;
pub mod reference;

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection};

use super::process;

/// The size of the table `task`: rows as the server counts them, the rest in bytes.
#[derive(Clone, Copy, Debug)]
pub struct TaskTable {
    pub live: f64,
    pub dead: f64,
    pub heap: u64,
    /// The indexes that the loops read.
    pub loops: u64,
    /// The primary key.
    pub key: u64,
}

/// A database that the benchmark can connect to.
#[derive(Clone, Debug)]
pub struct RawDatabase {
    pub url: String,
}

impl RawDatabase {
    pub fn new(url: &str) -> RawDatabase {
        RawDatabase { url: url.to_owned() }
    }

    /// Returns another database on the same server.
    pub fn named(&self, name: &str) -> Result<RawDatabase, String> {
        let mut url = url::Url::parse(&self.url).map_err(|error| format!("DATABASE_URL: {error}"))?;
        url.set_path(&format!("/{name}"));
        Ok(RawDatabase { url: url.into() })
    }

    pub async fn connect(&self) -> Result<PgConnection, String> {
        let options: PgConnectOptions = self.url.parse().map_err(|error| format!("DATABASE_URL: {error}"))?;
        // Filling tables takes long: a warning about slow statements would not help.
        let options = options.disable_statement_logging();
        PgConnection::connect_with(&options).await.map_err(|error| format!("DATABASE_URL: cannot connect: {error}"))
    }

    pub async fn execute(&self, statement: &str) -> Result<(), String> {
        let mut connection = self.connect().await?;
        sqlx::raw_sql(AssertSqlSafe(statement.to_owned())).execute(&mut connection).await.map_err(database_error)?;
        connection.close().await.map_err(database_error)
    }

    /// Returns the version of the server and the settings that affect speed.
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
            .map_err(database_error)
    }

    /// Returns the size of the table `task`.
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
        .map_err(database_error)?;
        let [heap, loops, key] = [heap, loops, key].map(i64::unsigned_abs);
        Ok(TaskTable { live, dead, heap, loops, key })
    }

    /// Returns the process id of the server, if it runs on this machine.
    pub async fn process(&self) -> Result<Option<i32>, String> {
        let mut connection = self.connect().await?;
        let backend: i32 =
            sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut connection).await.map_err(database_error)?;
        Ok(process::server_of(backend))
    }
}

fn database_error(error: sqlx::Error) -> String {
    match error {
        sqlx::Error::Database(error) => format!("PostgreSQL: {}", error.message()),
        error => format!("PostgreSQL: {error}"),
    }
}
