//! Pending → Claimed, in the order of the queue. Where nothing is counted by rules that is one statement; otherwise the
//! first tasks are locked, judged together with those parked whose gates have opened, and written as admitted or parked.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use serde_json::Value;
use uuid::Uuid;

use super::Moved;
use crate::domain::lifecycle::Cause;
use crate::domain::rules::{self, Candidate, Gate, Rule, Verdict};
use crate::domain::status::Status;
use crate::domain::task::Flags;
use crate::domain::webhook::{Action, Actions};
use crate::store::matchers::{self, Key, Matchers};
use crate::store::{Error, Result, Tx, fairness, slots};

/// A task that was claimed: what its start needs.
#[derive(Clone, Debug)]
pub struct Claimed {
    pub id: Uuid,
    pub batch_id: Uuid,
    pub run: i32,
    pub attempt: i16,
    pub priority: i16,
    pub turn: i64,
    /// What to call, if anything.
    pub on_start: Option<Action>,
}

/// What came of a claim.
#[derive(Debug, Default)]
pub struct Claims {
    pub tasks: Vec<Claimed>,
    /// How many are blocked by rules and were parked.
    pub parked: usize,
    /// The queue, or a parking that was stirred, may hold more.
    pub more: bool,
}

/// Claims up to `limit` tasks, of the first `look` in the queue. The transaction must have begun as a claim.
pub async fn claim(tx: &mut Tx, limit: usize, look: usize, lease: Duration) -> Result<Claims> {
    let matchers = matchers::all(tx).await?;
    let claims = if matchers.is_empty() {
        let tasks = claim_first(tx, limit, lease).await?;
        Claims { more: tasks.len() == limit, parked: 0, tasks }
    } else {
        claim_by_rules(tx, &matchers, limit, look.max(limit), lease).await?
    };
    fairness::taken(tx, &claims.tasks).await?;
    Ok(claims)
}

struct Row {
    id: Uuid,
    batch_id: Uuid,
    run: i32,
    attempt: i16,
    priority: i16,
    turn: i64,
    actions: Option<String>,
    last_updated: chrono::DateTime<chrono::Utc>,
}

/// Literals are right here: they select the partial index.
async fn claim_first(tx: &mut Tx, limit: usize, lease: Duration) -> Result<Vec<Claimed>> {
    let (now, by) = (tx.store.clock().param(), tx.store.instance());
    let rows = sqlx::query_as!(
        Row,
        r#"with picked as materialized (
               select id from task where status = 'pending' and not_before is null and parked_on is null
               order by priority desc, turn, id limit $1 for update skip locked
           )
           update task t set status = 'claimed', claimed_by = $2, claimed_run = t.run, wait_count = 0,
               timeout_at = coalesce($3, now()) + make_interval(secs => $4), last_updated = coalesce($3, now())
           from picked p join task_spec s on s.id = p.id
           where t.id = p.id and t.status = 'pending'
           returning t.id, t.batch_id, t.run, t.attempt, t.priority, t.turn, t.last_updated,
               case when t.flags & $5 <> 0 then s.actions end as actions"#,
        i64::try_from(limit).unwrap_or(i64::MAX),
        by,
        now,
        lease.as_secs_f64(),
        Flags::ON_START.0,
    )
    .fetch_all(tx.conn())
    .await?;
    claimed(tx, rows)
}

fn claimed(tx: &mut Tx, rows: Vec<Row>) -> Result<Vec<Claimed>> {
    let mut claimed = Vec::with_capacity(rows.len());
    for Row { id, batch_id, run, attempt, priority, turn, actions, last_updated } in rows {
        let moved = Moved { id, batch_id, run, attempt, last_updated };
        moved.note(tx, Status::Pending, Status::Claimed, Cause::Claim.as_str());
        let actions = actions.as_deref().map(serde_json::from_str::<Actions>).transpose();
        let actions = actions.map_err(|error| Error::corrupt(format!("actions of task {id}: {error}")))?;
        let on_start = actions.and_then(|actions| actions.on_start);
        claimed.push(Claimed { id, batch_id, run, attempt, priority, turn, on_start });
    }
    Ok(claimed)
}

/// A locked task at the head of the queue or of a parking.
struct Head {
    id: Uuid,
    priority: i16,
    turn: i64,
    parked_on: Option<i64>,
    remaining: i64,
}

