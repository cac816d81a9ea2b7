//! Slots, which count executing tasks for the rules, and blocked groups: tasks that wait for the same limits. The table
//! `parking` holds the blocked groups, `gate` the slot limits of each group, and `task.parked_on` names the group of a
//! blocked task.
//!
//! The state of a group is 0 when it is empty, 1 when its limits block it, and 2 when the next claim must recheck it.
//!
//! A slot changes only under its row's lock, in the transaction that moves the tasks. Slots are locked in the order of
//! their ids, after tasks and before everything else; groups are locked after slots.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use uuid::Uuid;

use super::MatcherKey;
use crate::domain::request::new_rule::RulesChange;
use crate::domain::rules::{Rule, RuleTarget, Slot, SlotLimit};
use crate::domain::task::Flags;
use crate::store::{Actor, Error, Result, Session, Store, Tx};
use crate::wake::Hints;

/// The most blocked groups that one claim rechecks.
const RECHECK_LIMIT: i64 = 500;

/// Returns up to ten alive tasks of the batch that cannot have the rules, and why.
pub async fn cannot_carry(store: &Store, batch_id: Uuid, change: &RulesChange) -> Result<Vec<(Uuid, String)>> {
    let fields: BTreeSet<&str> =
        change.rules.iter().flat_map(|rule| &rule.matcher().fields).map(String::as_str).collect();
    let fields: Vec<&str> = fields.into_iter().collect();
    let looking = sqlx::query!(
        "select s.id, s.metadata, t.expected_count from task_spec s join task t on t.id = s.id
         where s.batch_id = $1 and s.kind = $2 and t.ended_at is null
           and (not coalesce(s.metadata, '{}') ?& $3 or $4 and t.expected_count is null)
         order by s.id limit 10",
        batch_id,
        change.kind,
        &fields as &[&str],
        change.rules.iter().any(|rule| matches!(rule, Rule::Capacity { .. })),
    );
    let rows = store.reading(async |tx| Ok(looking.fetch_all(tx.conn().await?).await?)).await?;
    let mut problems = Vec::new();
    for row in rows {
        let target = RuleTarget { metadata: row.metadata.as_ref(), has_expected_count: row.expected_count.is_some() };
        problems.extend(change.rules.iter().find_map(|rule| target.problem(rule)).map(|problem| (row.id, problem)));
    }
    Ok(problems)
}

/// Sets the rules of up to `limit` alive tasks of the batch after `after`, and returns blocked ones among them to the
/// queue. Returns the ids of the tasks.
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
             update task t set parked_on = null,
                 flags = case when $5::text is null then t.flags & ~$6::smallint else t.flags | $6::smallint end
             from chosen c where t.id = c.id
         )
         select id from chosen order by id",
        batch_id,
        change.kind,
        after,
        limit,
        rules,
        Flags::HAS_RULES.0,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    tx.hint(Hints::START);
    Ok(ids)
}

/// Slots that the transaction has locked.
#[derive(Debug, Default)]
pub(in crate::store) struct LockedSlots {
    ids: HashMap<MatcherKey, i64>,
    pub(in crate::store) slots: BTreeMap<i64, Slot>,
    /// Slots that another transaction holds, left out without waiting.
    busy: BTreeSet<i64>,
}

impl LockedSlots {
    pub(in crate::store) fn id(&self, key: &MatcherKey) -> Option<i64> {
        self.ids.get(key).copied()
    }

    pub(in crate::store) fn is_busy(&self, slot: i64) -> bool {
        self.busy.contains(&slot)
    }
}

