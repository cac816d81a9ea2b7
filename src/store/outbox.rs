//! Notifications: written with the transition they tell of, leased for sending, marked with what came of it.

use std::collections::BTreeSet;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::json;
use uuid::Uuid;

use super::{Error, Result, Store, Tx};
use crate::domain::lifecycle::{Notice, Transition};
use crate::domain::status::Status;
use crate::domain::task::Flags;
use crate::domain::view::Timestamp;
use crate::domain::webhook::Action;
use crate::wake::Hints;

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
        .execute(tx.conn())
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
        .execute(tx.conn())
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

/// What the answers to `on_start` said to call on cancel. A task that was canceled while the call was under way
/// gets its cancel notification now: its worker has begun.
pub async fn keep_cancel_actions(tx: &mut Tx, actions: &[(Uuid, i32, Action)]) -> Result<()> {
    if actions.is_empty() {
        return Ok(());
    }
    let now = tx.store.clock().param();
    let ids: Vec<Uuid> = actions.iter().map(|(id, _, _)| *id).collect();
    let runs: Vec<i32> = actions.iter().map(|(_, run, _)| *run).collect();
    let texts = actions
        .iter()
        .map(|(_, _, action)| serde_json::to_string(action).map_err(Error::corrupt))
        .collect::<Result<Vec<_>>>()?;
    sqlx::query!(
        "insert into cancel_action (task_id, run, action) select * from unnest($1::uuid[], $2::int[], $3::text[])
         on conflict (task_id) do update set run = excluded.run, action = excluded.action
             where excluded.run >= cancel_action.run",
        &ids,
        &runs,
        &texts,
    )
    .execute(tx.conn())
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
                coalesce($4, now()), coalesce($4, now()), coalesce($4, now())
         from unnest($1::uuid[], $2::int[], $3::text[]) u(id, run, action)
         join task t on t.id = u.id and t.run = u.run and t.status = 'canceled'
         join task_spec s on s.id = t.id
         where not exists (select from outbox o where o.task_id = t.id and o.trigger = 'cancel' and o.run = t.run)"#,
        &ids,
        &runs,
        &texts,
        now,
    )
    .execute(tx.conn())
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
             update batch b set completed_at = coalesce($2, now()), completions = b.completions + 1
             where b.id = any($1) and b.completed_at is null
             returning b.id, b.completions - 1 as completion, b.on_complete, b.total
         )
         insert into outbox (batch_id, trigger, condition, run, action, state, next_attempt_at, created_at, updated_at)
         select d.id, 'batch', 'complete', d.completion, a.action::text,
                json_build_object('batch_id', d.id, 'trigger', 'batch', 'completion', d.completion,
                                  'total_tasks', d.total, 'success', c.success, 'failure', c.failure,
                                  'canceled', c.canceled)::text,
                coalesce($2, now()), coalesce($2, now()), coalesce($2, now())
         from done d join batch_count c on c.batch_id = d.id
         cross join lateral json_array_elements(d.on_complete::json) a(action)",
        ids,
        now,
    )
    .execute(tx.conn())
    .await?
    .rows_affected();
    Ok(added > 0)
}

/// Batches in which something has come back to life are not complete any more.
pub(super) async fn reopen_batches(tx: &mut Tx, ids: &BTreeSet<Uuid>) -> Result<()> {
    let ids: Vec<Uuid> = ids.iter().copied().collect();
    sqlx::query!("update batch set completed_at = null where id = any($1) and completed_at is not null", &ids)
        .execute(tx.conn())
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

/// Takes due notifications for as long as sending them may take.
pub async fn lease(tx: &mut Tx, limit: i64, lease: Duration) -> Result<Vec<Leased>> {
    let now = tx.store.clock().param();
    let rows = sqlx::query!(
        "with picked as materialized (
             select id from outbox where status = 'pending' and next_attempt_at <= coalesce($1, now())
             order by next_attempt_at, id limit $2 for update skip locked
         )
         update outbox o set attempts = o.attempts + 1, updated_at = coalesce($1, now()),
             next_attempt_at = coalesce($1, now()) + make_interval(secs => $3)
         from picked p where o.id = p.id
         returning o.id, o.task_id, o.batch_id, o.trigger, o.condition, o.run, o.action, o.state, o.attempts",
        now,
        limit,
        lease.as_secs_f64(),
    )
    .fetch_all(tx.conn())
    .await?;
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
            })
        })
        .collect::<Result<Vec<_>>>()?;
    leased.sort_unstable_by_key(|delivery| delivery.id);
    Ok(leased)
}

