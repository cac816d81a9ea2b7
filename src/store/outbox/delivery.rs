//! The delivery of notifications: leases them for sending, marks the results, and revives them on request. It never
//! sends anything itself.

use std::collections::HashSet;
use std::time::Duration;

use serde::Deserialize;
use uuid::Uuid;

use crate::domain::json::RawJson;
use crate::domain::webhook::Action;
use crate::store::{Actor, Error, Result, Session, Store, Tx};
use crate::wake::Hints;

/// The most bytes of notifications that one lease takes. The first is leased however large it is.
const LEASE_BYTES: i64 = 8 * 1024 * 1024;

/// A notification that this instance is to send now.
#[derive(Clone, Debug)]
pub struct Leased {
    pub id: i64,
    pub task_id: Option<Uuid>,
    pub batch_id: Uuid,
    pub trigger: String,
    pub condition: String,
    pub run: i32,
    pub action: Action,
    /// The place of the action in its list.
    pub position: i32,
    /// The payload as text: it holds metadata, and a tree would take several times its memory.
    pub state: RawJson,
    /// The attempt that the payload names.
    pub attempt: Option<i64>,
    /// The number of attempts, including this one.
    pub attempts: i32,
    /// The size of action and state in memory.
    pub bytes: usize,
}

/// The part of a payload that the headers of its call repeat.
#[derive(Deserialize)]
struct PayloadAttempt {
    attempt: Option<i64>,
}

/// The result of sending a notification.
#[derive(Clone, Debug)]
pub struct Sent {
    pub id: i64,
    /// The number of attempts at the lease. A failure is ignored if another instance has leased the notification since.
    pub attempts: i32,
    pub status: Option<u16>,
    pub error: Option<String>,
    /// The delay until the next attempt after a failure; `None` if there is none.
    pub again_in: Option<Duration>,
}

/// Leases up to `limit` due notifications, and no more once they have [`LEASE_BYTES`], for as long as sending them may
/// take. Also returns whether there may be more.
pub async fn lease(tx: &mut Tx, limit: i64, lease: Duration) -> Result<(Vec<Leased>, bool)> {
    let now = tx.store.clock().param();
    let rows = sqlx::query!(
        r#"with picked as materialized (
             select id, next_attempt_at, octet_length(action) + octet_length(state) as bytes
             from outbox where status = 'pending' and next_attempt_at <= coalesce($1, statement_timestamp())
             order by next_attempt_at, id limit $2 for update skip locked
         ), sized as materialized (
             select id, sum(bytes) over (order by next_attempt_at, id) - bytes as before from picked
         )
         update outbox o set attempts = o.attempts + 1, updated_at = coalesce($1, statement_timestamp()),
             next_attempt_at = coalesce($1, statement_timestamp()) + make_interval(secs => $3)
         from sized s where o.id = s.id and s.before < $4
         returning o.id, o.task_id, o.batch_id, o.trigger, o.condition, o.run, o.action, o.state, o.attempts, o.position,
             (select count(*) from picked) as "picked!""#,
        now,
        limit,
        lease.as_secs_f64(),
        LEASE_BYTES,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let picked = rows.first().map_or(0, |row| row.picked);
    let more = picked == limit || i64::try_from(rows.len()).is_ok_and(|leased| leased < picked);
    let mut leased = rows
        .into_iter()
        .map(|row| {
            let state: PayloadAttempt = serde_json::from_str(&row.state).map_err(Error::corrupt)?;
            Ok(Leased {
                id: row.id,
                task_id: row.task_id,
                batch_id: row.batch_id,
                trigger: row.trigger,
                condition: row.condition,
                run: row.run,
                action: serde_json::from_str(&row.action).map_err(Error::corrupt)?,
                position: row.position,
                state: serde_json::from_str(&row.state).map_err(Error::corrupt)?,
                attempt: state.attempt,
                attempts: row.attempts,
                bytes: row.action.len() + row.state.len(),
            })
        })
        .collect::<Result<Vec<_>>>()?;
    leased.sort_unstable_by_key(|delivery| delivery.id);
    Ok((leased, more))
}

