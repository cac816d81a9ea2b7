//! What executes, counted for the rules: matchers, slots, and the parkings of blocked tasks. A slot changes only under
//! its row's lock, in the transaction that moves the tasks; slots are locked in the order of their ids, after tasks and
//! before everything else, parkings after slots.
//!
//! Claims hold [`GATE`] shared: a matcher that is new counts what executes under the exclusive lock, so no claim can
//! slip in between the count and its being known. Ends of executions need no such care. They release what their row
//! says, and counting a new matcher locks those rows.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, RwLock};

use serde_json::Value;
use uuid::Uuid;

use super::{Actor, Error, Result, Store, Tx};
use crate::domain::rules::{Bearer, Gate, Matcher, Rule, RulesChange, Slot, key_of};
use crate::wake::Hints;

/// The advisory lock between claims and new matchers. Claims take it as they begin.
pub(super) const GATE: i64 = 0x7265_7072_6973_6501;

/// Parkings looked at by one claim at most.
const MOST_STIRRED: i64 = 500;

/// The matchers that this instance knows. They only ever become more, so what it knows is right, if not all.
#[derive(Clone, Debug, Default)]
pub(super) struct Cache(Arc<RwLock<Arc<Matchers>>>);

#[derive(Clone, Debug, Default)]
pub struct Matchers {
    last: i32,
    ids: HashMap<(String, Vec<String>), i32>,
    by_kind: HashMap<String, Vec<(i32, Vec<String>)>>,
}

/// A slot by what it counts, whether it has a row already or not.
pub(super) type Key = (i32, String);

impl Matchers {
    pub fn is_empty(&self) -> bool {
        self.last == 0
    }

    pub fn kinds(&self) -> Vec<&str> {
        self.by_kind.keys().map(String::as_str).collect()
    }

    fn knows(&self, matcher: &Matcher) -> bool {
        self.id(matcher).is_some()
    }

    fn id(&self, matcher: &Matcher) -> Option<i32> {
        self.ids.get(&(matcher.kind.clone(), matcher.fields.clone())).copied()
    }

    /// What a task of this kind occupies while it executes.
    pub(super) fn occupied(&self, kind: &str, metadata: Option<&Value>) -> Vec<Key> {
        let matchers = self.by_kind.get(kind).into_iter().flatten();
        matchers.filter_map(|(id, fields)| Some((*id, key_of(fields, metadata)?))).collect()
    }

    /// The slot that a rule looks at. Fields are never taken away from metadata, so they are there.
    pub(super) fn judged(&self, rule: &Rule, metadata: Option<&Value>) -> Option<Key> {
        Some((self.id(rule.matcher())?, key_of(&rule.matcher().fields, metadata)?))
    }

    fn add(&mut self, id: i32, kind: String, fields: Vec<String>) {
        self.last = self.last.max(id);
        self.by_kind.entry(kind.clone()).or_default().push((id, fields.clone()));
        self.ids.insert((kind, fields), id);
    }
}

