//! Stores a batch: a constant number of statements, whatever its size.

use std::collections::BTreeSet;

use chrono::{DateTime, Utc};
use serde_json::Value;
use uuid::Uuid;

use super::policies::ByKind;
use super::tx::Move;
use super::{Error, Result, Tx, dedupe, lock, transitions};
use crate::domain::dedupe::{Parent, Planned, plan};
use crate::domain::lifecycle::{Event, Transition, decide};
use crate::domain::new_task::{NewBatch, NewTask, RetryChoice};
use crate::domain::policy::Policy;
use crate::domain::status::Status;
use crate::domain::task::Flags;
use crate::domain::view::RetrySource;
use crate::wake::Hints;

/// A stored batch: what there is of its tasks, in their order, and when it came into being.
pub struct Created {
    pub batch_id: Uuid,
    pub tasks: Vec<CreatedTask>,
    pub created_at: DateTime<Utc>,
}

pub struct CreatedTask {
    /// In the request.
    pub position: usize,
    pub id: Uuid,
    pub status: Status,
}

/// What is known of a batch beside the request.
#[derive(Clone, Debug)]
pub struct Circumstances {
    /// The policies of tasks that bring none.
    pub defaults: ByKind,
    /// Whose turn each task is.
    pub turns: Vec<i64>,
}

