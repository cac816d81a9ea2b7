//! The default retry policies per kind. Creating tasks looks at a copy that is never older than half a second, so a
//! change is in effect on every instance within a second, and on the one that made it at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use super::admission::fairness;
use super::{Actor, Error, Result, Session, Store, Tx, unconditionally};
use crate::domain::retry::policy::Policy;
use crate::domain::view::{KindPolicy, Timestamp};

const FRESH: Duration = Duration::from_millis(500);

pub type ByKind = Arc<HashMap<String, Policy>>;

/// The copy.
#[derive(Clone, Debug, Default)]
pub(super) struct PolicyCache(Arc<Mutex<Option<LastRead>>>);

/// When it was made or could not be, and why.
type LastRead = (Instant, Result<ByKind>);

/// All defaults, for creating tasks.
pub async fn by_kind(store: &Store) -> Result<ByKind> {
    // Whoever comes while they are being read waits for that instead of reading them too, and gets what comes of it.
    let asked_at = Instant::now();
    let mut cache = store.policies.0.lock().await;
    match &*cache {
        Some((read_at, Ok(policies))) if read_at.elapsed() < FRESH => return Ok(Arc::clone(policies)),
        Some((failed_at, Err(error))) if *failed_at > asked_at => return Err(error.clone()),
        _ => {}
    }
    let reading = store.reading(async |tx| {
        fairness::look(tx).await?;
        Ok(Arc::new(read(tx).await?.into_iter().map(|one| (one.kind, one.retry)).collect()))
    });
    let read = unconditionally(reading).await;
    *cache = Some((Instant::now(), read.clone()));
    read
}

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

/// Whether there was one.
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
