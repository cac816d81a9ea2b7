//! Turns between fair keys. A task gets its turn once, when it is created: the next turn of its key, or the current
//! turn of the queue if the key has had no task waiting for a while. So keys alternate in the order of the queue, a
//! claim costs nothing more, and a retried task returns to its old position.
//!
//! Until a task uses a key, these tables are neither read nor written and every turn is 0. Turns never keep a task from
//! starting; they only order the queue.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use uuid::Uuid;

use crate::store::tasks::transitions::Claimed;
use crate::store::{Actor, Patience, Result, Session, Store, Tx};

/// Whether fair keys are in use. Once they are, tasks without a key share one more key, the empty one.
#[derive(Clone, Debug, Default)]
pub(in crate::store) struct FairKeysInUse(Arc<AtomicBool>);

impl FairKeysInUse {
    pub(in crate::store) fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(in crate::store) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Returns the turns of new tasks, which are given by priority and key; the key is empty for tasks without one. Turns
/// are taken in a transaction of their own, not in the one that creates the tasks: an unused turn does no harm, and
/// requests with the same key need not wait for each other.
pub async fn turns<'a>(store: &Store, tasks: &[(i16, &'a str)]) -> Result<Vec<i64>> {
    if tasks.iter().any(|(_, key)| !key.is_empty()) {
        store.fair_keys.set();
    } else if !store.fair_keys.get() {
        return Ok(vec![0; tasks.len()]);
    }
    let mut wanted: BTreeMap<(i16, &'a str), i64> = BTreeMap::new();
    for task in tasks {
        *wanted.entry(*task).or_default() += 1;
    }
    let (mut priorities, mut keys, mut counts) = (Vec::new(), Vec::new(), Vec::new());
    for ((priority, key), n) in &wanted {
        priorities.push(*priority);
        keys.push(*key);
        counts.push(*n);
    }
    let first = store.retrying(Patience::Brief, |session| take_turns(session, &priorities, &keys, &counts)).await;
    let first = match first {
        // Another transaction holds the row of a key: its next turn, read without a lock, is good enough.
        Err(error) if error.is_busy() => store.reading(async |tx| peek_turns(tx, &priorities, &keys).await).await?,
        first => first?,
    };
    let mut next: HashMap<(i16, &str), i64> =
        first.iter().map(|(priority, key, turn)| ((*priority, key.as_str()), *turn)).collect();
    let mut turns = Vec::with_capacity(tasks.len());
    for task in tasks {
        let turn = next.entry(*task).or_default();
        turns.push(*turn);
        *turn += 1;
    }
    Ok(turns)
}

/// Takes `counts` turns of each priority and key, and returns the first of each.
async fn take_turns(
    session: Session,
    priorities: &[i16],
    keys: &[&str],
    counts: &[i64],
) -> Result<Vec<(i16, String, i64)>> {
    let mut tx = session.begin_lease(Actor::Api).await?;
    let rows = sqlx::query!(
        r#"insert into fair_turn as f (priority, key, next)
           select u.priority, u.key, coalesce(c.turn, 1) + u.n
           from unnest($1::smallint[], $2::text[], $3::bigint[]) u(priority, key, n)
           left join fair_clock c on c.priority = u.priority
           order by u.priority, u.key
           on conflict (priority, key) do update set next = excluded.next + greatest(
               f.next - coalesce((select turn from fair_clock where priority = excluded.priority), 1), 0)
           returning priority, key, next"#,
        priorities,
        keys as &[&str],
        counts,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    tx.commit().await?;
    let count = |priority: i16, key: &str| {
        let mut wanted = priorities.iter().zip(keys).zip(counts);
        wanted.find(|((p, k), _)| **p == priority && **k == key).map_or(0, |(_, n)| *n)
    };
    Ok(rows.into_iter().map(|row| (row.priority, row.key.clone(), row.next - count(row.priority, &row.key))).collect())
}

/// Returns the next turn of each priority and key without taking it.
async fn peek_turns(tx: &mut Tx, priorities: &[i16], keys: &[&str]) -> Result<Vec<(i16, String, i64)>> {
    let rows = sqlx::query!(
        r#"select u.priority as "priority!", u.key as "key!", greatest(f.next, c.turn, 1) as "next!"
           from unnest($1::smallint[], $2::text[]) u(priority, key)
           left join fair_turn f on f.priority = u.priority and f.key = u.key
           left join fair_clock c on c.priority = u.priority"#,
        priorities,
        keys as &[&str],
    )
    .fetch_all(tx.conn().await?)
    .await?;
    Ok(rows.into_iter().map(|row| (row.priority, row.key, row.next)).collect())
}

/// Records the last claimed turn of each priority as its current turn. A key that is new or idle joins there, and not
/// earlier. Skips rows that another transaction holds.
pub(in crate::store) async fn record_turns(tx: &mut Tx, claimed: &[Claimed]) -> Result<()> {
    let mut last: BTreeMap<i16, i64> = BTreeMap::new();
    for task in claimed.iter().filter(|task| task.turn > 0) {
        let turn = last.entry(task.priority).or_default();
        *turn = task.turn.max(*turn);
    }
    if last.is_empty() {
        return Ok(());
    }
    tx.store.fair_keys.set();
    let (priorities, turns): (Vec<i16>, Vec<i64>) = last.into_iter().unzip();
    sqlx::query!(
        "with new as (
             insert into fair_clock (priority, turn) select * from unnest($1::smallint[], $2::bigint[]) order by 1
             on conflict do nothing
         ), held as materialized (
             select priority from fair_clock where priority = any($1) order by priority for update skip locked
         )
         update fair_clock c set turn = u.turn from unnest($1::smallint[], $2::bigint[]) u(priority, turn)
         join held h on h.priority = u.priority
         where c.priority = u.priority and c.turn < u.turn",
        &priorities,
        &turns,
    )
    .execute(tx.conn().await?)
    .await?;
    Ok(())
}

/// Reads whether fair keys are in use, unless this process knows that they are.
pub(in crate::store) async fn refresh_keys_in_use(tx: &mut Tx) -> Result<()> {
    if !tx.store.fair_keys.get()
        && sqlx::query_scalar!("select key from fair_turn limit 1").fetch_optional(tx.conn().await?).await?.is_some()
    {
        tx.store.fair_keys.set();
    }
    Ok(())
}

/// Gives a task whose priority has changed the current turn of its new priority.
pub(in crate::store) async fn rejoin(tx: &mut Tx, id: Uuid) -> Result<()> {
    if !tx.store.fair_keys.get() {
        return Ok(());
    }
    sqlx::query!(
        "update task t set turn = coalesce((select turn from fair_clock c where c.priority = t.priority), 0) where id = $1",
        id
    )
    .execute(tx.conn().await?)
    .await?;
    Ok(())
}

/// Deletes up to `limit` keys whose next turn has passed, and returns how many. Such a key would join at the current
/// turn anyway.
pub async fn forget_idle(session: &Session, limit: i64) -> Result<u64> {
    let mut tx = session.begin(Actor::Loop("retention")).await?;
    let forgotten = sqlx::query!(
        "delete from fair_turn f where (f.priority, f.key) in (
             select i.priority, i.key from fair_turn i join fair_clock c on c.priority = i.priority
             where i.next <= c.turn limit $1 for update of i skip locked
         ) and f.next <= (select turn from fair_clock c where c.priority = f.priority)",
        limit
    )
    .execute(tx.conn().await?)
    .await?;
    tx.commit().await?;
    Ok(forgotten.rows_affected())
}
