//! Deduplication: finds the existing tasks that new tasks would repeat. Advisory locks order concurrent requests, so
//! that each sees the tasks of those before it. It never decides which tasks are stored (`domain::dedupe` does).

use std::collections::{BTreeSet, HashMap};

use serde_json::Value;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::lock;
use super::row::read_status;
use crate::domain::dedupe::ExistingTask;
use crate::domain::matcher;
use crate::domain::request::new_task::NewTask;
use crate::domain::task::Flags;
use crate::domain::task::status::Status;
use crate::store::{Error, Result, Tx};

/// The class of the advisory locks of this file, their first key.
const LOCK_CLASS: i32 = 0x6465_6475;
/// The number of locks. A key is locked by its hash modulo this number, because a request may compare by tens of
/// thousands of keys and the server's lock table has room for a few thousand in all. Two keys with the same lock only
/// wait for each other.
const LOCK_COUNT: u16 = 1024;
/// The number of lookups from which it pays to merge the index's pending list, which every lookup reads from end to
/// end: 10,000 lookups took 30 s with a full list, and 0.4 s with the merge.
const MERGE_FROM: usize = 50;

/// Returns the existing task that each new task would repeat, if there is one. An existing task that new tasks may
/// depend on is locked, and its status is the one under the lock: it cannot end before the new links are visible.
pub(in crate::store) async fn existing_tasks(tx: &mut Tx, tasks: &[NewTask]) -> Result<Vec<Option<ExistingTask>>> {
    let mut lookups = Lookups::default();
    let numbers: Vec<Vec<usize>> = tasks.iter().map(|task| lookups.add(task)).collect();
    if lookups.len() >= MERGE_FROM {
        merge_index(tx).await?;
    }
    lock_keys(tx, tasks).await?;
    // A statement of its own, so that its snapshot is taken when the locks are held.
    let found = lookups.find(tx).await?;
    let best =
        |numbers: &Vec<usize>| ExistingTask::best(numbers.iter().filter_map(|number| found.get(number).copied()));
    let mut existing: Vec<Option<ExistingTask>> = numbers.iter().map(best).collect();
    lock_parents(tx, tasks, &mut existing).await?;
    Ok(existing)
}

/// Locks the values that the tasks are compared by: another request that compares by the same values waits until this
/// transaction has ended. The task's own kind is locked beside the kind that it looks for, because two kinds may
/// exclude each other.
async fn lock_keys(tx: &mut Tx, tasks: &[NewTask]) -> Result<()> {
    let mut locks = BTreeSet::new();
    for task in tasks {
        for matcher in &task.dedupe_strategy {
            let key = |kind: &str| matcher::key(kind, &matcher.fields, task.metadata.as_ref());
            locks.extend(
                [&matcher.kind, &task.kind].into_iter().filter_map(|kind| key(kind)).map(|key| lock_number(&key)),
            );
        }
    }
    // Every transaction locks in the same order. Just-in-time compilation goes off here, because the planner expects to
    // find much in a large table and compiled the lookup that follows: 35 ms for a lookup of 0.5 ms.
    let locks: Vec<i32> = locks.into_iter().collect();
    sqlx::query!(
        "select pg_advisory_xact_lock($1, place), set_config('jit', 'off', true) from unnest($2::int[]) place",
        LOCK_CLASS,
        &locks,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    Ok(())
}

fn lock_number(key: &str) -> i32 {
    let hash = Sha256::digest(key);
    i32::from(u16::from_be_bytes([hash[0], hash[1]]) % LOCK_COUNT)
}

/// Merges the pending list of the metadata index, if this role may.
async fn merge_index(tx: &mut Tx) -> Result<()> {
    sqlx::query!(
        "select gin_clean_pending_list(c.oid) from pg_class c
         where c.oid = 'task_spec_metadata_idx'::regclass and pg_has_role(c.relowner, 'usage')"
    )
    .fetch_all(tx.conn().await?)
    .await?;
    Ok(())
}

/// The distinct lookups of a request, each with a number.
#[derive(Default)]
struct Lookups<'a> {
    numbers: HashMap<(String, Option<Status>), usize>,
    kinds: Vec<&'a str>,
    statuses: Vec<Option<&'static str>>,
    values: Vec<Value>,
}

