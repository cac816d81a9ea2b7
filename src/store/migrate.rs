//! Brings the tables up to date. PostgreSQL's advisory lock lets any number of instances start at once.

use std::time::Duration;

use sqlx::migrate::Migrator;
use sqlx::{Connection, PgConnection};

use super::{Result, Store};

static MIGRATIONS: Migrator = sqlx::migrate!("./migrations");

/// The oldest server whose SQL this is written for.
const OLDEST_SERVER: i32 = 140_000;
const PATIENCE: Duration = Duration::from_secs(10);

impl Store {
    /// Can the server be reached, and is it new enough? Asked without the pool, whose patience would hide the cause.
    pub async fn check_server(&self) -> Result<(), String> {
        let options = self.pool.connect_options();
        let connect = tokio::time::timeout(PATIENCE, PgConnection::connect_with(&options));
        let cannot = |why: String| format!("DATABASE_URL: cannot connect to PostgreSQL: {why}");
        let mut connection = match connect.await {
            Ok(connected) => connected.map_err(|error| cannot(error.to_string()))?,
            Err(_) => return Err(cannot(format!("no answer after {} s", PATIENCE.as_secs()))),
        };
        let version: i32 = sqlx::query_scalar("select current_setting('server_version_num')::int")
            .fetch_one(&mut connection)
            .await
            .map_err(|error| cannot(error.to_string()))?;
        let _ = connection.close().await;
        if version < OLDEST_SERVER {
            return Err(format!("DATABASE_URL: PostgreSQL {} is too old, 14 or newer is needed", version / 10_000));
        }
        Ok(())
    }

    pub async fn migrate(&self) -> Result<(), String> {
        MIGRATIONS.run(&self.pool).await.map_err(|error| format!("migrating the database failed: {error}"))
    }

    /// Whether all migrations have been run, for those who run them apart.
    pub async fn is_migrated(&self) -> Result<bool> {
        let latest = MIGRATIONS.iter().map(|m| m.version).max().unwrap_or(0);
        let known: Option<bool> =
            sqlx::query_scalar("select to_regclass('_sqlx_migrations') is not null").fetch_one(&self.pool).await?;
        if known != Some(true) {
            return Ok(false);
        }
        let applied: Option<i64> =
            sqlx::query_scalar("select max(version) from _sqlx_migrations where success").fetch_one(&self.pool).await?;
        Ok(applied.is_some_and(|applied| applied >= latest))
    }
}

/// A name for the state of the migrations, for test databases made from a template.
pub fn fingerprint() -> String {
    use std::fmt::Write;
    let sum = MIGRATIONS
        .iter()
        .flat_map(|m| m.checksum.iter())
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    let mut name = String::new();
    let _ = write!(name, "{sum:016x}");
    name
}
