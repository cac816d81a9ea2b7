//! Stores a batch: a constant number of statements, whatever its size.

use chrono::{DateTime, Utc};
use serde_json::Value;
use uuid::Uuid;

use super::policies::ByKind;
use super::tx::Move;
use super::{Error, Result, Tx};
use crate::domain::new_task::{NewBatch, NewTask, RetryChoice};
use crate::domain::policy::Policy;
use crate::domain::status::Status;
use crate::domain::view::RetrySource;
use crate::wake::Hints;

/// A stored batch: its id, the ids of its tasks in their order, and when it came into being.
pub struct Created {
    pub batch_id: Uuid,
    pub ids: Vec<Uuid>,
    pub created_at: DateTime<Utc>,
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
    if batch.tasks.is_empty() {
        let created_at = sqlx::query_scalar!(r#"select coalesce($1, now()) as "now!""#, tx.store.clock().param())
            .fetch_one(tx.conn())
            .await?;
        return Ok(Created { batch_id, ids: Vec::new(), created_at });
    }
    let created_at = insert_batch(tx, batch_id, batch).await?;
    // Made in ascending order: the queue takes equal priorities in the order of the batch, and locks taken in the
    // order of ids go from parents to children.
    let ids: Vec<Uuid> = batch.tasks.iter().map(|_| Uuid::now_v7()).collect();
    insert_tasks(tx, batch_id, &ids, batch, around, created_at).await?;
    insert_links(tx, &ids, &batch.tasks).await?;
    for (id, task) in ids.iter().zip(&batch.tasks) {
        let made = Move { id: *id, batch_id, from: None, to: task.status(), cause: "create", run: 0, attempt: 0 };
        tx.moved(made, created_at);
    }
    if batch.tasks.iter().any(|t| t.run_at.is_some()) {
        tx.hint(Hints::RETRY);
    }
    tx.count("reprise_tasks_created_total", vec![], ids.len() as u64);
    Ok(Created { batch_id, ids, created_at })
}

async fn insert_batch(tx: &mut Tx, id: Uuid, batch: &NewBatch) -> Result<DateTime<Utc>> {
    let mut kinds: Vec<&str> = batch.tasks.iter().map(|t| t.kind.as_str()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let waiting = batch.tasks.iter().filter(|t| t.status() == Status::Waiting).count();
    let on_complete = match batch.on_batch_complete.as_slice() {
        [] => None,
        actions => Some(serde_json::to_string(actions).map_err(Error::corrupt)?),
    };
    let count = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
    let expected: i64 = batch.tasks.iter().filter_map(|t| t.expected_count).map(i64::from).sum();
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
        count(batch.tasks.len()),
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
    around: &Circumstances,
    created_at: DateTime<Utc>,
) -> Result<()> {
    let (tasks, defaults) = (&batch.tasks, &around.defaults);
    macro_rules! column {
        ($task:ident => $value:expr) => {
            &tasks.iter().map(|$task| $value).collect::<Vec<_>>()[..]
        };
    }
    let json = |value: Result<String, serde_json::Error>| value.map_err(Error::corrupt);
    let actions = tasks
        .iter()
        .map(|t| (!t.actions.is_empty()).then(|| json(serde_json::to_string(&t.actions))).transpose())
        .collect::<Result<Vec<_>>>()?;
    let retry = tasks
        .iter()
        .map(|t| policy(t, defaults).map(|(p, _)| json(serde_json::to_string(p))).transpose())
        .collect::<Result<Vec<_>>>()?;
    let rules = tasks
        .iter()
        .map(|t| (!t.rules.is_empty()).then(|| json(serde_json::to_string(&t.rules))).transpose())
        .collect::<Result<Vec<_>>>()?;
    let wait_count = |t: &NewTask| i32::try_from(t.dependencies.len()).unwrap_or(i32::MAX);
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
        column!(t => t.status().as_str()) as &[&str],
        column!(t => t.priority),
        column!(t => t.flags(batch.dead_end_cancel).0),
        column!(t => wait_count(t)),
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
        &around.turns,
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

async fn insert_links(tx: &mut Tx, ids: &[Uuid], tasks: &[NewTask]) -> Result<()> {
    let (mut parents, mut children, mut required) = (Vec::new(), Vec::new(), Vec::new());
    for (child, task) in ids.iter().zip(tasks) {
        for dependency in &task.dependencies {
            parents.push(ids[dependency.parent]);
            children.push(*child);
            required.push(dependency.requires_success);
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
