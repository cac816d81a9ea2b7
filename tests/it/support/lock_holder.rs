//! Another transaction at the database that locks rows, like a session that an operator forgot to end.

use sqlx::{AssertSqlSafe, Postgres, Transaction};

use super::Database;

pub struct LockHolder(Transaction<'static, Postgres>);

impl LockHolder {
    /// Holds the locks of the statement, which must lock something.
    pub async fn holding(db: &Database, statement: &str) -> LockHolder {
        LockHolder::holding_any(db, statement).await.unwrap_or_else(|| panic!("nothing to hold: {statement}"))
    }

    /// Holds the locks of the statement; `None` if it locks nothing.
    pub async fn holding_any(db: &Database, statement: &str) -> Option<LockHolder> {
        let mut transaction = db.pool.begin().await.unwrap();
        let done = sqlx::query(AssertSqlSafe(statement.to_owned())).execute(&mut *transaction).await.unwrap();
        (done.rows_affected() > 0).then(|| LockHolder(transaction))
    }

    pub async fn release(self) {
        self.0.rollback().await.unwrap();
    }
}
