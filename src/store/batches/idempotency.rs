//! Idempotency keys of requests that create batches: the first request with a key creates the batch, its repetitions
//! get the same answer. A key is taken and its answer recorded in the transaction that creates the batch, never apart
//! from it.

use std::time::Duration;

use uuid::Uuid;

use crate::domain::request::new_task::NewTask;
use crate::domain::task::status::Status;
use crate::store::tasks::create::{StoredBatch, StoredTask};
use crate::store::tasks::row::read_status;
use crate::store::{Actor, Result, Session, Tx};

/// The key of a request that may be repeated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdempotencyKey {
    pub key: String,
    /// The hash of the body, independent of the order of its fields.
    pub body_hash: Vec<u8>,
    /// How long Reprise recognizes repetitions.
    pub ttl: Duration,
}

/// The result of taking a key.
pub enum Seen {
    /// No request has used the key: the caller creates the batch and records it.
    New,
    /// An earlier request with the same key and body got this answer.
    Repeated(StoredBatch),
    /// An earlier request used the key with another body.
    KeyReused,
}

/// Looks the key up and takes it if it is new. Waits until another request with the same key has ended. `tasks` are the
/// tasks of the request.
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
        return Ok(Seen::New);
    }
    let row = sqlx::query!(
        r#"select body_hash, batch_id, task_ids, statuses as "statuses?: Vec<Option<String>>", created_at
           from idempotency where key = $1"#,
        key.key
    )
    .fetch_one(tx.conn().await?)
    .await?;
    if row.body_hash != key.body_hash {
        return Ok(Seen::KeyReused);
    }
    let statuses: Vec<Option<Status>> = match row.statuses {
        None => tasks.iter().map(|task| Some(task.status())).collect(),
        Some(names) => names.iter().map(|name| name.as_deref().map(read_status).transpose()).collect::<Result<_>>()?,
    };
    let created = statuses.into_iter().enumerate().filter_map(|(position, status)| Some((position, status?)));
    let tasks = created.zip(row.task_ids).map(|((position, status), id)| StoredTask { position, id, status }).collect();
    Ok(Seen::Repeated(StoredBatch { batch_id: row.batch_id, tasks, created_at: row.created_at }))
}

/// Records the answer to a request, in the transaction that creates its batch.
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

/// Deletes up to `limit` keys that are older than `ttl` and returns how many.
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