/// Writes the results of many notifications in one statement. Returns those that another transaction holds: they are
/// not written.
pub async fn mark(session: &Session, results: &[Sent]) -> Result<HashSet<i64>> {
    let status = |sent: &Sent| match (&sent.error, sent.again_in) {
        (None, _) => "success",
        (Some(_), Some(_)) => "pending",
        (Some(_), None) => "exhausted",
    };
    let statuses: Vec<&str> = results.iter().map(status).collect();
    let mut tx = session.begin(Actor::Loop("delivery")).await?;
    let now = tx.store.clock().param();
    let busy = sqlx::query_scalar!(
        r#"/* mark deliveries */ with held as materialized (
             select id from outbox where id = any($1) order by id for update skip locked
         ), marked as (
         update outbox o set status = u.status, last_status = u.last_status, last_error = u.last_error,
             next_attempt_at = coalesce($7, statement_timestamp()) + make_interval(secs => u.again), updated_at = coalesce($7, statement_timestamp())
         from unnest($1::bigint[], $2::int[], $3::text[]::delivery_status[], $4::int[], $5::text[],
                     $6::double precision[])
             u(id, attempts, status, last_status, last_error, again)
         join held h on h.id = u.id
         where o.id = u.id and o.status = 'pending' and (o.attempts = u.attempts or u.status = 'success')
         )
         select id from outbox where id = any($1) and id not in (select id from held)"#,
        &results.iter().map(|r| r.id).collect::<Vec<_>>(),
        &results.iter().map(|r| r.attempts).collect::<Vec<_>>(),
        &statuses as &[&str],
        &results.iter().map(|r| r.status.map(i32::from)).collect::<Vec<_>>() as &[Option<i32>],
        &results.iter().map(|r| r.error.as_deref()).collect::<Vec<_>>() as &[Option<&str>],
        &results.iter().map(|r| r.again_in.map_or(0.0, |d| d.as_secs_f64())).collect::<Vec<_>>(),
        now,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let busy: HashSet<i64> = busy.into_iter().collect();
    let exhausted = |(result, status): &(&Sent, &&str)| **status == "exhausted" && !busy.contains(&result.id);
    let exhausted = results.iter().zip(&statuses).filter(exhausted).count();
    if exhausted > 0 {
        tx.count("reprise_webhook_exhausted_total", vec![], exhausted as u64);
    }
    tx.commit().await?;
    Ok(busy)
}

/// A notification that was leased and not sent.
#[derive(Clone, Copy, Debug)]
pub struct Postponed {
    pub id: i64,
    /// The number of attempts at the lease.
    pub attempts: i32,
    pub again_in: Duration,
}

/// Puts back notifications that were not sent, as if they had not been leased. Skips those that another transaction
/// holds; their lease ends by itself.
pub async fn postpone(session: &Session, postponed: &[Postponed]) -> Result<()> {
    let mut tx = session.begin_lease(Actor::Loop("delivery")).await?;
    let now = tx.store.clock().param();
    sqlx::query!(
        "with held as materialized (select id from outbox where id = any($1) order by id for update skip locked)
         update outbox o set attempts = o.attempts - 1, updated_at = coalesce($4, statement_timestamp()),
             next_attempt_at = coalesce($4, statement_timestamp()) + make_interval(secs => u.again)
         from unnest($1::bigint[], $2::int[], $3::double precision[]) u(id, attempts, again)
         join held h on h.id = u.id
         where o.id = u.id and o.status = 'pending' and o.attempts = u.attempts",
        &postponed.iter().map(|p| p.id).collect::<Vec<_>>(),
        &postponed.iter().map(|p| p.attempts).collect::<Vec<_>>(),
        &postponed.iter().map(|p| p.again_in.as_secs_f64()).collect::<Vec<_>>(),
        now,
    )
    .execute(tx.conn().await?)
    .await?;
    tx.commit().await
}

/// Makes a notification pending again, with a full set of attempts. Returns `None` if there is none with this id, and
/// `Some(false)` if it is already pending.
pub async fn redeliver(session: &Session, id: i64) -> Result<Option<bool>> {
    let mut tx = session.begin(Actor::Api).await?;
    let now = tx.store.clock().param();
    let revived = sqlx::query_scalar!(
        "update outbox set status = 'pending', attempts = 0, next_attempt_at = coalesce($2, statement_timestamp()),
             updated_at = coalesce($2, statement_timestamp())
         where id = $1 and status <> 'pending' returning id",
        id,
        now,
    )
    .fetch_optional(tx.conn().await?)
    .await?;
    if revived.is_some() {
        tx.hint(Hints::DELIVER);
        tx.commit().await?;
        return Ok(Some(true));
    }
    let known = sqlx::query_scalar!("select id from outbox where id = $1", id).fetch_optional(tx.conn().await?).await?;
    tx.rollback().await?;
    Ok(known.map(|_| false))
}

/// Returns the seconds until the next notification is due; negative when one is overdue.
pub async fn next_due(tx: &mut Tx) -> Result<Option<f64>> {
    let now = tx.store.clock().param();
    Ok(sqlx::query_scalar!(
        "select extract(epoch from
             (select next_attempt_at from outbox where status = 'pending' order by next_attempt_at limit 1)
             - coalesce($1, statement_timestamp()))::double precision",
        now,
    )
    .fetch_one(tx.conn().await?)
    .await?)
}

/// Returns how many notifications are pending, and the age of the oldest in seconds.
pub async fn depth(store: &Store) -> Result<(i64, f64)> {
    let counting = sqlx::query!(
        r#"select count(*) as "depth!",
                  coalesce(extract(epoch from coalesce($1, statement_timestamp()) - min(created_at)), 0)::double precision as "age!"
           from outbox where status = 'pending'"#,
        store.clock().param(),
    );
    let row = store.listing(async |tx| Ok(counting.fetch_one(tx.conn().await?).await?)).await?;
    Ok((row.depth, row.age))
}