/// Writes the results of many in one statement.
pub async fn mark(store: &Store, results: &[Sent]) -> Result<()> {
    let status = |sent: &Sent| match (&sent.error, sent.again_in) {
        (None, _) => "success",
        (Some(_), Some(_)) => "pending",
        (Some(_), None) => "exhausted",
    };
    let statuses: Vec<&str> = results.iter().map(status).collect();
    sqlx::query!(
        "update outbox o set status = u.status, last_status = u.last_status, last_error = u.last_error,
             next_attempt_at = coalesce($7, now()) + make_interval(secs => u.again), updated_at = coalesce($7, now())
         from unnest($1::bigint[], $2::int[], $3::text[]::delivery_status[], $4::int[], $5::text[],
                     $6::double precision[])
             u(id, attempts, status, last_status, last_error, again)
         where o.id = u.id and o.status = 'pending' and (o.attempts = u.attempts or u.status = 'success')",
        &results.iter().map(|r| r.id).collect::<Vec<_>>(),
        &results.iter().map(|r| r.attempts).collect::<Vec<_>>(),
        &statuses as &[&str],
        &results.iter().map(|r| r.status.map(i32::from)).collect::<Vec<_>>() as &[Option<i32>],
        &results.iter().map(|r| r.error.as_deref()).collect::<Vec<_>>() as &[Option<&str>],
        &results.iter().map(|r| r.again_in.map_or(0.0, |d| d.as_secs_f64())).collect::<Vec<_>>(),
        store.clock().param(),
    )
    .execute(&store.pool)
    .await?;
    let exhausted = statuses.iter().filter(|status| **status == "exhausted").count();
    if exhausted > 0 {
        metrics::counter!("reprise_webhook_exhausted_total").increment(exhausted as u64);
    }
    Ok(())
}

/// One that was leased and not sent.
#[derive(Clone, Copy, Debug)]
pub struct Postponed {
    pub id: i64,
    /// As leased.
    pub attempts: i32,
    pub again_in: Duration,
}

/// Puts back what was not sent, as if it had not been leased.
pub async fn postpone(store: &Store, postponed: &[Postponed]) -> Result<()> {
    sqlx::query!(
        "update outbox o set attempts = o.attempts - 1, updated_at = coalesce($4, now()),
             next_attempt_at = coalesce($4, now()) + make_interval(secs => u.again)
         from unnest($1::bigint[], $2::int[], $3::double precision[]) u(id, attempts, again)
         where o.id = u.id and o.status = 'pending' and o.attempts = u.attempts",
        &postponed.iter().map(|p| p.id).collect::<Vec<_>>(),
        &postponed.iter().map(|p| p.attempts).collect::<Vec<_>>(),
        &postponed.iter().map(|p| p.again_in.as_secs_f64()).collect::<Vec<_>>(),
        store.clock().param(),
    )
    .execute(&store.pool)
    .await?;
    Ok(())
}

/// Brings a notification back to life, with all its attempts before it. `None`: there is none with this id;
/// `Some(false)`: it is still being tried anyway.
pub async fn redeliver(store: &Store, id: i64) -> Result<Option<bool>> {
    let revived = sqlx::query_scalar!(
        "update outbox set status = 'pending', attempts = 0, next_attempt_at = coalesce($2, now()),
             updated_at = coalesce($2, now())
         where id = $1 and status <> 'pending' returning id",
        id,
        store.clock().param(),
    )
    .fetch_optional(&store.pool)
    .await?;
    if revived.is_some() {
        store.wake.everyone(Hints::DELIVER);
        return Ok(Some(true));
    }
    let known = sqlx::query_scalar!("select id from outbox where id = $1", id).fetch_optional(&store.pool).await?;
    Ok(known.map(|_| false))
}

/// Seconds until the next notification is due; negative when one is overdue.
pub async fn next_due(tx: &mut Tx) -> Result<Option<f64>> {
    let now = tx.store.clock().param();
    Ok(sqlx::query_scalar!(
        "select extract(epoch from
             (select next_attempt_at from outbox where status = 'pending' order by next_attempt_at limit 1)
             - coalesce($1, now()))::double precision",
        now,
    )
    .fetch_one(tx.conn())
    .await?)
}
