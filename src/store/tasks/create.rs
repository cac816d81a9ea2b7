//! Stores new batches with a constant number of statements, whatever their number and size. It never decides which
//! tasks are new; `domain::dedupe::plan` does.

use std::collections::BTreeSet;

use chrono::{DateTime, Utc};
use serde_json::Value;
use uuid::Uuid;

use super::{dedupe, lock, transitions};
use crate::domain::dedupe::{Parent, Planned, plan};
use crate::domain::request::new_batch::NewBatch;
use crate::domain::request::new_task::{NewTask, RetryChoice};
use crate::domain::retry::policy::Policy;
use crate::domain::task::Flags;
use crate::domain::task::lifecycle::{Event, Transition, decide};
use crate::domain::task::status::Status;
use crate::domain::view::RetrySource;
use crate::store::ledger::events::Move;
use crate::store::policies::ByKind;
use crate::store::{Error, Result, Store, Tx};
use crate::wake::Hints;

/// The most bytes of actions that one statement inserts, because memory holds several copies of a statement.
const INSERT_BYTES: usize = 4 * 1024 * 1024;

/// A stored batch with its new tasks, in the order of the request.
#[derive(Debug)]
pub struct StoredBatch {
    pub batch_id: Uuid,
    pub tasks: Vec<StoredTask>,
    pub created_at: DateTime<Utc>,
}

/// A stored task.
#[derive(Debug)]
pub struct StoredTask {
    /// The position in the request.
    pub position: usize,
    pub id: Uuid,
    pub status: Status,
}

/// The data beside the request that storing a batch needs.
#[derive(Clone, Debug)]
pub struct CreationContext {
    /// The default retry policies, for tasks without a policy of their own.
    pub defaults: ByKind,
    /// The turn of each task, by its position in the request.
    pub turns: Vec<i64>,
}

/// A batch to store.
#[derive(Clone, Copy, Debug)]
pub struct New<'a> {
    pub id: Uuid,
    pub batch: &'a NewBatch,
    pub context: &'a CreationContext,
}

/// A batch with the tasks that are new.
struct Plan<'a> {
    new: New<'a>,
    tasks: Vec<Planned<'a>>,
    ids: Vec<Uuid>,
    /// Existing tasks in other batches that the new tasks depend on, in the order of their ids.
    existing_parents: Vec<Uuid>,
}