/// What the rules look at, for tasks that carry some or occupy slots.
struct Spec {
    kind: String,
    metadata: Option<Value>,
    rules: Vec<Rule>,
}

async fn claim_by_rules(
    tx: &mut Tx,
    matchers: &Matchers,
    limit: usize,
    look: usize,
    lease: Duration,
) -> Result<Claims> {
    let mut heads = lock_first(tx, look).await?;
    let full = heads.len() == look;
    let stirred = slots::stirred(tx).await?;
    if !stirred.is_empty() {
        heads.extend(lock_parked(tx, &stirred, limit).await?);
        heads.sort_unstable_by_key(|head| (std::cmp::Reverse(head.priority), head.turn, head.id));
    }
    let specs = specs(tx, matchers, &heads).await?;

    // Every slot that is looked at or taken, locked at once.
    let mut keys: BTreeSet<Key> = BTreeSet::new();
    for spec in specs.values() {
        keys.extend(matchers.occupied(&spec.kind, spec.metadata.as_ref()));
        keys.extend(spec.rules.iter().filter_map(|rule| matchers.judged(rule, spec.metadata.as_ref())));
    }
    let of_stirred: BTreeSet<i64> = stirred.values().flatten().map(|gate| gate.slot).collect();
    let mut locked = slots::lock(tx, keys, &of_stirred).await?;
    let candidates: Vec<Candidate> = heads
        .iter()
        .map(|head| {
            specs.get(&head.id).map_or_else(Candidate::default, |spec| candidate(matchers, &locked, head, spec))
        })
        .collect();
    let verdicts = rules::admit(&candidates, &mut locked.slots, limit);

    let judged = || heads.iter().zip(&candidates).zip(&verdicts).map(|((head, candidate), v)| (head, candidate, *v));
    let admitted: Vec<(&Head, &Candidate)> =
        judged().filter(|(_, _, v)| *v == Verdict::Starts).map(|(head, candidate, _)| (head, candidate)).collect();
    let tasks = claim_admitted(tx, &admitted, lease).await?;
    let blocked: Vec<(Uuid, &[Gate])> = judged()
        .filter(|(_, _, v)| *v == Verdict::Blocked)
        .map(|(head, candidate, _)| (head.id, candidate.gates.as_slice()))
        .collect();
    slots::park(tx, &blocked).await?;
    let parked = judged().filter(|(head, _, v)| *v == Verdict::Blocked && head.parked_on.is_none()).count();

    let mut more = full;
    if !stirred.is_empty() {
        let is_open = |gates: &[Gate]| {
            gates.iter().all(|gate| gate.is_open(locked.slots.get(&gate.slot).copied().unwrap_or_default()))
        };
        let (open, closed): (Vec<_>, Vec<_>) = stirred.iter().partition(|(_, gates)| is_open(gates));
        let ids = |of: Vec<(&i64, &Vec<Gate>)>| of.into_iter().map(|(id, _)| *id).collect::<Vec<i64>>();
        // What is left although its gates are open is locked by somebody, unless there was no room for it.
        more |= slots::looked_at(tx, &ids(closed), &ids(open)).await? && !tasks.is_empty();
    }
    Ok(Claims { tasks, parked, more })
}

async fn lock_first(tx: &mut Tx, look: usize) -> Result<Vec<Head>> {
    Ok(sqlx::query_as!(
        Head,
        r#"select id, priority, turn, parked_on,
               greatest(0, coalesce(expected_count - success - failures, 0)) as "remaining!"
           from task where status = 'pending' and not_before is null and parked_on is null
           order by priority desc, turn, id limit $1 for update skip locked"#,
        i64::try_from(look).unwrap_or(i64::MAX),
    )
    .fetch_all(tx.conn())
    .await?)
}

