//! Turns between keys. A task's turn is given once, when it is created: its key's next one, or the turn that is being
//! taken now if the key has had nothing waiting for a while. So keys alternate in the order of the queue, a claim costs
//! nothing more than before, and a retried task finds its old place.
//!
//! As long as nobody has used a key, nothing of this is read or written and every turn is 0.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use uuid::Uuid;

use super::transitions::Claimed;
use super::{Result, Store, Tx};

/// Whether keys are in use at all: once they are, tasks without one take turns with them, as one more key.
#[derive(Clone, Debug, Default)]
pub(super) struct InUse(Arc<AtomicBool>);

impl InUse {
    pub(super) fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The turns of new tasks, given by priority and key, which is empty for tasks without one. Taken in a statement of its
/// own, not in the transaction that creates them: a turn that nobody uses does no harm, and requests with one key need
/// not wait for each other.
pub async fn turns<'a>(store: &Store, tasks: &[(i16, &'a str)]) -> Result<Vec<i64>> {
    if tasks.iter().any(|(_, key)| !key.is_empty()) {
        store.fair.set();
    } else if !store.fair.get() {
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
    let rows = sqlx::query!(
        r#"insert into fair_turn as f (priority, key, next)
           select u.priority, u.key, coalesce(c.turn, 1) + u.n
           from unnest($1::smallint[], $2::text[], $3::bigint[]) u(priority, key, n)
           cross join (select set_config('synchronous_commit', 'off', true) as relaxed) s
           left join fair_clock c on c.priority = u.priority
           where s.relaxed is not null
           order by u.priority, u.key
           on conflict (priority, key) do update set next = excluded.next + greatest(
               f.next - coalesce((select turn from fair_clock where priority = excluded.priority), 1), 0)
           returning priority, key, next"#,
        &priorities,
        &keys as &[&str],
        &counts,
    )
    .fetch_all(&store.pool)
    .await?;
    let mut next: HashMap<(i16, &str), i64> = HashMap::new();
    for row in &rows {
        let n = wanted.get(&(row.priority, row.key.as_str())).copied().unwrap_or(0);
        next.insert((row.priority, row.key.as_str()), row.next - n);
    }
    let mut turns = Vec::with_capacity(tasks.len());
    for task in tasks {
        let turn = next.entry(*task).or_default();
        turns.push(*turn);
        *turn += 1;
    }
    Ok(turns)
}

/// Notes whose turn it was. Keys that come now come no earlier.
pub(super) async fn taken(tx: &mut Tx, claimed: &[Claimed]) -> Result<()> {
    let mut last: BTreeMap<i16, i64> = BTreeMap::new();
    for task in claimed.iter().filter(|task| task.turn > 0) {
        let turn = last.entry(task.priority).or_default();
        *turn = task.turn.max(*turn);
    }
    if last.is_empty() {
        return Ok(());
    }
    tx.store.fair.set();
    let (priorities, turns): (Vec<i16>, Vec<i64>) = last.into_iter().unzip();
    sqlx::query!(
        "insert into fair_clock as c (priority, turn) select * from unnest($1::smallint[], $2::bigint[]) order by 1
         on conflict (priority) do update set turn = excluded.turn where c.turn < excluded.turn",
        &priorities,
        &turns,
    )
    .execute(tx.conn())
    .await?;
    Ok(())
}

/// Reads whether keys are in use; once they are, they stay so for this process.
pub async fn look(store: &Store) -> Result<()> {
    if !store.fair.get()
        && sqlx::query_scalar!("select key from fair_turn limit 1").fetch_optional(&store.pool).await?.is_some()
    {
        store.fair.set();
    }
    Ok(())
}

/// Moves a task whose priority has changed to where that priority stands now.
pub(super) async fn rejoin(tx: &mut Tx, id: Uuid) -> Result<()> {
    if !tx.store.fair.get() {
        return Ok(());
    }
    sqlx::query!(
        "update task t set turn = coalesce((select turn from fair_clock c where c.priority = t.priority), 0) where id = $1",
        id
    )
    .execute(tx.conn())
    .await?;
    Ok(())
}

/// Forgets keys whose next turn is past anyway.
pub async fn forget_idle(store: &Store, limit: i64) -> Result<u64> {
    let forgotten = sqlx::query!(
        "delete from fair_turn f where (f.priority, f.key) in (
             select i.priority, i.key from fair_turn i join fair_clock c on c.priority = i.priority
             where i.next <= c.turn limit $1 for update of i skip locked
         ) and f.next <= (select turn from fair_clock c where c.priority = f.priority)",
        limit
    )
    .execute(&store.pool)
    .await?;
    Ok(forgotten.rows_affected())
}
