//! Batches: reading them one by one and in lists, their completion, and idempotency keys. Their tasks are in `tasks`.

pub mod completion;
pub mod idempotency;
pub mod list;

use serde_json::json;
use uuid::Uuid;

use crate::domain::view::{Batch, Timestamp};
use crate::store::{Result, Store};

/// Builds the counts by status from a row that has a column for each status.
macro_rules! status_counts {
    ($row:ident) => {
        crate::domain::view::StatusCounts {
            waiting: $row.waiting,
            pending: $row.pending,
            claimed: $row.claimed,
            running: $row.running,
            retry_pending: $row.retry_pending,
            paused: $row.paused,
            success: $row.success,
            failure: $row.failure,
            canceled: $row.canceled,
        }
    };
}
pub(in crate::store) use status_counts;

/// Whether there is a batch with this id.
pub async fn batch_exists(store: &Store, id: Uuid) -> Result<bool> {
    let looking = sqlx::query_scalar!("select id from batch where id = $1", id);
    let found = store.reading(async |tx| Ok(looking.fetch_optional(tx.conn().await?).await?)).await?;
    Ok(found.is_some())
}

/// Reads a batch with its counters.
pub async fn batch(store: &Store, id: Uuid) -> Result<Option<Batch>> {
    let looking = sqlx::query!(
        r#"select b.id, b.total, b.created_at, b.completed_at, b.scope, b.metadata, c.waiting as "waiting!",
                  c.pending as "pending!", c.claimed as "claimed!", c.running as "running!",
                  c.retry_pending as "retry_pending!", c.paused as "paused!", c.success as "success!",
                  c.failure as "failure!", c.canceled as "canceled!", c.total_success as "total_success!",
                  c.total_failures as "total_failures!", c.total_expected as "total_expected!"
           from batch b join batch_counts c on c.batch_id = b.id
           where b.id = $1"#,
        id
    );
    let row = store.reading(async |tx| Ok(looking.fetch_optional(tx.conn().await?).await?)).await?;
    Ok(row.map(|row| Batch {
        batch_id: row.id,
        total_tasks: row.total,
        total_success: row.total_success,
        total_failures: row.total_failures,
        total_expected: row.total_expected,
        status_counts: status_counts!(row),
        scope: row.scope,
        metadata: row.metadata.unwrap_or_else(|| json!({})),
        created_at: Timestamp(row.created_at),
        completed_at: row.completed_at.map(Timestamp),
    }))
}