impl Cache {
    fn get(&self) -> Arc<Matchers> {
        Arc::clone(&self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    fn put(&self, matchers: Arc<Matchers>) {
        let mut known = self.0.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        if known.last < matchers.last {
            *known = matchers;
        }
    }
}

/// All matchers there are, for a transaction that holds [`GATE`].
pub(super) async fn matchers(tx: &mut Tx) -> Result<Arc<Matchers>> {
    let known = tx.store.matchers.get();
    let new = sqlx::query!("select id, kind, fields from matcher where id > $1 order by id", known.last)
        .fetch_all(tx.conn())
        .await?;
    if new.is_empty() {
        return Ok(known);
    }
    let mut all = (*known).clone();
    for row in new {
        all.add(row.id, row.kind, row.fields);
    }
    let all = Arc::new(all);
    tx.store.matchers.put(Arc::clone(&all));
    Ok(all)
}

/// Makes the matchers of these rules known, before any task carries them. New ones count what executes already.
pub async fn register<'a>(store: &Store, rules: impl IntoIterator<Item = &'a Rule>) -> Result<()> {
    let known = store.matchers.get();
    let new: BTreeSet<&Matcher> = rules.into_iter().map(Rule::matcher).filter(|m| !known.knows(m)).collect();
    if new.is_empty() {
        return Ok(());
    }
    super::retrying(|| register_once(store, &new)).await
}

async fn register_once(store: &Store, wanted: &BTreeSet<&Matcher>) -> Result<()> {
    let mut tx = store.begin(Actor::Api).await?;
    sqlx::query!("select pg_advisory_xact_lock($1)", GATE).execute(tx.conn()).await?;
    let known = matchers(&mut tx).await?;
    let new: Vec<&Matcher> = wanted.iter().copied().filter(|m| !known.knows(m)).collect();
    for matcher in new {
        let id = sqlx::query_scalar!(
            "insert into matcher (kind, fields) values ($1, $2) returning id",
            matcher.kind,
            &matcher.fields
        )
        .fetch_one(tx.conn())
        .await?;
        count_executing(&mut tx, id, matcher).await?;
    }
    // They become known here with everybody else's next look: only what is committed may be.
    tx.commit().await
}

async fn count_executing(tx: &mut Tx, id: i32, matcher: &Matcher) -> Result<()> {
    let rows = sqlx::query!(
        r#"select t.id, s.metadata,
               greatest(0, coalesce(t.expected_count - t.success - t.failures, 0)) as "remaining!"
           from task t join task_spec s on s.id = t.id
           where t.status in ('claimed', 'running') and s.kind = $1 order by t.id for update of t"#,
        matcher.kind
    )
    .fetch_all(tx.conn())
    .await?;
    let keys: Vec<Option<Key>> =
        rows.iter().map(|row| key_of(&matcher.fields, row.metadata.as_ref()).map(|key| (id, key))).collect();
    let slots = lock(tx, keys.iter().flatten().cloned().collect(), &BTreeSet::new()).await?;
    let (mut tasks, mut occupied) = (Vec::new(), Vec::new());
    for (row, key) in rows.iter().zip(keys) {
        let Some(slot) = key.and_then(|key| slots.id(&key)) else { continue };
        tx.slot(slot, 1, row.remaining);
        tasks.push(row.id);
        occupied.push(slot);
    }
    sqlx::query!(
        "update task t set slots = coalesce(t.slots, '{}') || u.slot
         from unnest($1::uuid[], $2::bigint[]) u(id, slot) where t.id = u.id",
        &tasks,
        &occupied,
    )
    .execute(tx.conn())
    .await?;
    Ok(())
}

/// Up to ten alive tasks of the batch that cannot carry the rules, and why.
pub async fn cannot_carry(store: &Store, batch_id: Uuid, change: &RulesChange) -> Result<Vec<(Uuid, String)>> {
    let fields: BTreeSet<&str> =
        change.rules.iter().flat_map(|rule| &rule.matcher().fields).map(String::as_str).collect();
    let rows = sqlx::query!(
        "select s.id, s.metadata, t.expected_count from task_spec s join task t on t.id = s.id
         where s.batch_id = $1 and s.kind = $2 and t.ended_at is null
           and (not coalesce(s.metadata, '{}') ?& $3 or $4 and t.expected_count is null)
         order by s.id limit 10",
        batch_id,
        change.kind,
        &fields.into_iter().collect::<Vec<_>>() as &[&str],
        change.rules.iter().any(|rule| matches!(rule, Rule::Capacity { .. })),
    )
    .fetch_all(&store.pool)
    .await?;
    let mut problems = Vec::new();
    for row in rows {
        let bearer = Bearer { metadata: row.metadata.as_ref(), has_expected_count: row.expected_count.is_some() };
        problems.extend(change.rules.iter().find_map(|rule| bearer.problem(rule)).map(|problem| (row.id, problem)));
    }
    Ok(problems)
}

/// Gives the rules to up to `limit` alive tasks of the batch after `after`, and puts those that were parked back into
/// the queue; answers which tasks it were.
pub async fn change_rules(
    tx: &mut Tx,
    batch_id: Uuid,
    change: &RulesChange,
    after: Option<Uuid>,
    limit: i64,
) -> Result<Vec<Uuid>> {
    let rules = match change.rules.as_slice() {
        [] => None,
        rules => Some(serde_json::to_string(rules).map_err(Error::corrupt)?),
    };
    let ids = sqlx::query_scalar!(
        "with chosen as materialized (
             select t.id from task_spec s join task t on t.id = s.id
             where s.batch_id = $1 and s.kind = $2 and ($3::uuid is null or s.id > $3) and t.ended_at is null
             order by t.id limit $4 for update of t
         ), given as (
             update task_spec s set rules = $5 from chosen c where s.id = c.id
         ), back as (
             update task t set parked_on = null from chosen c where t.id = c.id and t.parked_on is not null
         )
         select id from chosen order by id",
        batch_id,
        change.kind,
        after,
        limit,
        rules,
    )
    .fetch_all(tx.conn())
    .await?;
    tx.hint(Hints::START);
    Ok(ids)
}

/// Slots under lock.
#[derive(Debug, Default)]
pub(super) struct Locked {
    ids: HashMap<Key, i64>,
    pub(super) slots: BTreeMap<i64, Slot>,
}

impl Locked {
    pub(super) fn id(&self, key: &Key) -> Option<i64> {
        self.ids.get(key).copied()
    }
}

