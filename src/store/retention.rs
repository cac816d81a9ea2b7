//! Deletes what is old: whole finished batches, a bounded number of rows per transaction.

use uuid::Uuid;

use super::{Actor, Result, Session};
use crate::domain::status::Status;

/// Deletes the oldest finished batches of more than `days` days, of together about `limit` tasks (one batch at
/// least), except those with notifications still to be delivered. Answers how many tasks went.
pub async fn delete_finished(session: &Session, days: u32, limit: i64) -> Result<u64> {
    let mut tx = session.begin(Actor::Loop("retention")).await?;
    let now = tx.store.clock().param();
    let batches: Vec<Uuid> = sqlx::query_scalar!(
        r#"select id from (
               select b.id, sum(b.total) over (order by b.completed_at, b.id) - b.total as before
               from (
                   select b.id, b.total, b.completed_at from batch b
                   where b.completed_at < coalesce($1, statement_timestamp()) - make_interval(days => $2)
                     and not exists (select from outbox o where o.batch_id = b.id and o.status = 'pending')
                   order by b.completed_at limit 1000 for update skip locked
               ) b
           ) b where b.before < $3"#,
        now,
        i32::try_from(days).unwrap_or(i32::MAX),
        limit,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    sqlx::query!(
        "delete from retry_stat where bucket < coalesce($1, statement_timestamp()) - make_interval(days => $2)",
        now,
        i32::try_from(days).unwrap_or(i32::MAX),
    )
    .execute(tx.conn().await?)
    .await?;
    if batches.is_empty() {
        tx.commit().await?;
        return Ok(0);
    }
    let tasks = sqlx::query!(
        r#"with spec as (delete from task_spec where batch_id = any($1) returning id),
           task as (delete from task t using spec s where t.id = s.id returning t.status),
           below as (delete from link l using spec s where l.parent_id = s.id),
           above as (
               delete from link l using spec s
               where l.child_id = s.id and not exists (select from spec p where p.id = l.parent_id)
           ),
           attempt as (delete from attempt a using spec s where a.task_id = s.id),
           cancel as (delete from cancel_action c using spec s where c.task_id = s.id),
           event as (delete from event where batch_id = any($1)),
           sent as (delete from outbox where batch_id = any($1)),
           counts as (delete from batch_count where batch_id = any($1)),
           batch as (delete from batch where id = any($1))
           select count(*) filter (where status = 'success') as "success!",
                  count(*) filter (where status = 'failure') as "failure!",
                  count(*) filter (where status = 'canceled') as "canceled!" from task"#,
        &batches,
    )
    .fetch_one(tx.conn().await?)
    .await?;
    tx.deleted(Status::Success, tasks.success);
    tx.deleted(Status::Failure, tasks.failure);
    tx.deleted(Status::Canceled, tasks.canceled);
    tx.commit().await?;
    Ok(u64::try_from(tasks.success + tasks.failure + tasks.canceled).unwrap_or(0))
}