impl<'a> Lookups<'a> {
    fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Adds the lookups of a task and returns their numbers.
    fn add(&mut self, task: &'a NewTask) -> Vec<usize> {
        let metadata = task.metadata.as_ref();
        let number = |matcher: &'a matcher::DedupeMatcher| {
            let key = matcher::key(&matcher.kind, &matcher.fields, metadata)?;
            let next = self.numbers.len();
            let number = *self.numbers.entry((key, matcher.status)).or_insert(next);
            if number == next {
                self.kinds.push(&matcher.kind);
                self.statuses.push(matcher.status.map(Status::as_str));
                self.values.push(Value::Object(matcher::values(&matcher.fields, metadata)?));
            }
            Some(number)
        };
        task.dedupe_strategy.iter().filter_map(number).collect()
    }

    /// Returns the newest task found by each lookup.
    async fn find(&self, tx: &mut Tx) -> Result<HashMap<usize, ExistingTask>> {
        // The index knows containment; the equality of the values is checked after that. `offset 0` keeps the planner
        // from reading all tasks of the kind, or all tasks, in the hope of an early match.
        let rows = sqlx::query!(
            r#"select k.number as "number!", m.id as "id!", m.status as "status!"
               from unnest($1::text[], $2::text[], $3::jsonb[]) with ordinality k(kind, status, fields, number)
               cross join lateral (
                   (select t.id, t.status::text as status
                    from (select id, kind, metadata from task_spec where metadata @> k.fields offset 0) s
                    cross join lateral (select id, status, ended_at from task where id = s.id offset 0) t
                    where k.fields <> '{}' and s.kind = k.kind
                      and not exists (
                          select from jsonb_each(k.fields) f where s.metadata -> f.key is distinct from f.value
                      )
                      and (t.status = k.status::task_status or k.status is null and t.ended_at is null)
                    order by t.id desc limit 1)
                   union all
                   (select t.id, t.status::text
                    from task_spec s
                    cross join lateral (select id, status, ended_at from task where id = s.id offset 0) t
                    where k.fields = '{}' and s.kind = k.kind
                      and (t.status = k.status::task_status or k.status is null and t.ended_at is null)
                    order by s.id desc limit 1)
               ) m"#,
            &self.kinds as &[&str],
            &self.statuses as &[Option<&str>],
            &self.values,
        )
        .fetch_all(tx.conn().await?)
        .await?;
        let numbered = |number: i64, id: Uuid, status: &str| {
            // PostgreSQL counts from 1.
            let number = usize::try_from(number - 1).map_err(Error::corrupt)?;
            Ok((number, ExistingTask { id, status: read_status(status)? }))
        };
        rows.into_iter().map(|row| numbered(row.number, row.id, &row.status)).collect()
    }
}

/// Locks the existing tasks that new tasks may depend on, and updates their status. A status that has changed since the
/// lookup makes no difference. If a task was deleted meanwhile, the whole transaction is repeated.
async fn lock_parents(tx: &mut Tx, tasks: &[NewTask], existing: &mut [Option<ExistingTask>]) -> Result<()> {
    let parents: Vec<&mut ExistingTask> = tasks
        .iter()
        .zip(existing)
        .filter(|(new, _)| new.has_children)
        .filter_map(|(_, parent)| parent.as_mut())
        .collect();
    if parents.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = parents.iter().map(|parent| parent.id).collect();
    let locked = lock::by_ids(tx, &ids).await?.tasks;
    for parent in parents {
        let Ok(at) = locked.binary_search_by_key(&parent.id, |task| task.id) else {
            return Err(Error::Guard { expected: ids.len(), changed: locked.len() });
        };
        parent.status = locked[at].status;
    }
    Ok(())
}

/// Marks tasks as parents of tasks in another batch. The transaction must have locked them.
pub(in crate::store) async fn mark_as_parents(tx: &mut Tx, parents: &[Uuid]) -> Result<()> {
    let flags = Flags::HAS_CHILDREN.0 | Flags::IN_OTHER_BATCHES.0;
    sqlx::query!("update task set flags = flags | $2 where id = any($1) and flags & $2 <> $2", parents, flags)
        .execute(tx.conn().await?)
        .await?;
    Ok(())
}