/// Stores batches together. A batch that compares its tasks with existing tasks must come alone.
pub async fn batches(tx: &mut Tx, new: &[New<'_>]) -> Result<Vec<StoredBatch>> {
    let mut plans = Vec::with_capacity(new.len());
    for new in new {
        let tasks = &new.batch.tasks;
        let existing = if tasks.iter().any(|task| !task.dedupe_strategy.is_empty()) {
            dedupe::existing_tasks(tx, tasks).await?
        } else {
            Vec::new()
        };
        let tasks = plan(tasks, &existing);
        let existing_parents = existing_parents(&tasks);
        plans.push(Plan { new: *new, tasks, ids: Vec::new(), existing_parents });
    }
    let created_at = insert_batches(tx, &plans).await?;
    for plan in &mut plans {
        plan.ids = new_ids(&tx.store, created_at, plan.tasks.len(), plan.existing_parents.last());
    }
    insert_tasks(tx, &plans, created_at).await?;
    insert_links(tx, &plans).await?;
    let mut created = Vec::with_capacity(plans.len());
    for Plan { new, tasks, ids, existing_parents } in &plans {
        for (id, task) in ids.iter().zip(tasks) {
            let (batch_id, to) = (new.id, task.stored_as());
            let made = Move { batch_id, from: None, to, cause: "create", run: 0, attempt: 0, reason: None };
            tx.moved(*id, made, created_at);
        }
        for task in tasks.iter().filter(|task| task.stored_as() == Status::Pending) {
            // The retry loop releases tasks whose `run_at` is still to come.
            let is_delayed = task.task.run_at.is_some_and(|at| at > created_at);
            tx.hint(if is_delayed { Hints::RETRY } else { Hints::START });
        }
        if !existing_parents.is_empty() {
            dedupe::mark_as_parents(tx, existing_parents).await?;
            let lost: Vec<Uuid> = ids.iter().zip(tasks).filter(|(_, task)| task.is_lost()).map(|(id, _)| *id).collect();
            if !lost.is_empty() {
                fail_lost(tx, &lost).await?;
            }
        }
        let made = |(id, task): (&Uuid, &Planned)| StoredTask { position: task.position, id: *id, status: task.status };
        created.push(StoredBatch { batch_id: new.id, tasks: ids.iter().zip(tasks).map(made).collect(), created_at });
    }
    tx.count("reprise_tasks_created_total", vec![], plans.iter().map(|plan| plan.ids.len() as u64).sum());
    Ok(created)
}

/// Returns the existing tasks that new ones depend on, in the order of their ids.
fn existing_parents(planned: &[Planned]) -> Vec<Uuid> {
    let existing = |parent: &Parent| if let Parent::Existing(task) = parent { Some(task.id) } else { None };
    let ids: BTreeSet<Uuid> = planned.iter().flat_map(|task| task.parents.keys()).filter_map(existing).collect();
    ids.into_iter().collect()
}

/// Returns ids made from the time of creation, by which lists find tasks. Ids ascend: the queue takes equal priorities
/// in the order of the batch, and locks taken in the order of ids go from parents to children. So every id comes after
/// that of each existing parent, even if the clock that made the parent's id is ahead.
fn new_ids(store: &Store, created_at: DateTime<Utc>, count: usize, after: Option<&Uuid>) -> Vec<Uuid> {
    let ids = store.ids.made_at(created_at, count);
    match (after.and_then(|parent| Some((parent, parent.get_timestamp()?))), ids.first()) {
        (Some((parent, made)), Some(first)) if first <= parent => {
            let (secs, nanos) = made.to_unix();
            let context = uuid::ContextV7::new();
            let id = |_| Uuid::new_v7(uuid::Timestamp::from_unix(&context, secs + 1, nanos));
            (0..count).map(id).collect()
        }
        _ => ids,
    }
}

/// Fails the new tasks that require the success of an existing task that has already failed or been canceled.
async fn fail_lost(tx: &mut Tx, lost: &[Uuid]) -> Result<()> {
    let locked = lock::by_ids(tx, lost).await?;
    let event = Event::ParentsSettled { count: 0, doomed: true };
    let failed = |task| decide(task, &event, locked.moment).ok().flatten();
    let transitions: Vec<Transition> = locked.tasks.iter().filter_map(failed).collect();
    transitions::apply(tx, &transitions, locked.moment).await
}

/// Inserts the batches that have new tasks, with their counters, and returns the time of creation.
async fn insert_batches(tx: &mut Tx, plans: &[Plan<'_>]) -> Result<DateTime<Utc>> {
    let stored: Vec<&Plan> = plans.iter().filter(|plan| !plan.tasks.is_empty()).collect();
    macro_rules! column {
        ($plan:ident => $value:expr) => {
            &stored.iter().map(|$plan| $value).collect::<Vec<_>>()[..]
        };
    }
    let kinds = |plan: &Plan| {
        let kinds: BTreeSet<&str> = plan.tasks.iter().map(|p| p.task.kind.as_str()).collect();
        serde_json::to_string(&kinds).unwrap_or_default()
    };
    let on_complete = stored
        .iter()
        .map(|plan| match plan.new.batch.on_batch_complete.as_slice() {
            [] => Ok(None),
            actions => serde_json::to_string(actions).map(Some).map_err(Error::corrupt),
        })
        .collect::<Result<Vec<_>>>()?;
    let count = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
    let waiting = |plan: &Plan| plan.tasks.iter().filter(|p| p.stored_as() == Status::Waiting).count();
    let expected = |plan: &Plan| plan.tasks.iter().filter_map(|p| p.task.expected_count).map(i64::from).sum::<i64>();
    let now = tx.store.clock().param();
    Ok(sqlx::query_scalar!(
        r#"with u as materialized (
             select *, array(select json_array_elements_text(kinds_json::json)) as kinds
             from unnest($1::uuid[], $2::text[], $3::jsonb[], $4::text[], $5::int[], $6::text[], $7::int[], $8::bigint[])
                 u(id, scope, metadata, kinds_json, total, on_complete, waiting, expected)
         ), b as (
             insert into batch (id, scope, metadata, kinds, total, on_complete, created_at)
             select id, scope, metadata, kinds, total, on_complete, coalesce($9, statement_timestamp()) from u
         ), c as (
             insert into batch_count (batch_id, waiting, pending, total_expected, updated_at)
             select id, waiting, total - waiting, expected, coalesce($9, statement_timestamp()) from u
         )
         select coalesce($9, statement_timestamp()) as "now!""#,
        column!(plan => plan.new.id),
        column!(plan => plan.new.batch.scope.as_deref()) as &[Option<&str>],
        column!(plan => plan.new.batch.metadata.as_ref()) as &[Option<&Value>],
        column!(plan => kinds(plan)),
        column!(plan => count(plan.tasks.len())),
        &on_complete as &[Option<String>],
        column!(plan => count(waiting(plan))),
        column!(plan => expected(plan)),
        now,
    )
    .fetch_one(tx.conn().await?)
    .await?)
}

/// Inserts the tasks in chunks of at most [`INSERT_BYTES`].
async fn insert_tasks(tx: &mut Tx, plans: &[Plan<'_>], created_at: DateTime<Utc>) -> Result<()> {
    let mut all: Vec<(&New, Uuid, &Planned)> = Vec::new();
    for Plan { new, tasks, ids, .. } in plans {
        all.extend(ids.iter().zip(tasks).map(|(id, task)| (new, *id, task)));
    }
    let mut rest = all.as_slice();
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = |(_, _, planned): &&(&New, Uuid, &Planned)| {
            bytes += planned.task.actions.bytes();
            bytes <= INSERT_BYTES
        };
        let count = rest.iter().take_while(fits).count().max(1);
        insert_chunk(tx, &rest[..count], created_at).await?;
        rest = &rest[count..];
    }
    Ok(())
}

async fn insert_chunk(tx: &mut Tx, all: &[(&New<'_>, Uuid, &Planned<'_>)], created_at: DateTime<Utc>) -> Result<()> {
    macro_rules! column {
        ($task:ident => $value:expr) => {
            &all.iter().map(|(_, _, p)| p.task).map(|$task| $value).collect::<Vec<_>>()[..]
        };
        ($new:ident, $task:ident => $value:expr) => {
            &all.iter().map(|($new, _, $task)| $value).collect::<Vec<_>>()[..]
        };
    }
    let json = |value: Result<String, serde_json::Error>| value.map_err(Error::corrupt);
    let actions = all
        .iter()
        .map(|(_, _, p)| &p.task.actions)
        .map(|actions| (!actions.is_empty()).then(|| json(serde_json::to_string(actions))).transpose())
        .collect::<Result<Vec<_>>>()?;
    let policies: Vec<Option<(&Policy, RetrySource)>> =
        all.iter().map(|(new, _, p)| policy(p.task, &new.context.defaults)).collect();
    let retry = policies
        .iter()
        .map(|policy| policy.map(|(policy, _)| json(serde_json::to_string(policy))).transpose())
        .collect::<Result<Vec<_>>>()?;
    let rules = all
        .iter()
        .map(|(_, _, p)| &p.task.rules)
        .map(|rules| (!rules.is_empty()).then(|| json(serde_json::to_string(rules))).transpose())
        .collect::<Result<Vec<_>>>()?;
    let wait_count = |p: &Planned| i32::try_from(p.wait_count()).unwrap_or(i32::MAX);
    let flags = |new: &New, p: &Planned| {
        let mut flags = p.task.flags(new.batch.dead_end_cancel);
        flags.set(Flags::HAS_CHILDREN, p.has_children);
        flags.0
    };
    sqlx::query!(
        "/* create tasks */ with u as materialized (
             select * from unnest($1::uuid[], $3::uuid[], $4::text[]::task_status[], $5::smallint[], $6::smallint[],
                                  $7::int[], $8::int[], $9::int[], $10::timestamptz[], $11::text[], $12::text[],
                                  $13::jsonb[], $14::text[], $15::text[], $16::boolean[], $17::text[], $18::bigint[],
                                  $19::text[], $20::text[])
                 u(batch_id, id, status, priority, flags, wait_count, timeout_secs, expected_count, run_at, name, kind,
                   metadata, actions, retry, dead_end_barrier, retry_source, turn, rules, fair_key)
         ), spec as (
             insert into task_spec (id, batch_id, timeout_secs, name, kind, metadata, actions, retry, retry_source,
                                    run_at, dead_end_barrier, rules, fair_key, created_at)
             select id, batch_id, timeout_secs, name, kind, metadata, actions, retry, retry_source, run_at,
                    dead_end_barrier, rules, fair_key, $2 from u
         )
         insert into task (id, batch_id, status, priority, flags, wait_count, timeout_secs, expected_count, not_before,
                           turn, kind_hash, created_at, last_updated)
         select id, batch_id, status, priority, flags, wait_count, timeout_secs, expected_count,
                case when run_at > $2 then run_at end, turn, hashtext(kind), $2, $2 from u",
        column!(new, _p => new.id),
        created_at,
        &all.iter().map(|(_, id, _)| *id).collect::<Vec<_>>(),
        column!(_new, p => p.stored_as().as_str()) as &[&str],
        column!(t => t.priority),
        column!(new, p => flags(new, p)),
        column!(_new, p => wait_count(p)),
        column!(t => t.timeout_secs),
        column!(t => t.expected_count) as &[Option<i32>],
        column!(t => t.run_at) as &[Option<DateTime<Utc>>],
        column!(t => t.name.as_str()) as &[&str],
        column!(t => t.kind.as_str()) as &[&str],
        column!(t => t.metadata.as_ref()) as &[Option<&Value>],
        &actions as &[Option<String>],
        &retry as &[Option<String>],
        column!(t => t.dead_end_barrier),
        &policies.iter().map(|policy| policy.map(|(_, source)| source.as_str())).collect::<Vec<_>>()
            as &[Option<&str>],
        column!(new, p => new.context.turns.get(p.position).copied().unwrap_or(0)),
        &rules as &[Option<String>],
        column!(new, p => Some(new.batch.fair_key_of(p.task)).filter(|key| !key.is_empty())) as &[Option<&str>],
    )
    .execute(tx.conn().await?)
    .await?;
    Ok(())
}

/// Returns the retry policy of a new task, and where it comes from.
fn policy<'a>(task: &'a NewTask, defaults: &'a ByKind) -> Option<(&'a Policy, RetrySource)> {
    match &task.retry {
        RetryChoice::Own(policy) => Some((policy, RetrySource::Task)),
        RetryChoice::OptOut => None,
        RetryChoice::OfKind => defaults.get(&task.kind).map(|policy| (policy, RetrySource::Kind)),
    }
}

async fn insert_links(tx: &mut Tx, plans: &[Plan<'_>]) -> Result<()> {
    let (mut parents, mut children, mut required) = (Vec::new(), Vec::new(), Vec::new());
    for Plan { tasks, ids, .. } in plans {
        for (child, task) in ids.iter().zip(tasks) {
            for (parent, requires_success) in &task.parents {
                parents.push(match parent {
                    Parent::New(at) => ids[*at],
                    Parent::Existing(task) => task.id,
                });
                children.push(*child);
                required.push(*requires_success);
            }
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
    .execute(tx.conn().await?)
    .await?;
    Ok(())
}
