//! Somebody else at the database: a session that holds rows, as one that a person forgot to end.

use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, Postgres, Transaction};

use super::Database;

pub struct Stranger {
    transaction: Transaction<'static, Postgres>,
    since: Instant,
}

impl Stranger {
    /// Holds what the statement locks, which must be something.
    pub async fn holding(db: &Database, statement: &str) -> Stranger {
        Stranger::holding_any(db, statement).await.unwrap_or_else(|| panic!("nothing to hold: {statement}"))
    }

    /// None if there is nothing.
    pub async fn holding_any(db: &Database, statement: &str) -> Option<Stranger> {
        let mut transaction = db.pool.begin().await.unwrap();
        let done = sqlx::query(AssertSqlSafe(statement.to_owned())).execute(&mut *transaction).await.unwrap();
        (done.rows_affected() > 0).then(|| Stranger { transaction, since: Instant::now() })
    }

    pub fn held_for(&self) -> Duration {
        self.since.elapsed()
    }

    /// Goes on holding until it has done so for that long in all, and lets go.
    pub async fn let_go_after(self, time: Duration) {
        tokio::time::sleep(time.saturating_sub(self.since.elapsed())).await;
        self.transaction.rollback().await.unwrap();
    }
}