/// The first of those parked where something has become free: as many as there may be room for, seen without locks.
async fn lock_parked(tx: &mut Tx, stirred: &BTreeMap<i64, Vec<Gate>>, limit: usize) -> Result<Vec<Head>> {
    let parkings: Vec<i64> = stirred.keys().copied().collect();
    Ok(sqlx::query_as!(
        Head,
        r#"with free as materialized (
               select g.parking_id, min(least(greatest(coalesce(g.max_tasks - coalesce(s.used, 0), $2), 0), $2)) as n
               from gate g left join slot s on s.id = g.slot_id where g.parking_id = any($1) group by 1
           ), first as materialized (
               select t.id, f.parking_id from free f cross join lateral (
                   select id, priority, turn from task where parked_on = f.parking_id and status = 'pending'
                   order by priority desc, turn, id limit f.n
               ) t order by t.priority desc, t.turn, t.id limit $2
           )
           select t.id, t.priority, t.turn, t.parked_on,
               greatest(0, coalesce(t.expected_count - t.success - t.failures, 0)) as "remaining!"
           from first f join task t on t.id = f.id
           where t.status = 'pending' and t.parked_on = f.parking_id
           for update of t skip locked"#,
        &parkings,
        i32::try_from(limit).unwrap_or(i32::MAX),
    )
    .fetch_all(tx.conn())
    .await?)
}

/// Read after the tasks were locked: what they say may have changed until then.
async fn specs(tx: &mut Tx, matchers: &Matchers, heads: &[Head]) -> Result<HashMap<Uuid, Spec>> {
    let ids: Vec<Uuid> = heads.iter().map(|head| head.id).collect();
    let rows = sqlx::query!(
        "select id, kind, metadata, rules from task_spec
         where id = any($1) and (rules is not null or kind = any($2))",
        &ids,
        &matchers.kinds() as &[&str],
    )
    .fetch_all(tx.conn())
    .await?;
    rows.into_iter()
        .map(|row| {
            let rules = row.rules.as_deref().map(serde_json::from_str).transpose();
            let rules = rules.map_err(|error| Error::corrupt(format!("rules of task {}: {error}", row.id)))?;
            Ok((row.id, Spec { kind: row.kind, metadata: row.metadata, rules: rules.unwrap_or_default() }))
        })
        .collect()
}

fn candidate(matchers: &Matchers, locked: &slots::Locked, head: &Head, spec: &Spec) -> Candidate {
    let metadata = spec.metadata.as_ref();
    let judged = |rule| locked.id(&matchers.judged(rule, metadata)?).map(|slot| (rule, slot));
    let mut takes: Vec<i64> = matchers.occupied(&spec.kind, metadata).iter().filter_map(|key| locked.id(key)).collect();
    takes.sort_unstable();
    Candidate { takes, remaining: head.remaining, gates: rules::gates(spec.rules.iter().filter_map(judged)) }
}

async fn claim_admitted(tx: &mut Tx, admitted: &[(&Head, &Candidate)], lease: Duration) -> Result<Vec<Claimed>> {
    if admitted.is_empty() {
        return Ok(Vec::new());
    }
    let (now, by) = (tx.store.clock().param(), tx.store.instance());
    let written = |takes: &[i64]| {
        let ids: Vec<String> = takes.iter().map(ToString::to_string).collect();
        (!ids.is_empty()).then(|| format!("{{{}}}", ids.join(",")))
    };
    let rows = sqlx::query_as!(
        Row,
        r#"update task t set status = 'claimed', claimed_by = $3, claimed_run = t.run, wait_count = 0, parked_on = null,
               slots = u.slots::bigint[], timeout_at = coalesce($4, now()) + make_interval(secs => $5),
               last_updated = coalesce($4, now())
           from unnest($1::uuid[], $2::text[], $6::text[]::task_status[]) u(id, slots, from_status)
           join task_spec s on s.id = u.id
           where t.id = u.id and t.status = u.from_status
           returning t.id, t.batch_id, t.run, t.attempt, t.priority, t.turn, t.last_updated,
               case when t.flags & $7 <> 0 then s.actions end as actions"#,
        &admitted.iter().map(|(head, _)| head.id).collect::<Vec<_>>(),
        &admitted.iter().map(|(_, candidate)| written(&candidate.takes)).collect::<Vec<_>>() as &[Option<String>],
        by,
        now,
        lease.as_secs_f64(),
        &vec![Status::Pending.as_str(); admitted.len()] as &[&str],
        Flags::ON_START.0,
    )
    .fetch_all(tx.conn())
    .await?;
    if rows.len() != admitted.len() {
        return Err(Error::Guard { expected: admitted.len(), changed: rows.len() });
    }
    for (_, candidate) in admitted {
        for slot in &candidate.takes {
            tx.slot(*slot, 1, candidate.remaining);
        }
    }
    claimed(tx, rows)
}