pub async fn batch(tx: &mut Tx, batch_id: Uuid, batch: &NewBatch, around: &Circumstances) -> Result<Created> {
    let twins = if batch.tasks.iter().any(|task| !task.dedupe_strategy.is_empty()) {
        dedupe::twins(tx, &batch.tasks).await?
    } else {
        Vec::new()
    };
    let planned = plan(&batch.tasks, &twins);
    if planned.is_empty() {
        let created_at = sqlx::query_scalar!(r#"select coalesce($1, now()) as "now!""#, tx.store.clock().param())
            .fetch_one(tx.conn())
            .await?;
        return Ok(Created { batch_id, tasks: Vec::new(), created_at });
    }
    let created_at = insert_batch(tx, batch_id, batch, &planned).await?;
    let there = parents_elsewhere(&planned);
    let ids = new_ids(planned.len(), there.last());
    insert_tasks(tx, batch_id, &ids, batch, &planned, around, created_at).await?;
    insert_links(tx, &ids, &planned).await?;
    for (id, task) in ids.iter().zip(&planned) {
        let made = Move { id: *id, batch_id, from: None, to: task.stored_as(), cause: "create", run: 0, attempt: 0 };
        tx.moved(made, created_at);
    }
    if batch.tasks.iter().any(|t| t.run_at.is_some()) {
        tx.hint(Hints::RETRY);
    }
    tx.count("reprise_tasks_created_total", vec![], ids.len() as u64);
    if !there.is_empty() {
        dedupe::adopt(tx, &there).await?;
        let lost: Vec<Uuid> = ids.iter().zip(&planned).filter(|(_, task)| task.is_lost()).map(|(id, _)| *id).collect();
        if !lost.is_empty() {
            fall(tx, &lost).await?;
        }
    }
    let created = |(id, task): (&Uuid, &Planned)| CreatedTask { position: task.position, id: *id, status: task.status };
    Ok(Created { batch_id, tasks: ids.iter().zip(&planned).map(created).collect(), created_at })
}

/// Tasks of other batches that new ones depend on, in the order of their ids.
fn parents_elsewhere(planned: &[Planned]) -> Vec<Uuid> {
    let there = |parent: &Parent| if let Parent::There(twin) = parent { Some(twin.id) } else { None };
    let ids: BTreeSet<Uuid> = planned.iter().flat_map(|task| task.parents.keys()).filter_map(there).collect();
    ids.into_iter().collect()
}

/// In ascending order: the queue takes equal priorities in the order of the batch, and locks taken in the order of ids
/// go from parents to children. So they come after that of every parent, also if the clock that made it is ahead.
fn new_ids(count: usize, after: Option<&Uuid>) -> Vec<Uuid> {
    let ids: Vec<Uuid> = (0..count).map(|_| Uuid::now_v7()).collect();
    match (after.and_then(|parent| Some((parent, parent.get_timestamp()?))), ids.first()) {
        (Some((parent, made)), Some(first)) if first <= parent => {
            let (secs, nanos) = made.to_unix();
            let later = uuid::ContextV7::new();
            let id = |_| Uuid::new_v7(uuid::Timestamp::from_unix(&later, secs + 1, nanos));
            (0..count).map(id).collect()
        }
        _ => ids,
    }
}

/// The new tasks that need the success of one that had ended badly before they came.
async fn fall(tx: &mut Tx, lost: &[Uuid]) -> Result<()> {
    let locked = lock::by_ids(tx, lost).await?;
    let event = Event::ParentsSettled { count: 0, doomed: true };
    let falls = |task| decide(task, &event, locked.moment).ok().flatten();
    let transitions: Vec<Transition> = locked.tasks.iter().filter_map(falls).collect();
    transitions::apply(tx, &transitions, locked.moment).await
}

async fn insert_batch(tx: &mut Tx, id: Uuid, batch: &NewBatch, planned: &[Planned<'_>]) -> Result<DateTime<Utc>> {
    let mut kinds: Vec<&str> = planned.iter().map(|p| p.task.kind.as_str()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let waiting = planned.iter().filter(|p| p.stored_as() == Status::Waiting).count();
    let on_complete = match batch.on_batch_complete.as_slice() {
        [] => None,
        actions => Some(serde_json::to_string(actions).map_err(Error::corrupt)?),
    };
    let count = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
    let expected: i64 = planned.iter().filter_map(|p| p.task.expected_count).map(i64::from).sum();
    let now = tx.store.clock().param();
    let created_at = sqlx::query_scalar!(
        "with b as (
             insert into batch (id, scope, metadata, kinds, total, on_complete, created_at)
             values ($1, $2, $3, $4, $5, $6, coalesce($8, now())) returning created_at
         ), c as (
             insert into batch_count (batch_id, waiting, pending, total_expected, updated_at)
             select $1, $7, $5 - $7, $9, created_at from b
         )
         select created_at from b",
        id,
        batch.scope,
        batch.metadata,
        &kinds as &[&str],
        count(planned.len()),
        on_complete,
        count(waiting),
        now,
        expected,
    )
    .fetch_one(tx.conn())
    .await?;
    Ok(created_at)
}

async fn insert_tasks(
    tx: &mut Tx,
    batch_id: Uuid,
    ids: &[Uuid],
    batch: &NewBatch,
    planned: &[Planned<'_>],
    around: &Circumstances,
    created_at: DateTime<Utc>,
) -> Result<()> {
    let defaults = &around.defaults;
    macro_rules! column {
        ($task:ident => $value:expr) => {
            &planned.iter().map(|p| p.task).map(|$task| $value).collect::<Vec<_>>()[..]
        };
        (plan $task:ident => $value:expr) => {
            &planned.iter().map(|$task| $value).collect::<Vec<_>>()[..]
        };
    }
    let json = |value: Result<String, serde_json::Error>| value.map_err(Error::corrupt);
    let actions = planned
        .iter()
        .map(|p| p.task)
        .map(|t| (!t.actions.is_empty()).then(|| json(serde_json::to_string(&t.actions))).transpose())
        .collect::<Result<Vec<_>>>()?;
    let retry = planned
        .iter()
        .map(|p| p.task)
        .map(|t| policy(t, defaults).map(|(p, _)| json(serde_json::to_string(p))).transpose())
        .collect::<Result<Vec<_>>>()?;
    let rules = planned
        .iter()
        .map(|p| p.task)
        .map(|t| (!t.rules.is_empty()).then(|| json(serde_json::to_string(&t.rules))).transpose())
        .collect::<Result<Vec<_>>>()?;
    let wait_count = |p: &Planned| i32::try_from(p.wait_count()).unwrap_or(i32::MAX);
    let flags = |p: &Planned| {
        let mut flags = p.task.flags(batch.dead_end_cancel);
        flags.set(Flags::HAS_CHILDREN, p.has_children);
        flags.0
    };
    sqlx::query!(
        "with u as materialized (
             select * from unnest($3::uuid[], $4::text[]::task_status[], $5::smallint[], $6::smallint[], $7::int[],
                                  $8::int[], $9::int[], $10::timestamptz[], $11::text[], $12::text[], $13::jsonb[],
                                  $14::text[], $15::text[], $16::boolean[], $17::text[], $18::bigint[], $19::text[],
                                  $20::text[])
                 u(id, status, priority, flags, wait_count, timeout_secs, expected_count, run_at, name, kind, metadata,
                   actions, retry, dead_end_barrier, retry_source, turn, rules, fair_key)
         ), spec as (
             insert into task_spec (id, batch_id, name, kind, metadata, actions, retry, retry_source, run_at,
                                    dead_end_barrier, rules, fair_key, created_at)
             select id, $1, name, kind, metadata, actions, retry, retry_source, run_at, dead_end_barrier, rules, fair_key,
                    $2 from u
         )
         insert into task (id, batch_id, status, priority, flags, wait_count, timeout_secs, expected_count, not_before,
                           turn, created_at, last_updated)
         select id, $1, status, priority, flags, wait_count, timeout_secs, expected_count,
                case when run_at > $2 then run_at end, turn, $2, $2 from u",
        batch_id,
        created_at,
        ids,
        column!(plan p => p.stored_as().as_str()) as &[&str],
        column!(t => t.priority),
        column!(plan p => flags(p)),
        column!(plan p => wait_count(p)),
        column!(t => t.timeout_secs),
        column!(t => t.expected_count) as &[Option<i32>],
        column!(t => t.run_at) as &[Option<DateTime<Utc>>],
        column!(t => t.name.as_str()) as &[&str],
        column!(t => t.kind.as_str()) as &[&str],
        column!(t => t.metadata.as_ref()) as &[Option<&Value>],
        &actions as &[Option<String>],
        &retry as &[Option<String>],
        column!(t => t.dead_end_barrier),
        column!(t => policy(t, defaults).map(|(_, source)| source.as_str())) as &[Option<&str>],
        column!(plan p => around.turns.get(p.position).copied().unwrap_or(0)),
        &rules as &[Option<String>],
        column!(t => Some(batch.fair_key_of(t)).filter(|key| !key.is_empty())) as &[Option<&str>],
    )
    .execute(tx.conn())
    .await?;
    Ok(())
}

fn policy<'a>(task: &'a NewTask, defaults: &'a ByKind) -> Option<(&'a Policy, RetrySource)> {
    match &task.retry {
        RetryChoice::Own(policy) => Some((policy, RetrySource::Task)),
        RetryChoice::OptOut => None,
        RetryChoice::OfKind => defaults.get(&task.kind).map(|policy| (policy, RetrySource::Kind)),
    }
}

async fn insert_links(tx: &mut Tx, ids: &[Uuid], planned: &[Planned<'_>]) -> Result<()> {
    let (mut parents, mut children, mut required) = (Vec::new(), Vec::new(), Vec::new());
    for (child, task) in ids.iter().zip(planned) {
        for (parent, requires_success) in &task.parents {
            parents.push(match parent {
                Parent::New(at) => ids[*at],
                Parent::There(twin) => twin.id,
            });
            children.push(*child);
            required.push(*requires_success);
        }
    }
    if parents.is_empty() {
        return Ok(());
    }
    sqlx::query!(
        "insert into link (parent_id, child_id, requires_success)
         select * from unnest($1::uuid[], $2::uuid[], $3::boolean[])",
        &parents,
        &children,
        &required,
    )
    .execute(tx.conn())
    .await?;
    Ok(())
}
