//! Brings the tables up to date. PostgreSQL's advisory lock lets any number of instances start at once.

use std::sync::LazyLock;
use std::time::Duration;

use sqlx::migrate::{MigrateError, Migrator};
use sqlx::{Connection, PgConnection};

use super::{Result, Store};

/// Without the migrator's own lock, which belongs to a session: behind a pooler that would stay with whatever connection
/// it was taken on, and block the next start.
static MIGRATIONS: LazyLock<Migrator> = LazyLock::new(|| {
    let mut migrations = sqlx::migrate!("./migrations");
    migrations.set_locking(false);
    migrations
});
/// Any number, as long as nobody else in the database takes it.
const LOCK: i64 = 0x5245_5052_4953_4531;

/// The oldest server whose SQL this is written for.
const OLDEST_SERVER: i32 = 140_000;
const PATIENCE: Duration = Duration::from_secs(10);
const POOLER: &str = "a pooler mixes up the prepared statements of its clients; \
                      PgBouncer in transaction mode must be 1.21 or newer, with max_prepared_statements above 0";

impl Store {
    /// Can the server be reached, and is it new enough? Asked without the pool, whose patience would hide the cause.
    pub async fn check_server(&self) -> Result<(), String> {
        let asked = tokio::time::timeout(PATIENCE, async {
            let options = self.pool.options();
            let mut first = PgConnection::connect_with(options).await?;
            let version = server_version(&mut first).await?;
            // Twice, because of poolers: where statements of one client get in the way of another's, it is seen here.
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
            Err(_) => return Err(cannot(format!("no answer after {} s", PATIENCE.as_secs()))),
        };
        if version < OLDEST_SERVER {
            return Err(format!("DATABASE_URL: PostgreSQL {} is too old, 14 or newer is needed", version / 10_000));
        }
        Ok(())
    }

    /// All in one transaction, which holds the lock and takes effect as a whole.
    pub async fn migrate(&self) -> Result<(), String> {
        let migrating = async {
            let mut connection = PgConnection::connect_with(self.pool.options()).await?;
            let mut tx = connection.begin().await?;
            sqlx::query("select pg_advisory_xact_lock($1)").bind(LOCK).execute(&mut *tx).await?;
            MIGRATIONS.run(&mut *tx).await?;
            tx.commit().await?;
            Ok::<(), MigrateError>(())
        };
        migrating.await.map_err(|error| format!("migrating the database failed: {error}"))
    }

    /// Whether all migrations have been run, for those who run them apart.
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

/// A prepared statement is there already, or is not there.
fn mixes_statements_up(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(sqlx::error::DatabaseError::code).is_some_and(|c| c == "42P05" || c == "26000")
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