/// Locks slots by what they count, making those that are not there yet, and by id.
pub(super) async fn lock(tx: &mut Tx, keys: BTreeSet<Key>, ids: &BTreeSet<i64>) -> Result<Locked> {
    let mut locked = Locked::default();
    if keys.is_empty() && ids.is_empty() {
        return Ok(locked);
    }
    let (matchers, values): (Vec<i32>, Vec<String>) = keys.into_iter().unzip();
    let ids: Vec<i64> = ids.iter().copied().collect();
    let rows = sqlx::query!(
        "select s.id, s.matcher_id, s.key, s.used, s.load from slot s
         where s.id = any($3) or s.id in (
             select k.id from unnest($1::int[], $2::text[]) u(matcher_id, key)
             join slot k on k.matcher_id = u.matcher_id and k.key = u.key
         )
         order by s.id for update of s",
        &matchers,
        &values,
        &ids,
    )
    .fetch_all(tx.conn())
    .await?;
    for row in rows {
        locked.slots.insert(row.id, Slot { used: i64::from(row.used), load: row.load });
        locked.ids.insert((row.matcher_id, row.key), row.id);
    }
    let missing: BTreeSet<Key> = matchers.into_iter().zip(values).filter(|key| locked.id(key).is_none()).collect();
    if missing.is_empty() {
        return Ok(locked);
    }
    let (matchers, values): (Vec<i32>, Vec<String>) = missing.into_iter().unzip();
    // One that somebody else has just made is changed, not skipped: that locks it.
    let rows = sqlx::query!(
        "insert into slot as s (matcher_id, key) select * from unnest($1::int[], $2::text[])
         on conflict (matcher_id, key) do update set used = s.used
         returning id, matcher_id, key, used, load",
        &matchers,
        &values,
    )
    .fetch_all(tx.conn())
    .await?;
    for row in rows {
        locked.slots.insert(row.id, Slot { used: i64::from(row.used), load: row.load });
        locked.ids.insert((row.matcher_id, row.key), row.id);
    }
    Ok(locked)
}

/// Parkings whose gates may have opened, with those gates. Not locked: whoever changes one locks its slots first.
pub(super) async fn stirred(tx: &mut Tx) -> Result<BTreeMap<i64, Vec<Gate>>> {
    let rows = sqlx::query!(
        "select p.id, g.slot_id, g.max_tasks, g.max_load
         from (select id from parking where state = 2 order by id limit $1) p join gate g on g.parking_id = p.id",
        MOST_STIRRED
    )
    .fetch_all(tx.conn())
    .await?;
    let mut parkings: BTreeMap<i64, Vec<Gate>> = BTreeMap::new();
    for row in rows {
        let gate = Gate { slot: row.slot_id, max_tasks: row.max_tasks, max_load: row.max_load };
        parkings.entry(row.id).or_default().push(gate);
    }
    Ok(parkings)
}

/// Blocked tasks go to the parking of their gates. The slots of those gates are locked by this transaction.
pub(super) async fn park(tx: &mut Tx, blocked: &[(Uuid, &[Gate])]) -> Result<()> {
    if blocked.is_empty() {
        return Ok(());
    }
    let places: BTreeMap<String, &[Gate]> = blocked.iter().map(|(_, gates)| (in_writing(gates), *gates)).collect();
    let keys: Vec<&str> = places.keys().map(String::as_str).collect();
    let rows = sqlx::query!(
        r#"insert into parking as p (key, state) select key, 1 from unnest($1::text[]) key order by key
           on conflict (key) do update set state = greatest(p.state, 1)
           returning id, key, xmax = 0 as "new!""#,
        &keys as &[&str],
    )
    .fetch_all(tx.conn())
    .await?;
    let ids: HashMap<&str, i64> = rows.iter().map(|row| (row.key.as_str(), row.id)).collect();
    let gates = || {
        let new = rows.iter().filter(|row| row.new);
        new.flat_map(|row| places.get(&row.key).into_iter().flat_map(|gates| gates.iter()).map(|gate| (row.id, *gate)))
    };
    if gates().next().is_some() {
        sqlx::query!(
            "insert into gate (parking_id, slot_id, max_tasks, max_load)
             select * from unnest($1::bigint[], $2::bigint[], $3::int[], $4::bigint[])",
            &gates().map(|(parking, _)| parking).collect::<Vec<_>>(),
            &gates().map(|(_, gate)| gate.slot).collect::<Vec<_>>(),
            &gates().map(|(_, gate)| gate.max_tasks).collect::<Vec<_>>() as &[Option<i32>],
            &gates().map(|(_, gate)| gate.max_load).collect::<Vec<_>>() as &[Option<i64>],
        )
        .execute(tx.conn())
        .await?;
    }
    let (tasks, parkings): (Vec<Uuid>, Vec<i64>) =
        blocked.iter().filter_map(|(task, gates)| Some((*task, *ids.get(in_writing(gates).as_str())?))).unzip();
    sqlx::query!(
        "update task t set parked_on = u.parking from unnest($1::uuid[], $2::bigint[]) u(id, parking)
         where t.id = u.id and t.parked_on is distinct from u.parking",
        &tasks,
        &parkings,
    )
    .execute(tx.conn())
    .await?;
    Ok(())
}

