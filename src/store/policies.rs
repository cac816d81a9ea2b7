//! The default retry policies per kind. Task creation reads a cached copy that is never older than half a second. So a
//! change takes effect within a second on every instance, and at once on the instance that made it. Policies of
//! existing tasks never change here.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use super::rules::fairness;
use super::{Actor, Error, Result, Session, Store, Tx, without_cancellation};
use crate::domain::retry::policy::Policy;
use crate::domain::view::{KindPolicy, Timestamp};

/// The maximum age of the cached copy.
const MAX_AGE: Duration = Duration::from_millis(500);

/// Default policies by kind.
pub type ByKind = Arc<HashMap<String, Policy>>;

/// The cached copy.
#[derive(Clone, Debug, Default)]
pub(super) struct PolicyCache(Arc<Mutex<Option<LastRead>>>);

/// The time and the result of the last read.
type LastRead = (Instant, Result<ByKind>);

/// Returns the default policies, for creating tasks.
pub async fn by_kind(store: &Store) -> Result<ByKind> {
    // Callers that arrive during a read wait for its result, good or bad, instead of reading again.
    let asked_at = Instant::now();
    let mut cache = store.policies.0.lock().await;
    match &*cache {
        Some((read_at, Ok(policies))) if read_at.elapsed() < MAX_AGE => return Ok(Arc::clone(policies)),
        Some((failed_at, Err(error))) if *failed_at > asked_at => return Err(error.clone()),
        _ => {}
    }
    let reading = store.reading(async |tx| {
        fairness::refresh_keys_in_use(tx).await?;
        Ok(Arc::new(read(tx).await?.into_iter().map(|one| (one.kind, one.retry)).collect()))
    });
    let read = without_cancellation(reading).await;
    *cache = Some((Instant::now(), read.clone()));
    read
}

/// Reads all default policies, by kind.
pub async fn list(store: &Store) -> Result<Vec<KindPolicy>> {
    store.reading(async |tx| read(tx).await).await
}

async fn read(tx: &mut Tx) -> Result<Vec<KindPolicy>> {
    let rows = sqlx::query!("/* read policies */ select kind, policy, updated_at from retry_policy order by kind")
        .fetch_all(tx.conn().await?)
        .await?;
    rows.into_iter()
        .map(|row| {
            let retry = serde_json::from_str(&row.policy)
                .map_err(|error| Error::corrupt(format!("retry policy of kind {}: {error}", row.kind)))?;
            Ok(KindPolicy { kind: row.kind, retry, updated_at: Timestamp(row.updated_at) })
        })
        .collect()
}

/// Creates or replaces the default policy of a kind.
pub async fn put(store: &Store, kind: &str, policy: &Policy) -> Result<KindPolicy> {
    let text = serde_json::to_string(policy).map_err(Error::corrupt)?;
    let (text, now) = (text.as_str(), store.clock().param());
    let put = |session: Session| async move {
        let mut tx = session.begin(Actor::Api).await?;
        let updated_at = sqlx::query_scalar!(
            "insert into retry_policy (kind, policy, updated_at) values ($1, $2, coalesce($3, statement_timestamp()))
         on conflict (kind) do update set policy = excluded.policy, updated_at = excluded.updated_at
         returning updated_at",
            kind,
            text,
            now,
        )
        .fetch_one(tx.conn().await?)
        .await?;
        tx.commit().await?;
        Ok(updated_at)
    };
    let updated_at = store.alone(put).await?;
    *store.policies.0.lock().await = None;
    Ok(KindPolicy { kind: kind.to_owned(), retry: policy.clone(), updated_at: Timestamp(updated_at) })
}

/// Deletes the default policy of a kind and returns whether there was one.
pub async fn delete(store: &Store, kind: &str) -> Result<bool> {
    let delete = |session: Session| async move {
        let mut tx = session.begin(Actor::Api).await?;
        let deleted = sqlx::query!("delete from retry_policy where kind = $1", kind).execute(tx.conn().await?).await?;
        tx.commit().await?;
        Ok(deleted.rows_affected() > 0)
    };
    let deleted = store.alone(delete).await?;
    *store.policies.0.lock().await = None;
    Ok(deleted)
}
