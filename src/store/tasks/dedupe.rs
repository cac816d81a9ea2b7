//! Finds the tasks that new ones would only repeat, in such a way that of any number of requests at the same time the
//! first is seen by the others.

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

/// The first number of all advisory locks that are taken here.
const LOCKS: i32 = 0x6465_6475;
/// What is compared is locked by its hash, modulo this: a request may compare by tens of thousands of keys, and the
/// server's table of locks has room for a few thousand in all. Two keys of one place only wait for each other.
const PLACES: u16 = 1024;
/// From so many looks on it pays to merge the list of what is not in the index yet, which every look reads from end to
/// end: 10,000 looks took 30 s with a full list, 0.4 s with the merging.
const MANY: usize = 50;

/// For each new task the one that is there already, if there is one. Those that new tasks may come to depend on are
/// locked, and told as they are under the lock: they cannot end before the new links are seen.
pub(in crate::store) async fn existing_tasks(tx: &mut Tx, tasks: &[NewTask]) -> Result<Vec<Option<ExistingTask>>> {
    let mut looks = Looks::default();
    let wanted: Vec<Vec<usize>> = tasks.iter().map(|task| looks.of(task)).collect();
    if looks.len() >= MANY {
        merge_index(tx).await?;
    }
    lock_keys(tx, tasks).await?;
    // A statement of its own: its snapshot is taken when the locks are held.
    let found = looks.find(tx).await?;
    let best =
        |numbers: &Vec<usize>| ExistingTask::best(numbers.iter().filter_map(|number| found.get(number).copied()));
    let mut twins: Vec<Option<ExistingTask>> = wanted.iter().map(best).collect();
    lock_parents(tx, tasks, &mut twins).await?;
    Ok(twins)
}

/// Whoever compares by the same values of the same fields waits until this transaction has ended. The task's own kind
/// is locked beside the one that it looks for: two kinds may exclude each other.
async fn lock_keys(tx: &mut Tx, tasks: &[NewTask]) -> Result<()> {
    let mut places = BTreeSet::new();
    for task in tasks {
        for matcher in &task.dedupe_strategy {
            let key = |kind: &str| matcher::key(kind, &matcher.fields, task.metadata.as_ref());
            places.extend([&matcher.kind, &task.kind].into_iter().filter_map(|kind| key(kind)).map(|key| place(&key)));
        }
    }
    // In one order for everybody. The look that follows would be compiled, for what the planner thinks may be found of
    // a large table: 35 ms for a look of 0.5 ms.
    let places: Vec<i32> = places.into_iter().collect();
    sqlx::query!(
        "select pg_advisory_xact_lock($1, place), set_config('jit', 'off', true) from unnest($2::int[]) place",
        LOCKS,
        &places,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    Ok(())
}

fn place(key: &str) -> i32 {
    let hash = Sha256::digest(key);
    i32::from(u16::from_be_bytes([hash[0], hash[1]]) % PLACES)
}

async fn merge_index(tx: &mut Tx) -> Result<()> {
    sqlx::query!(
        "select gin_clean_pending_list(c.oid) from pg_class c
         where c.oid = 'task_spec_metadata_idx'::regclass and pg_has_role(c.relowner, 'usage')"
    )
    .fetch_all(tx.conn().await?)
    .await?;
    Ok(())
}

/// What is looked for, everything once.
#[derive(Default)]
struct Looks<'a> {
    numbers: HashMap<(String, Option<Status>), usize>,
    kinds: Vec<&'a str>,
    statuses: Vec<Option<&'static str>>,
    values: Vec<Value>,
}

impl<'a> Looks<'a> {
    fn len(&self) -> usize {
        self.kinds.len()
    }

    /// The numbers of the looks for this task.
    fn of(&mut self, task: &'a NewTask) -> Vec<usize> {
        let metadata = task.metadata.as_ref();
        let look = |matcher: &'a matcher::DedupeMatcher| {
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
        task.dedupe_strategy.iter().filter_map(look).collect()
    }

    /// For each number the newest task that was found.
    async fn find(&self, tx: &mut Tx) -> Result<HashMap<usize, ExistingTask>> {
        // Containment is what the index knows; whether the values are equal is looked at after that. `offset 0` keeps
        // the planner from going through all tasks of the kind, or through all tasks, hoping to meet one soon.
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
        let twin = |number: i64, id: Uuid, status: &str| {
            // PostgreSQL counts from 1.
            let number = usize::try_from(number - 1).map_err(Error::corrupt)?;
            Ok((number, ExistingTask { id, status: read_status(status)? }))
        };
        rows.into_iter().map(|row| twin(row.number, row.id, &row.status)).collect()
    }
}

/// Locks what new tasks may come to depend on. It stays the twin whatever has become of it since it was found, unless
/// it was deleted: then all is done again.
async fn lock_parents(tx: &mut Tx, tasks: &[NewTask], twins: &mut [Option<ExistingTask>]) -> Result<()> {
    let parents: Vec<&mut ExistingTask> =
        tasks.iter().zip(twins).filter(|(task, _)| task.has_children).filter_map(|(_, twin)| twin.as_mut()).collect();
    if parents.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = parents.iter().map(|twin| twin.id).collect();
    let locked = lock::by_ids(tx, &ids).await?.tasks;
    for twin in parents {
        let Ok(at) = locked.binary_search_by_key(&twin.id, |task| task.id) else {
            return Err(Error::Guard { expected: ids.len(), changed: locked.len() });
        };
        twin.status = locked[at].status;
    }
    Ok(())
}

/// Tasks of another batch come to depend on these, which are locked.
pub(in crate::store) async fn adopt(tx: &mut Tx, parents: &[Uuid]) -> Result<()> {
    let flags = Flags::HAS_CHILDREN.0 | Flags::IN_OTHER_BATCHES.0;
    sqlx::query!("update task set flags = flags | $2 where id = any($1) and flags & $2 <> $2", parents, flags)
        .execute(tx.conn().await?)
        .await?;
    Ok(())
}
