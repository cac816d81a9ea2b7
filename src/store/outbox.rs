//! Notifications: written with the transition they tell of, leased for sending, marked with what came of it.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::json;
use uuid::Uuid;

use super::tasks::lease::ClaimId;
use super::{Actor, Error, Result, Session, Tx};
use crate::domain::task::Flags;
use crate::domain::task::lifecycle::{Notice, Transition};
use crate::domain::task::status::Status;
use crate::domain::view::Timestamp;
use crate::domain::webhook::Action;
use crate::wake::Hints;

/// What the notifications that are leased at once may have in all.
const LEASE_BYTES: i64 = 8 * 1024 * 1024;

/// The notifications that go with these transitions. Tasks without such an action cost nothing.
pub(super) async fn enqueue(tx: &mut Tx, transitions: &[Transition], now: DateTime<Utc>) -> Result<()> {
    let (mut listed, mut cancels) = (Vec::new(), Vec::new());
    for transition in transitions {
        let flags = transition.task().flags;
        match transition.notice() {
            Some(Notice::Success) if flags.has(Flags::ON_SUCCESS) => listed.push(("on_success", transition)),
            Some(Notice::Failure) if flags.has(Flags::ON_FAILURE) => listed.push(("on_failure", transition)),
            Some(Notice::Retry) if flags.has(Flags::ON_RETRY) => listed.push(("on_retry", transition)),
            Some(Notice::Cancel) if flags.has(Flags::ON_START) => cancels.push(transition),
            _ => {}
        }
    }
    let mut added = 0;
    if !listed.is_empty() {
        let states: Vec<String> = listed.iter().map(|(_, t)| state(t)).collect();
        let notices: Vec<Notice> = listed.iter().filter_map(|(_, t)| t.notice()).collect();
        added += sqlx::query!(
            "insert into outbox (task_id, batch_id, trigger, condition, run, action, state, next_attempt_at,
                                 created_at, updated_at)
             select u.id, u.batch_id, u.trigger, u.condition, u.run, a.action::text, u.state, $8, $8, $8
             from unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::int[], $6::text[], $7::text[])
                      u(id, batch_id, trigger, condition, run, list, state)
             join task_spec s on s.id = u.id
             cross join lateral json_array_elements(s.actions::json -> u.list) a(action)",
            &listed.iter().map(|(_, t)| t.task().id).collect::<Vec<_>>(),
            &listed.iter().map(|(_, t)| t.task().batch_id).collect::<Vec<_>>(),
            &notices.iter().map(|n| n.trigger()).collect::<Vec<_>>() as &[&str],
            &notices.iter().map(|n| n.condition()).collect::<Vec<_>>() as &[&str],
            &listed.iter().map(|(_, t)| t.from_run()).collect::<Vec<_>>(),
            &listed.iter().map(|(list, _)| *list).collect::<Vec<_>>() as &[&str],
            &states,
            now,
        )
        .execute(tx.conn().await?)
        .await?
        .rows_affected();
    }
    if !cancels.is_empty() {
        let states: Vec<String> = cancels.iter().map(|t| state(t)).collect();
        added += sqlx::query!(
            "insert into outbox (task_id, batch_id, trigger, condition, run, action, state, next_attempt_at,
                                 created_at, updated_at)
             select u.id, u.batch_id, 'cancel', 'success', u.run, c.action, u.state, $5, $5, $5
             from unnest($1::uuid[], $2::uuid[], $3::int[], $4::text[]) u(id, batch_id, run, state)
             join cancel_action c on c.task_id = u.id and c.run = u.run",
            &cancels.iter().map(|t| t.task().id).collect::<Vec<_>>(),
            &cancels.iter().map(|t| t.task().batch_id).collect::<Vec<_>>(),
            &cancels.iter().map(|t| t.from_run()).collect::<Vec<_>>(),
            &states,
            now,
        )
        .execute(tx.conn().await?)
        .await?
        .rows_affected();
    }
    if added > 0 {
        tx.hint(Hints::DELIVER);
    }
    Ok(())
}

