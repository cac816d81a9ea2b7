//! Repeated requests to create: the first one with a key does it, the others get the same answer.

use std::time::Duration;

use uuid::Uuid;

use crate::domain::request::new_task::NewTask;
use crate::domain::task::status::Status;
use crate::store::tasks::create::{StoredBatch, StoredTask};
use crate::store::tasks::row::read_status;
use crate::store::{Actor, Result, Session, Tx};

/// What a request that may be repeated brings along.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdempotencyKey {
    pub key: String,
    /// Of the body, whatever the order of its fields.
    pub body_hash: Vec<u8>,
    /// For how long repetitions are recognized.
    pub ttl: Duration,
}

/// What is known of a key.
pub enum Seen {
    /// Nothing: the request is the first, and its batch is to be recorded.
    Never,
    /// It was answered with this.
    Before(StoredBatch),
    /// It came with another body.
    Otherwise,
}

/// Looks the key up and takes it. While another request with the same key is under way this waits for its end.
/// `tasks` are those that the request asks for.
pub async fn take(tx: &mut Tx, key: &IdempotencyKey, batch_id: Uuid, tasks: &[NewTask]) -> Result<Seen> {
    let now = tx.store.clock().param();
    let taken = sqlx::query_scalar!(
        "insert into idempotency as i (key, body_hash, batch_id, task_ids, created_at)
         values ($1, $2, $3, '{}', coalesce($4, statement_timestamp()))
         on conflict (key) do update set body_hash = excluded.body_hash, batch_id = excluded.batch_id, task_ids = '{}',
             statuses = null, created_at = excluded.created_at
         where i.created_at < coalesce($4, statement_timestamp()) - make_interval(secs => $5)
         returning key",
        key.key,
        key.body_hash,
        batch_id,
        now,
        key.ttl.as_secs_f64(),
    )
    .fetch_optional(tx.conn().await?)
    .await?;
    if taken.is_some() {
        return Ok(Seen::Never);
    }
    let row = sqlx::query!(
        r#"select body_hash, batch_id, task_ids, statuses as "statuses?: Vec<Option<String>>", created_at
           from idempotency where key = $1"#,
        key.key
    )
    .fetch_one(tx.conn().await?)
    .await?;
    if row.body_hash != key.body_hash {
        return Ok(Seen::Otherwise);
    }
    let statuses: Vec<Option<Status>> = match row.statuses {
        None => tasks.iter().map(|task| Some(task.status())).collect(),
        Some(names) => names.iter().map(|name| name.as_deref().map(read_status).transpose()).collect::<Result<_>>()?,
    };
    let created = statuses.into_iter().enumerate().filter_map(|(position, status)| Some((position, status?)));
    let tasks = created.zip(row.task_ids).map(|((position, status), id)| StoredTask { position, id, status }).collect();
    Ok(Seen::Before(StoredBatch { batch_id: row.batch_id, tasks, created_at: row.created_at }))
}

/// What came of the request, in its own transaction.
pub async fn record(tx: &mut Tx, key: &IdempotencyKey, tasks: &[NewTask], created: &StoredBatch) -> Result<()> {
    let mut statuses: Vec<Option<&str>> = vec![None; tasks.len()];
    for task in &created.tasks {
        statuses[task.position] = Some(task.status.as_str());
    }
    let as_asked = statuses.iter().zip(tasks).all(|(status, task)| *status == Some(task.status().as_str()));
    sqlx::query!(
        "update idempotency set task_ids = $2, statuses = $3, created_at = $4 where key = $1",
        key.key,
        &created.tasks.iter().map(|task| task.id).collect::<Vec<_>>(),
        (!as_asked).then_some(statuses) as Option<Vec<Option<&str>>>,
        created.created_at,
    )
    .execute(tx.conn().await?)
    .await?;
    Ok(())
}

/// Forgets up to `limit` keys that are older than `ttl`; answers how many.
pub async fn forget(session: &Session, ttl: Duration, limit: i64) -> Result<u64> {
    let mut tx = session.begin(Actor::Loop("retention")).await?;
    let now = tx.store.clock().param();
    let forgotten = sqlx::query!(
        "delete from idempotency where key in (
             select key from idempotency where created_at < coalesce($1, statement_timestamp()) - make_interval(secs => $2)
             order by created_at limit $3 for update skip locked
         )",
        now,
        ttl.as_secs_f64(),
        limit,
    )
    .execute(tx.conn().await?)
    .await?;
    tx.commit().await?;
    Ok(forgotten.rows_affected())
}