/// Locks slots by what they count, creating missing ones, and by id. A transaction that defers leaves out the slots
/// that another transaction holds.
pub(in crate::store) async fn lock(
    tx: &mut Tx,
    keys: BTreeSet<MatcherKey>,
    ids: &BTreeSet<i64>,
) -> Result<LockedSlots> {
    let mut locked = LockedSlots::default();
    if keys.is_empty() && ids.is_empty() {
        return Ok(locked);
    }
    let (mut matchers, mut values): (Vec<i32>, Vec<String>) = keys.into_iter().unzip();
    let mut ids: Vec<i64> = ids.iter().copied().collect();
    if tx.defers() {
        let busy = busy(tx, &matchers, &values, &ids).await?;
        ids.retain(|id| !busy.iter().any(|(slot, _)| slot == id));
        let keys = matchers.into_iter().zip(values).filter(|key| !busy.iter().any(|(_, busy)| busy == key));
        (matchers, values) = keys.unzip();
        locked.busy = busy.into_iter().map(|(id, _)| id).collect();
    }
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
    .fetch_all(tx.conn().await?)
    .await?;
    for row in rows {
        locked.slots.insert(row.id, Slot { used: i64::from(row.used), load: row.load });
        locked.ids.insert((row.matcher_id, row.key), row.id);
    }
    let missing: BTreeSet<MatcherKey> =
        matchers.into_iter().zip(values).filter(|key| locked.id(key).is_none()).collect();
    if missing.is_empty() {
        return Ok(locked);
    }
    let (matchers, values): (Vec<i32>, Vec<String>) = missing.into_iter().unzip();
    // A slot that another transaction has just created is updated, not skipped: the update locks it.
    let rows = sqlx::query!(
        "insert into slot as s (matcher_id, key) select * from unnest($1::int[], $2::text[])
         on conflict (matcher_id, key) do update set used = s.used
         returning id, matcher_id, key, used, load",
        &matchers,
        &values,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    for row in rows {
        locked.slots.insert(row.id, Slot { used: i64::from(row.used), load: row.load });
        locked.ids.insert((row.matcher_id, row.key), row.id);
    }
    Ok(locked)
}

/// Returns the slots that another transaction holds, and locks the others.
async fn busy(tx: &mut Tx, matchers: &[i32], values: &[String], ids: &[i64]) -> Result<Vec<(i64, MatcherKey)>> {
    let rows = sqlx::query!(
        "with wanted as materialized (
             select s.id from slot s where s.id = any($3) or s.id in (
                 select k.id from unnest($1::int[], $2::text[]) u(matcher_id, key)
                 join slot k on k.matcher_id = u.matcher_id and k.key = u.key
             )
         ), free as materialized (
             select id from slot where id in (select id from wanted) order by id for update skip locked
         )
         select s.id, s.matcher_id, s.key from slot s
         where s.id in (select id from wanted) and s.id not in (select id from free)",
        matchers,
        values,
        ids,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    Ok(rows.into_iter().map(|row| (row.id, (row.matcher_id, row.key))).collect())
}

/// Returns the blocked groups whose limits may have opened, with those limits. The groups are not locked: a transaction
/// that changes a group locks its slots first.
pub(in crate::store) async fn to_recheck(tx: &mut Tx) -> Result<BTreeMap<i64, Vec<SlotLimit>>> {
    let rows = sqlx::query!(
        "select p.id, g.slot_id, g.max_tasks, g.max_load
         from (select id from parking where state = 2 order by id limit $1) p join gate g on g.parking_id = p.id",
        RECHECK_LIMIT
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let mut groups: BTreeMap<i64, Vec<SlotLimit>> = BTreeMap::new();
    for row in rows {
        let limit = SlotLimit { slot: row.slot_id, max_tasks: row.max_tasks, max_load: row.max_load };
        groups.entry(row.id).or_default().push(limit);
    }
    Ok(groups)
}

/// Adds blocked tasks to the groups of their limits. The transaction must have locked the slots of those limits.
pub(in crate::store) async fn block(tx: &mut Tx, blocked: &[(Uuid, &[SlotLimit])]) -> Result<()> {
    if blocked.is_empty() {
        return Ok(());
    }
    let mut groups: BTreeMap<String, &[SlotLimit]> =
        blocked.iter().map(|(_, limits)| (group_key(limits), *limits)).collect();
    if tx.defers() {
        // Tasks whose group another transaction holds stay in the queue, and the next claim judges them again.
        let busy = sqlx::query_scalar!(
            "with free as materialized (select id from parking where key = any($1) order by id for update skip locked)
             select key from parking where key = any($1) and id not in (select id from free)",
            &groups.keys().map(String::as_str).collect::<Vec<_>>() as &[&str],
        )
        .fetch_all(tx.conn().await?)
        .await?;
        groups.retain(|key, _| !busy.contains(key));
    }
    let keys: Vec<&str> = groups.keys().map(String::as_str).collect();
    let rows = sqlx::query!(
        r#"insert into parking as p (key, state) select key, 1 from unnest($1::text[]) key order by key
           on conflict (key) do update set state = greatest(p.state, 1)
           returning id, key, xmax = 0 as "new!""#,
        &keys as &[&str],
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let ids: HashMap<&str, i64> = rows.iter().map(|row| (row.key.as_str(), row.id)).collect();
    let limits = || {
        let new = rows.iter().filter(|row| row.new);
        new.flat_map(|row| {
            groups.get(&row.key).into_iter().flat_map(|limits| limits.iter()).map(|limit| (row.id, *limit))
        })
    };
    if limits().next().is_some() {
        sqlx::query!(
            "insert into gate (parking_id, slot_id, max_tasks, max_load)
             select * from unnest($1::bigint[], $2::bigint[], $3::int[], $4::bigint[])",
            &limits().map(|(group, _)| group).collect::<Vec<_>>(),
            &limits().map(|(_, limit)| limit.slot).collect::<Vec<_>>(),
            &limits().map(|(_, limit)| limit.max_tasks).collect::<Vec<_>>() as &[Option<i32>],
            &limits().map(|(_, limit)| limit.max_load).collect::<Vec<_>>() as &[Option<i64>],
        )
        .execute(tx.conn().await?)
        .await?;
    }
    let (tasks, group_ids): (Vec<Uuid>, Vec<i64>) =
        blocked.iter().filter_map(|(task, limits)| Some((*task, *ids.get(group_key(limits).as_str())?))).unzip();
    sqlx::query!(
        "update task t set parked_on = u.parking from unnest($1::uuid[], $2::bigint[]) u(id, parking)
         where t.id = u.id and t.parked_on is distinct from u.parking",
        &tasks,
        &group_ids,
    )
    .execute(tx.conn().await?)
    .await?;
    Ok(())
}

/// Returns the text by which a group is found: its limits.
fn group_key(limits: &[SlotLimit]) -> String {
    let text = |max: Option<i64>| max.map_or(String::new(), |max| max.to_string());
    let one =
        |limit: &SlotLimit| format!("{}:{}:{}", limit.slot, text(limit.max_tasks.map(i64::from)), text(limit.max_load));
    limits.iter().map(one).collect::<Vec<_>>().join(" ")
}

/// Records the result of a recheck. The `blocked` groups wait for the next change of their slots; the `open` ones are
/// marked as empty if they are. Returns whether an open group still has tasks. Skips groups that another transaction
/// holds.
pub(in crate::store) async fn finish_recheck(tx: &mut Tx, blocked: &[i64], open: &[i64]) -> Result<bool> {
    let still = sqlx::query_scalar!(
        r#"with locked as materialized (
               select id from parking where id = any($1) or id = any($2) order by id
               for update skip locked
           )
           update parking p set state = case
               when p.id = any($1) then 1
               when exists (select from task t where t.parked_on = p.id and t.status = 'pending') then 2
               else 0 end
           from locked l where l.id = p.id returning p.state"#,
        blocked,
        open,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    Ok(still.contains(&2))
}

/// Changes of slots by slot id: the number of tasks, and the work that they have left.
pub(in crate::store) type SlotDeltas = BTreeMap<i64, (i32, i64)>;

/// Writes the changes of slots, and marks the groups whose limits have opened for a recheck. Returns whether there are
/// any.
pub(in crate::store) async fn settle(tx: &mut Tx, deltas: &SlotDeltas) -> Result<bool> {
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
    .execute(tx.conn().await?)
    .await?;
    let freed: Vec<i64> = deltas.iter().filter(|(_, (used, load))| *used < 0 || *load < 0).map(|(id, _)| *id).collect();
    if freed.is_empty() {
        return Ok(false);
    }
    // A statement of its own, after the locks: its snapshot must include the tasks blocked until now.
    let recheck = sqlx::query!(
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
    .execute(tx.conn().await?)
    .await?;
    Ok(recheck.rows_affected() > 0)
}

/// Deletes up to `limit` empty groups, and up to `limit` slots that no task occupies or waits for. Returns how many.
pub async fn forget_idle(session: &Session, limit: i64) -> Result<u64> {
    let mut tx = session.begin(Actor::Loop("retention")).await?;
    let empty = sqlx::query_scalar!(
        "select id from parking p where not exists (select from task t where t.parked_on = p.id and t.status = 'pending')
         order by id limit $1 for update skip locked",
        limit
    )
    .fetch_all(tx.conn().await?)
    .await?;
    // Checked again under the lock: a transaction that blocks a task changes the row of its group first.
    let groups = sqlx::query!(
        "delete from parking p where id = any($1)
           and not exists (select from task t where t.parked_on = p.id and t.status = 'pending')",
        &empty
    )
    .execute(tx.conn().await?)
    .await?;
    let unused = sqlx::query_scalar!(
        "select id from slot where used = 0 and load = 0 and not exists (select from gate g where g.slot_id = slot.id)
         order by id limit $1 for update skip locked",
        limit
    )
    .fetch_all(tx.conn().await?)
    .await?;
    // Checked again under the lock: a transaction that needs a slot locks it, or creates it again.
    let slots = sqlx::query!(
        "delete from slot s where id = any($1) and used = 0 and load = 0
           and not exists (select from gate g where g.slot_id = s.id)",
        &unused
    )
    .execute(tx.conn().await?)
    .await?;
    tx.commit().await?;
    Ok(groups.rows_affected() + slots.rows_affected())
}

/// Counts the groups that have blocked tasks.
pub async fn blocked_groups(store: &Store) -> Result<i64> {
    let count = sqlx::query_scalar!(r#"select count(*) as "n!" from parking where state > 0"#);
    store.listing(async |tx| Ok(count.fetch_one(tx.conn().await?).await?)).await
}