/// The task as the notification tells it.
fn state(transition: &Transition) -> String {
    let task = transition.task();
    let trigger = transition.notice().map(Notice::trigger);
    json!({
        "task_id": task.id,
        "batch_id": task.batch_id,
        "status": task.status,
        "trigger": trigger,
        // Both of the execution that it tells of, not of the one that may follow.
        "attempt": transition.attempt().map_or(task.attempt, |ended| ended.attempt),
        "run": transition.from_run(),
        "max_retries": task.retry.as_ref().map(|p| p.max_retries),
        "will_retry": task.status == Status::RetryPending,
        "next_retry_at": task.next_retry_at.map(Timestamp),
        "failure_type": task.failure_type,
        "failure_reason": task.failure_reason,
        "ended_at": task.ended_at.map(Timestamp),
    })
    .to_string()
}

/// What the answer to a call of `on_start` said to call on cancel.
#[derive(Clone, Debug)]
pub struct CancelAction {
    pub claim: ClaimId,
    pub run: i32,
    pub action: Action,
}

/// What the answers to `on_start` said to call on cancel, as far as they belong to the last claim of their task. A task that was canceled while the call was under way
/// gets its cancel notification now: its worker has begun.
pub async fn keep_cancel_actions(tx: &mut Tx, actions: &[CancelAction]) -> Result<()> {
    if actions.is_empty() {
        return Ok(());
    }
    let now = tx.store.clock().param();
    let ids: Vec<Uuid> = actions.iter().map(|one| one.claim.0).collect();
    let claims: Vec<i32> = actions.iter().map(|one| one.claim.1).collect();
    let runs: Vec<i32> = actions.iter().map(|one| one.run).collect();
    let texts = actions
        .iter()
        .map(|one| serde_json::to_string(&one.action).map_err(Error::corrupt))
        .collect::<Result<Vec<_>>>()?;
    sqlx::query!(
        "insert into cancel_action (task_id, run, action)
         select u.id, u.run, u.action from unnest($1::uuid[], $2::int[], $3::text[], $4::int[]) u(id, run, action, claim)
         join task t on t.id = u.id and t.claim = u.claim
         on conflict (task_id) do update set run = excluded.run, action = excluded.action
             where excluded.run >= cancel_action.run",
        &ids,
        &runs,
        &texts,
        &claims,
    )
    .execute(tx.conn().await?)
    .await?;
    let late = sqlx::query!(
        r#"insert into outbox (task_id, batch_id, trigger, condition, run, action, state, next_attempt_at,
                             created_at, updated_at)
         select t.id, t.batch_id, 'cancel', 'success', t.run, u.action,
                json_build_object('task_id', t.id, 'batch_id', t.batch_id, 'status', 'Canceled', 'trigger', 'cancel',
                                  'attempt', t.attempt, 'run', t.run, 'max_retries', s.retry::json -> 'max_retries',
                                  'will_retry', false, 'next_retry_at', null, 'failure_type', t.failure_type,
                                  'failure_reason', t.failure_reason, 'ended_at',
                                  to_char(t.ended_at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))::text,
                coalesce($4, statement_timestamp()), coalesce($4, statement_timestamp()), coalesce($4, statement_timestamp())
         from unnest($1::uuid[], $2::int[], $3::text[], $5::int[]) u(id, run, action, claim)
         join task t on t.id = u.id and t.run = u.run and t.claim = u.claim and t.status = 'canceled'
         join task_spec s on s.id = t.id
         where not exists (select from outbox o where o.task_id = t.id and o.trigger = 'cancel' and o.run = t.run)"#,
        &ids,
        &runs,
        &texts,
        now,
        &claims,
    )
    .execute(tx.conn().await?)
    .await?
    .rows_affected();
    if late > 0 {
        tx.hint(Hints::DELIVER);
    }
    Ok(())
}

