//! The history of executions: one row each, inserted in the transaction that ends the execution and never changed.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use crate::domain::retry::failure::FailureType;
use crate::domain::task::lifecycle::{Attempt, AttemptOutcome, Cause, RetryType, Transition};
use crate::domain::view::{AttemptView, Timestamp};
use crate::store::page::Page;
use crate::store::{Result, Store, Tx};

/// Inserts the executions that these transitions end.
pub(in crate::store) async fn insert(tx: &mut Tx, transitions: &[Transition]) -> Result<()> {
    let rows: Vec<(Uuid, &Attempt)> =
        transitions.iter().filter_map(|t| t.attempt().map(|a| (t.task().id, a))).collect();
    if rows.is_empty() {
        return Ok(());
    }
    macro_rules! column {
        ($row:ident => $value:expr) => {
            &rows.iter().map(|(_, $row)| $value).collect::<Vec<_>>()[..]
        };
    }
    let signed = |value: Option<u64>| value.map(|v| i64::try_from(v).unwrap_or(i64::MAX));
    sqlx::query!(
        "insert into attempt (task_id, run, attempt, instance, started_at, ended_at, outcome, cause, failure_type,
                              error, http_status, delay_ms, jitter_ms, next_retry_at, reason, retry_type)
         select * from unnest($1::uuid[], $2::int[], $3::smallint[], $4::uuid[], $5::timestamptz[], $6::timestamptz[],
                              $7::text[], $8::text[], $9::text[], $10::text[], $11::smallint[], $12::bigint[],
                              $13::bigint[], $14::timestamptz[], $15::text[], $16::text[])",
        &rows.iter().map(|(id, _)| *id).collect::<Vec<_>>(),
        column!(a => a.run),
        column!(a => a.attempt),
        column!(a => a.instance) as &[Option<Uuid>],
        column!(a => a.started_at) as &[Option<DateTime<Utc>>],
        column!(a => a.ended_at),
        column!(a => a.outcome.as_str()) as &[&str],
        column!(a => a.cause.as_str()) as &[&str],
        column!(a => a.failure.as_ref().map(|f| f.failure_type.as_str())) as &[Option<&str>],
        column!(a => a.failure.as_ref().map(|f| f.reason.as_str())) as &[Option<&str>],
        column!(a => a.failure.as_ref().and_then(|f| f.http_status).map(u16::cast_signed)) as &[Option<i16>],
        column!(a => signed(a.delay_ms)) as &[Option<i64>],
        column!(a => signed(a.jitter_ms)) as &[Option<i64>],
        column!(a => a.next_retry_at) as &[Option<DateTime<Utc>>],
        column!(a => a.reason.as_str()) as &[&str],
        column!(a => a.retry_type.map(RetryType::as_str)) as &[Option<&str>],
    )
    .execute(tx.conn().await?)
    .await?;
    Ok(())
}

/// Returns how a run ended and whether a report ended it; `None` if it has not ended.
pub async fn recorded(tx: &mut Tx, task_id: Uuid, run: i32) -> Result<Option<(i32, AttemptOutcome, bool)>> {
    let row = sqlx::query!("select outcome, cause from attempt where task_id = $1 and run = $2", task_id, run)
        .fetch_optional(tx.conn().await?)
        .await?;
    Ok(row.and_then(|row| {
        let outcome = AttemptOutcome::parse(&row.outcome)?;
        Some((run, outcome, row.cause == Cause::Report.as_str()))
    }))
}

/// Reads the ended executions of a task, oldest first; `None` if there is no such task.
pub async fn of_task(store: &Store, id: Uuid, page: Page<i32>, limit: i64) -> Result<Option<Vec<AttemptView>>> {
    store.listing(async |tx| in_tx(tx, id, page, limit).await).await
}

async fn in_tx(tx: &mut Tx, id: Uuid, page: Page<i32>, limit: i64) -> Result<Option<Vec<AttemptView>>> {
    let (after, offset) = match page {
        Page::After(run) => (run, 0),
        Page::Offset(offset) => (-1, offset),
    };
    let rows = sqlx::query_as!(
        AttemptRow,
        "select run, attempt, retry_type, instance, started_at, ended_at, outcome, failure_type, error, http_status,
                delay_ms, jitter_ms, next_retry_at, reason
         from attempt where task_id = $1 and run > $2 order by run limit $3 offset $4",
        id,
        after,
        limit,
        offset,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    if rows.is_empty() {
        let known =
            sqlx::query_scalar!("select id from task where id = $1", id).fetch_optional(tx.conn().await?).await?;
        return Ok(known.map(|_| Vec::new()));
    }
    let view = |row: AttemptRow| AttemptView {
        run: row.run,
        attempt: row.attempt,
        retry_type: row.retry_type,
        instance: row.instance,
        started_at: row.started_at.map(Timestamp),
        ended_at: Timestamp(row.ended_at),
        outcome: row.outcome,
        failure_type: row.failure_type.as_deref().and_then(FailureType::parse),
        error: row.error,
        http_status: row.http_status,
        delay_ms: row.delay_ms,
        jitter_ms: row.jitter_ms,
        next_retry_at: row.next_retry_at.map(Timestamp),
        reason: row.reason,
    };
    Ok(Some(rows.into_iter().map(view).collect()))
}

struct AttemptRow {
    run: i32,
    attempt: i16,
    retry_type: Option<String>,
    instance: Option<Uuid>,
    started_at: Option<DateTime<Utc>>,
    ended_at: DateTime<Utc>,
    outcome: String,
    failure_type: Option<String>,
    error: Option<String>,
    http_status: Option<i16>,
    delay_ms: Option<i64>,
    jitter_ms: Option<i64>,
    next_retry_at: Option<DateTime<Utc>>,
    reason: String,
}
