//! Checks the server and migrates the schema. An advisory lock lets any number of instances start at once. Nothing here
//! uses the pool, except to ask whether the schema is up to date.

use std::sync::LazyLock;
use std::time::Duration;

use sqlx::migrate::{MigrateError, Migrator};
use sqlx::{Connection, PgConnection};

use super::{Result, Store};

/// The migrations, without the migrator's own lock. That lock belongs to a session: behind a pooler it would stay with
/// the server connection that took it, and block the next start.
static MIGRATIONS: LazyLock<Migrator> = LazyLock::new(|| {
    let mut migrations = sqlx::migrate!("./migrations");
    migrations.set_locking(false);
    migrations
});
/// The key of the advisory lock: any number that no other application in the database uses.
const LOCK: i64 = 0x5245_5052_4953_4531;

/// The oldest supported server version, as `server_version_num`.
const OLDEST_SERVER: i32 = 140_000;
/// How long the check of the server may take.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);
const POOLER: &str = "a pooler mixes up the prepared statements of its clients; \
                      PgBouncer in transaction mode must be 1.21 or newer, with max_prepared_statements above 0";

impl Store {
    /// Checks that the server can be reached and is new enough. It bypasses the pool, whose timeouts would hide the
    /// cause.
    pub async fn check_server(&self) -> Result<(), String> {
        let asked = tokio::time::timeout(CHECK_TIMEOUT, async {
            let options = self.pool.options();
            let mut first = PgConnection::connect_with(options).await?;
            let version = server_version(&mut first).await?;
            // A second connection shows whether a pooler mixes up the prepared statements of its clients.
            let mut second = PgConnection::connect_with(options).await?;
            server_version(&mut second).await?;
            let _ = tokio::join!(first.close(), second.close());
            Ok(version)
        });
        let cannot = |why: String| format!("DATABASE_URL: cannot connect to PostgreSQL: {why}");
        let version = match asked.await {
            Ok(Ok(version)) => version,
            Ok(Err(error)) if mixes_statements_up(&error) => return Err(format!("DATABASE_URL: {POOLER}")),
            Ok(Err(error)) => return Err(cannot(error.to_string())),
            Err(_) => return Err(cannot(format!("no answer after {} s", CHECK_TIMEOUT.as_secs()))),
        };
        if version < OLDEST_SERVER {
            return Err(format!("DATABASE_URL: PostgreSQL {} is too old; 14 or newer is required", version / 10_000));
        }
        Ok(())
    }

    /// Runs all missing migrations in one transaction, under an advisory lock.
    pub async fn migrate(&self) -> Result<(), String> {
        let migrating = async {
            let mut connection = PgConnection::connect_with(self.pool.options()).await?;
            let mut tx = connection.begin().await?;
            sqlx::query("select pg_advisory_xact_lock($1)").bind(LOCK).execute(&mut *tx).await?;
            MIGRATIONS.run(&mut *tx).await?;
            tx.commit().await?;
            Ok::<(), MigrateError>(())
        };
        migrating.await.map_err(|error| format!("cannot migrate the database: {error}"))
    }

    /// Whether all migrations have run, for deployments that run them separately.
    pub async fn is_migrated(&self) -> Result<bool> {
        let latest = MIGRATIONS.iter().map(|m| m.version).max().unwrap_or(0);
        self.reading(async |tx| {
            let known = sqlx::query_scalar("select to_regclass('_sqlx_migrations') is not null");
            let known: Option<bool> = known.fetch_one(tx.conn().await?).await?;
            if known != Some(true) {
                return Ok(false);
            }
            let applied = sqlx::query_scalar("select max(version) from _sqlx_migrations where success");
            let applied: Option<i64> = applied.fetch_one(tx.conn().await?).await?;
            Ok(applied.is_some_and(|applied| applied >= latest))
        })
        .await
    }
}

async fn server_version(connection: &mut PgConnection) -> Result<i32, sqlx::Error> {
    sqlx::query_scalar("select current_setting('server_version_num')::int").fetch_one(connection).await
}

/// Whether a prepared statement exists although it should not, or the reverse.
fn mixes_statements_up(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(sqlx::error::DatabaseError::code).is_some_and(|c| c == "42P05" || c == "26000")
}

/// Returns a name for the state of the migrations, for test databases cloned from a template.
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