/// Batches in which nothing is alive any more: marks them and enqueues what they asked to be told.
/// Answers whether there is anything to deliver.
pub(super) async fn complete_batches(tx: &mut Tx, ids: &[Uuid]) -> Result<bool> {
    let now = tx.store.clock().param();
    let added = sqlx::query!(
        "with done as (
             update batch b set completed_at = coalesce($2, statement_timestamp()), completions = b.completions + 1
             where b.id = any($1) and b.completed_at is null
             returning b.id, b.completions - 1 as completion, b.on_complete, b.total
         )
         insert into outbox (batch_id, trigger, condition, run, action, state, next_attempt_at, created_at, updated_at)
         select d.id, 'batch', 'complete', d.completion, a.action::text,
                json_build_object('batch_id', d.id, 'trigger', 'batch', 'completion', d.completion,
                                  'total_tasks', d.total, 'success', c.success, 'failure', c.failure,
                                  'canceled', c.canceled)::text,
                coalesce($2, statement_timestamp()), coalesce($2, statement_timestamp()), coalesce($2, statement_timestamp())
         from done d join batch_counts c on c.batch_id = d.id
         cross join lateral json_array_elements(d.on_complete::json) a(action)",
        ids,
        now,
    )
    .execute(tx.conn().await?)
    .await?
    .rows_affected();
    Ok(added > 0)
}

/// Batches in which something has come back to life are not complete any more.
pub(super) async fn reopen_batches(tx: &mut Tx, ids: &BTreeSet<Uuid>) -> Result<()> {
    let ids: Vec<Uuid> = ids.iter().copied().collect();
    sqlx::query!("update batch set completed_at = null where id = any($1) and completed_at is not null", &ids)
        .execute(tx.conn().await?)
        .await?;
    Ok(())
}

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
    pub state: serde_json::Value,
    /// This attempt included.
    pub attempts: i32,
    /// How much of it is held in memory.
    pub bytes: usize,
}

/// What came of sending one.
#[derive(Clone, Debug)]
pub struct Sent {
    pub id: i64,
    /// As leased: a result that comes after the lease was given to another instance is not written over its.
    pub attempts: i32,
    pub status: Option<u16>,
    pub error: Option<String>,
    /// After a failure: when to try again, `None` if it is given up.
    pub again_in: Option<Duration>,
}

/// Takes due notifications for as long as sending them may take: up to `limit`, and no more once they have
/// [`LEASE_BYTES`]. Answers whether there may be more.
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
         returning o.id, o.task_id, o.batch_id, o.trigger, o.condition, o.run, o.action, o.state, o.attempts,
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
            Ok(Leased {
                id: row.id,
                task_id: row.task_id,
                batch_id: row.batch_id,
                trigger: row.trigger,
                condition: row.condition,
                run: row.run,
                action: serde_json::from_str(&row.action).map_err(Error::corrupt)?,
                state: serde_json::from_str(&row.state).map_err(Error::corrupt)?,
                attempts: row.attempts,
                bytes: row.action.len() + row.state.len(),
            })
        })
        .collect::<Result<Vec<_>>>()?;
    leased.sort_unstable_by_key(|delivery| delivery.id);
    Ok((leased, more))
}

/// Writes the results of many in one statement. Answers which of them somebody else holds: those are not written.
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
        r#"with held as materialized (
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

/// One that was leased and not sent.
#[derive(Clone, Copy, Debug)]
pub struct Postponed {
    pub id: i64,
    /// As leased.
    pub attempts: i32,
    pub again_in: Duration,
}

/// Puts back what was not sent, as if it had not been leased. The lease of what somebody else holds ends by itself.
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

/// Brings a notification back to life, with all its attempts before it. `None`: there is none with this id;
/// `Some(false)`: it is still being tried anyway.
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

/// Seconds until the next notification is due; negative when one is overdue.
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