fn in_writing(gates: &[Gate]) -> String {
    let limit = |max: Option<i64>| max.map_or(String::new(), |max| max.to_string());
    let one = |gate: &Gate| format!("{}:{}:{}", gate.slot, limit(gate.max_tasks.map(i64::from)), limit(gate.max_load));
    gates.iter().map(one).collect::<Vec<_>>().join(" ")
}

/// What was found at the parkings: `blocked` wait for the next change of their slots; of the others, those that are
/// empty now are marked so. Answers whether there is more to be had at once.
pub(super) async fn looked_at(tx: &mut Tx, blocked: &[i64], open: &[i64]) -> Result<bool> {
    let still = sqlx::query_scalar!(
        r#"with locked as materialized (
               select id from parking where id = any($1) or id = any($2) order by id for update
           )
           update parking p set state = case
               when p.id = any($1) then 1
               when exists (select from task t where t.parked_on = p.id and t.status = 'pending') then 2
               else 0 end
           from locked l where l.id = p.id returning p.state"#,
        blocked,
        open,
    )
    .fetch_all(tx.conn())
    .await?;
    Ok(still.contains(&2))
}

/// What a transaction has taken and released, slot by slot.
pub(super) type Deltas = BTreeMap<i64, (i32, i64)>;

/// Writes them, and stirs the parkings whose gates that has opened; answers whether there were any.
pub(super) async fn settle(tx: &mut Tx, deltas: &Deltas) -> Result<bool> {
    if deltas.is_empty() {
        return Ok(false);
    }
    let ids: Vec<i64> = deltas.keys().copied().collect();
    let used: Vec<i32> = deltas.values().map(|(used, _)| *used).collect();
    let load: Vec<i64> = deltas.values().map(|(_, load)| *load).collect();
    sqlx::query!(
        "with locked as materialized (select id from slot where id = any($1) order by id for update)
         update slot s set used = s.used + u.used, load = s.load + u.load
         from unnest($1::bigint[], $2::int[], $3::bigint[]) u(id, used, load)
         where s.id = u.id and (select count(*) from locked) >= 0",
        &ids,
        &used,
        &load,
    )
    .execute(tx.conn())
    .await?;
    let freed: Vec<i64> = deltas.iter().filter(|(_, (used, load))| *used < 0 || *load < 0).map(|(id, _)| *id).collect();
    if freed.is_empty() {
        return Ok(false);
    }
    // A statement of its own, after the locks: it has to see what was parked until now.
    let stirred = sqlx::query!(
        "with locked as materialized (
             select p.id from parking p where p.state = 1 and p.id in (
                 select g.parking_id from gate g join slot s on s.id = g.slot_id
                 where g.slot_id = any($1) and (g.max_tasks is null or s.used < g.max_tasks)
                   and (g.max_load is null or s.load < g.max_load)
             ) order by p.id for update
         )
         update parking p set state = 2 from locked l where p.id = l.id",
        &freed,
    )
    .execute(tx.conn())
    .await?;
    Ok(stirred.rows_affected() > 0)
}

/// Forgets parkings where nobody waits any more, and slots that nobody occupies or waits for. Answers how many.
pub async fn forget_idle(store: &Store, limit: i64) -> Result<u64> {
    let mut tx = store.begin(Actor::Loop("retention")).await?;
    let empty = sqlx::query_scalar!(
        "select id from parking p where not exists (select from task t where t.parked_on = p.id and t.status = 'pending')
         order by id limit $1 for update skip locked",
        limit
    )
    .fetch_all(tx.conn())
    .await?;
    // Looked at again under the lock: whoever parks a task changes the row of its parking first.
    let parkings = sqlx::query!(
        "delete from parking p where id = any($1)
           and not exists (select from task t where t.parked_on = p.id and t.status = 'pending')",
        &empty
    )
    .execute(tx.conn())
    .await?;
    let unused = sqlx::query_scalar!(
        "select id from slot where used = 0 and load = 0 and not exists (select from gate g where g.slot_id = slot.id)
         order by id limit $1 for update skip locked",
        limit
    )
    .fetch_all(tx.conn())
    .await?;
    // The same for slots: whoever needs one locks it, or makes it again.
    let slots = sqlx::query!(
        "delete from slot s where id = any($1) and used = 0 and load = 0
           and not exists (select from gate g where g.slot_id = s.id)",
        &unused
    )
    .execute(tx.conn())
    .await?;
    tx.commit().await?;
    Ok(parkings.rows_affected() + slots.rows_affected())
}
