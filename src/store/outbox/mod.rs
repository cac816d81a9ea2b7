//! The outbox: notifications, written in the transaction of the transition that they report. Nothing here sends one.

pub mod delivery;
pub mod list;
mod payload;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::tasks::lease::ClaimId;
use super::tasks::row::read_policy;
use super::{Error, Result, Tx};
use crate::domain::retry::failure::FailureType;
use crate::domain::task::Flags;
use crate::domain::task::lifecycle::{Notice, Transition};
use crate::domain::task::status::Status;
use crate::domain::webhook::Action;
use crate::wake::Hints;

use payload::TaskState;

/// Enqueues the notifications of these transitions. Tasks without a matching action cost nothing.
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
        let states: Vec<String> = listed.iter().map(|(_, t)| TaskState::of(t).to_json()).collect();
        let notices: Vec<Notice> = listed.iter().filter_map(|(_, t)| t.notice()).collect();
        added += sqlx::query!(
            "insert into outbox (task_id, batch_id, trigger, condition, run, action, state, position, next_attempt_at,
                                 created_at, updated_at)
             select u.id, u.batch_id, u.trigger, u.condition, u.run, a.action::text,
                    (u.state::jsonb || jsonb_build_object('name', s.name, 'kind', s.kind, 'scope', b.scope,
                                                          'metadata', coalesce(s.metadata, '{}')))::text,
                    a.place - 1, $8, $8, $8
             from unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::int[], $6::text[], $7::text[])
                      u(id, batch_id, trigger, condition, run, list, state)
             join task_spec s on s.id = u.id join batch b on b.id = u.batch_id
             cross join lateral json_array_elements(s.actions::json -> u.list) with ordinality a(action, place)",
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
        let states: Vec<String> = cancels.iter().map(|t| TaskState::of(t).to_json()).collect();
        added += sqlx::query!(
            "insert into outbox (task_id, batch_id, trigger, condition, run, action, state, next_attempt_at,
                                 created_at, updated_at)
             select u.id, u.batch_id, 'cancel', 'success', u.run, c.action,
                    (u.state::jsonb || jsonb_build_object('name', s.name, 'kind', s.kind, 'scope', b.scope,
                                                          'metadata', coalesce(s.metadata, '{}')))::text,
                    $5, $5, $5
             from unnest($1::uuid[], $2::uuid[], $3::int[], $4::text[]) u(id, batch_id, run, state)
             join cancel_action c on c.task_id = u.id and c.run = u.run
             join task_spec s on s.id = u.id join batch b on b.id = u.batch_id",
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

/// The action that the answer to an `on_start` call named for a cancellation.
#[derive(Clone, Debug)]
pub struct CancelAction {
    pub claim: ClaimId,
    pub run: i32,
    pub action: Action,
}

/// Stores cancel actions that belong to the last claim of their task. A task that was canceled while the call was under
/// way gets its cancel notification now, because its worker has begun.
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
    let canceled = sqlx::query!(
        r#"select t.id, t.batch_id, t.run, t.attempt, t.failure_type, t.failure_reason, t.ended_at, s.retry, u.action as "action!"
           from unnest($1::uuid[], $2::int[], $3::text[], $4::int[]) u(id, run, action, claim)
           join task t on t.id = u.id and t.run = u.run and t.claim = u.claim and t.status = 'canceled'
           join task_spec s on s.id = t.id
           where not exists (select from outbox o where o.task_id = t.id and o.trigger = 'cancel' and o.run = t.run)"#,
        &ids,
        &runs,
        &texts,
        &claims,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    if canceled.is_empty() {
        return Ok(());
    }
    let states = canceled
        .iter()
        .map(|row| {
            let state = TaskState {
                task_id: row.id,
                batch_id: row.batch_id,
                status: Status::Canceled,
                trigger: Some(Notice::Cancel.trigger()),
                attempt: row.attempt,
                run: row.run,
                max_retries: read_policy(row.id, row.retry.as_deref())?.map(|policy| policy.max_retries),
                next_retry_at: None,
                failure_type: row.failure_type.as_deref().and_then(FailureType::parse),
                failure_reason: row.failure_reason.as_deref(),
                ended_at: row.ended_at,
            };
            Ok(state.to_json())
        })
        .collect::<Result<Vec<_>>>()?;
    sqlx::query!(
        "insert into outbox (task_id, batch_id, trigger, condition, run, action, state, next_attempt_at,
                             created_at, updated_at)
         select u.id, u.batch_id, 'cancel', 'success', u.run, u.action,
                (u.state::jsonb || jsonb_build_object('name', s.name, 'kind', s.kind, 'scope', b.scope,
                                                      'metadata', coalesce(s.metadata, '{}')))::text,
                n.at, n.at, n.at
         from unnest($1::uuid[], $2::uuid[], $3::int[], $4::text[], $5::text[]) u(id, batch_id, run, action, state)
         join task_spec s on s.id = u.id join batch b on b.id = u.batch_id
         cross join (select coalesce($6, statement_timestamp()) as at) n",
        &canceled.iter().map(|row| row.id).collect::<Vec<_>>(),
        &canceled.iter().map(|row| row.batch_id).collect::<Vec<_>>(),
        &canceled.iter().map(|row| row.run).collect::<Vec<_>>(),
        &canceled.iter().map(|row| row.action.clone()).collect::<Vec<_>>(),
        &states,
        now,
    )
    .execute(tx.conn().await?)
    .await?;
    tx.hint(Hints::DELIVER);
    Ok(())
}
