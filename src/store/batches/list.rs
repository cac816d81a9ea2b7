//! The list of batches, newest first, with counts from counters. Nothing here may read tasks.

use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use sqlx::{FromRow, Postgres, QueryBuilder};
use uuid::Uuid;

use super::status_counts;
use crate::domain::view::{BatchSummary, Timestamp};
use crate::store::page::Page;
use crate::store::tasks::list::contains;
use crate::store::{Result, Store};

/// The most bytes of metadata and kinds on a page. The first batch is shown however large it is.
const PAGE_BYTES: i64 = 8 * 1024 * 1024;

/// The conditions of a list. `None` means no condition.
#[derive(Debug, Default)]
pub struct BatchFilter {
    pub scope: Option<String>,
    pub metadata: Option<Value>,
}

#[derive(FromRow)]
struct BatchRow {
    id: Uuid,
    total: i32,
    created_at: DateTime<Utc>,
    kinds: Vec<String>,
    scope: Option<String>,
    metadata: Option<Value>,
    updated_at: DateTime<Utc>,
    waiting: i32,
    pending: i32,
    claimed: i32,
    running: i32,
    retry_pending: i32,
    paused: i32,
    success: i32,
    failure: i32,
    canceled: i32,
    picked: i64,
}

/// Reads a page of the list, newest first, and no more batches once they have [`PAGE_BYTES`]: metadata and many kinds
/// can make a batch large. Also returns whether the page was cut short for that.
pub async fn batches(
    store: &Store,
    filter: &BatchFilter,
    page: Page<Uuid>,
    limit: i64,
) -> Result<(Vec<BatchSummary>, bool)> {
    // Counters are looked up for the page alone. Joined before the limit, the tables were merged from the newest batch
    // down to the page.
    let mut query = QueryBuilder::<Postgres>::new(
        "select b.id, b.total, b.created_at, b.kinds, b.scope, b.metadata, c.updated_at, c.waiting, c.pending, c.claimed,
                c.running, c.retry_pending, c.paused, c.success, c.failure, c.canceled, b.picked
         from (
             select *, coalesce(sum(coalesce(octet_length(b.metadata::text), 0) + octet_length(array_to_string(b.kinds, ','))) over (
                 order by b.id desc rows between unbounded preceding and 1 preceding
             ), 0) as before, count(*) over () as picked
             from (select * from batch b where true",
    );
    if let Some(scope) = &filter.scope {
        query.push(" and b.scope = ").push_bind(scope);
    }
    contains(&mut query, "b.metadata", filter.metadata.as_ref());
    if let Page::After(id) = page {
        query.push(" and b.id < ").push_bind(id);
    }
    query.push(" order by b.id desc limit ").push_bind(limit);
    if let Page::Offset(offset) = page {
        query.push(" offset ").push_bind(offset);
    }
    query.push(
        ") b) b cross join lateral (select * from batch_counts where batch_id = b.id offset 0) c where b.before < ",
    );
    query.push_bind(PAGE_BYTES).push(" order by b.id desc");
    let planned = query.build_query_as().persistent(filter.metadata.is_none());
    let rows: Vec<BatchRow> = store.listing(async |tx| Ok(planned.fetch_all(tx.conn().await?).await?)).await?;
    let cut = rows.first().is_some_and(|row| i64::try_from(rows.len()).is_ok_and(|shown| shown < row.picked));
    let batches = rows
        .into_iter()
        .map(|row| BatchSummary {
            batch_id: row.id,
            total_tasks: row.total,
            first_created_at: Timestamp(row.created_at),
            latest_updated_at: Timestamp(row.updated_at),
            status_counts: status_counts!(row),
            kinds: row.kinds,
            scope: row.scope,
            metadata: row.metadata.unwrap_or_else(|| json!({})),
        })
        .collect();
    Ok((batches, cut))
}
