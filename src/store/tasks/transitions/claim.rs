//! Pending → Claimed, in the order of the queue. Where nothing is counted by rules that is one statement; otherwise the
//! first tasks are locked, judged together with those parked whose limits have opened, and written as admitted or parked.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use serde_json::Value;
use uuid::Uuid;

use super::undecided::Moved;
use crate::domain::admission::{self, Admission, Candidate, Rule, RuleMatcher, SlotLimit};
use crate::domain::task::Flags;
use crate::domain::task::lifecycle::Cause;
use crate::domain::task::status::Status;
use crate::domain::webhook::{Action, Actions};
use crate::store::admission::MatcherKey;
use crate::store::admission::matchers::{self, Matchers};
use crate::store::admission::{fairness, slots};
use crate::store::tasks::lease::ClaimId;
use crate::store::{Error, Result, Store, Tx};

/// A task that was claimed: what its start needs.
#[derive(Clone, Debug)]
pub struct Claimed {
    pub id: Uuid,
    pub batch_id: Uuid,
    pub run: i32,
    /// The number of this claim.
    pub claim: i32,
    pub attempt: i16,
    pub priority: i16,
    pub turn: i64,
    /// What to call, if anything.
    pub on_start: Option<Action>,
    /// How much of it is held in memory.
    pub bytes: usize,
}

impl Claimed {
    pub fn claim_id(&self) -> ClaimId {
        (self.id, self.claim)
    }
}

/// The order of the queue, as the statements of this file write it: `order by priority desc, turn, id`.
fn queue_order(priority: i16, turn: i64, id: Uuid) -> (Reverse<i16>, i64, Uuid) {
    (Reverse(priority), turn, id)
}

/// What came of a claim.
#[derive(Debug, Default)]
pub struct Claims {
    /// In queue order.
    pub tasks: Vec<Claimed>,
    /// How many are blocked by rules and were parked.
    pub parked: usize,
    /// How many were left alone because somebody else holds a slot that they look at.
    pub busy: usize,
    /// The queue, or a parking that was recheck, may hold more.
    pub more: bool,
    /// Tasks were left alone because their rules name these, which are not known.
    pub unknown: BTreeSet<RuleMatcher>,
}

/// What the actions of the tasks that are claimed at once may have in all; the first is claimed however large it is.
const CLAIM_BYTES: i64 = 8 * 1024 * 1024;
/// What the rules look at of the tasks that are read at once may have in all.
const SPEC_BYTES: i64 = 4 * 1024 * 1024;

/// Claims up to `limit` tasks, of the first `look` in the queue. The transaction must have begun as a claim.
pub async fn claim(tx: &mut Tx, limit: usize, look: usize, lease: Duration) -> Result<Claims> {
    let matchers = matchers::all(tx).await?;
    let mut claims = if matchers.is_idle() {
        let First { mut tasks, looked, ruled } = claim_first(tx, limit, lease).await?;
        let mut more = tasks.len() == limit || i64::try_from(tasks.len()).is_ok_and(|claimed| claimed < looked);
        let mut unknown = BTreeSet::new();
        if ruled > 0 {
            // Tasks with rules that nobody knew of when this began: they are judged, or their matchers named.
            let by_rules = claim_by_rules(tx, &matchers, limit, limit, lease).await?;
            more = by_rules.more;
            tasks.extend(by_rules.tasks);
            unknown = by_rules.unknown;
        }
        Claims { tasks, more, unknown, ..Claims::default() }
    } else {
        claim_by_rules(tx, &matchers, limit, look.max(limit), lease).await?
    };
    claims.tasks.sort_unstable_by_key(|claimed| queue_order(claimed.priority, claimed.turn, claimed.id));
    fairness::taken(tx, &claims.tasks).await?;
    Ok(claims)
}

struct ClaimedRow {
    id: Uuid,
    batch_id: Uuid,
    run: i32,
    claim: i32,
    attempt: i16,
    priority: i16,
    turn: i64,
    actions: Option<String>,
    last_updated: chrono::DateTime<chrono::Utc>,
}

/// What came of a claim that looks at no rules.
struct First {
    tasks: Vec<Claimed>,
    /// How many were looked at: those that were not claimed are too large to go with the others, or carry rules.
    looked: i64,
    ruled: i64,
}

/// Literals are right here: they select the partial index.
async fn claim_first(tx: &mut Tx, limit: usize, lease: Duration) -> Result<First> {
    let (now, by) = (tx.store.clock().param(), tx.store.instance());
    let rows = sqlx::query!(
        r#"with picked as materialized (
               select id, priority, turn, flags & $5 <> 0 as calls
               from task where status = 'pending' and not_before is null and parked_on is null
               order by priority desc, turn, id limit $1 for update skip locked
           ), sized as materialized (
               select p.id, s.actions, s.rules is not null as ruled,
                   coalesce(sum(octet_length(s.actions)) filter (where p.calls) over (
                       order by p.priority desc, p.turn, p.id rows between unbounded preceding and 1 preceding
                   ), 0) as before
               from picked p join task_spec s on s.id = p.id
           ), moved as (
               update task t set status = 'claimed', claimed_by = $2, claimed_run = t.run, claim = t.claim + 1,
                   wait_count = 0, timeout_at = coalesce($3, statement_timestamp()) + make_interval(secs => $4),
                   last_updated = greatest(t.last_updated, coalesce($3, statement_timestamp()))
               from sized z
               where t.id = z.id and t.status = 'pending' and z.before < $6 and not z.ruled
               returning t.id, t.batch_id, t.run, t.claim, t.attempt, t.priority, t.turn, t.last_updated,
                   case when t.flags & $5 <> 0 then z.actions end as actions
           )
           select c.looked as "looked!", c.ruled as "ruled!", m.id as "id?", m.batch_id as "batch_id?", m.run as "run?",
               m.claim as "claim?", m.attempt as "attempt?", m.priority as "priority?", m.turn as "turn?",
               m.last_updated as "last_updated?", m.actions
           from (select count(*) as looked, count(*) filter (where ruled) as ruled from sized) c
           left join moved m on true"#,
        i64::try_from(limit).unwrap_or(i64::MAX),
        by,
        now,
        lease.as_secs_f64(),
        Flags::ON_START.0,
        CLAIM_BYTES,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let (looked, ruled) = rows.first().map_or((0, 0), |row| (row.looked, row.ruled));
    let moved = rows.into_iter().filter_map(|row| {
        Some(ClaimedRow {
            id: row.id?,
            batch_id: row.batch_id?,
            run: row.run?,
            claim: row.claim?,
            attempt: row.attempt?,
            priority: row.priority?,
            turn: row.turn?,
            actions: row.actions,
            last_updated: row.last_updated?,
        })
    });
    let moved = moved.collect();
    Ok(First { tasks: claimed(tx, moved)?, looked, ruled })
}

fn claimed(tx: &mut Tx, rows: Vec<ClaimedRow>) -> Result<Vec<Claimed>> {
    let mut claimed = Vec::with_capacity(rows.len());
    for ClaimedRow { id, batch_id, run, claim, attempt, priority, turn, actions, last_updated } in rows {
        let moved = Moved { id, batch_id, run, attempt, last_updated };
        moved.note(tx, Status::Pending, Status::Claimed, Cause::Claim.as_str(), None);
        let bytes = actions.as_ref().map_or(0, String::len);
        let actions = actions.as_deref().map(serde_json::from_str::<Actions>).transpose();
        let actions = actions.map_err(|error| Error::corrupt(format!("actions of task {id}: {error}")))?;
        let on_start = actions.and_then(|actions| actions.on_start);
        claimed.push(Claimed { id, batch_id, run, claim, attempt, priority, turn, on_start, bytes });
    }
    Ok(claimed)
}

/// A locked task at the head of the queue or of a parking.
struct QueueHead {
    id: Uuid,
    priority: i16,
    turn: i64,
    parked_on: Option<i64>,
    remaining: i64,
    bytes: i32,
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
    let mut more = heads.len() == look;
    let mut recheck = slots::to_recheck(tx).await?;
    if !recheck.is_empty() {
        heads.extend(lock_blocked(tx, &recheck, limit).await?);
        heads.sort_unstable_by_key(|head| queue_order(head.priority, head.turn, head.id));
    }
    // Before anything is judged: what is blocked is so by those before it.
    let mut before = 0;
    heads.retain(|head| {
        let fits = before == 0 || before + i64::from(head.bytes) <= CLAIM_BYTES;
        before += i64::from(head.bytes);
        more |= !fits;
        fits
    });
    let specs = specs(tx, matchers, &heads).await?;
    let unknown = matchers.unknown_of(specs.values().flat_map(|spec| &spec.rules));
    let known = |rule: &Rule| !unknown.contains(rule.matcher());
    heads.retain(|head| specs.get(&head.id).is_none_or(|spec| spec.rules.iter().all(known)));

    // Every slot that is looked at or taken, locked at once.
    let mut keys: BTreeSet<MatcherKey> = BTreeSet::new();
    for spec in heads.iter().filter_map(|head| specs.get(&head.id)) {
        keys.extend(spec.keys(matchers));
    }
    let of_recheck: BTreeSet<i64> = recheck.values().flatten().map(|limit| limit.slot).collect();
    let mut locked = slots::lock(tx, keys, &of_recheck).await?;
    // What looks at a slot that somebody else holds is looked at another time.
    recheck.retain(|_, limits| limits.iter().all(|limit| !locked.is_busy(limit.slot)));
    let looked_up = |key: &MatcherKey| locked.id(key).is_some();
    let looked_at = heads.len();
    heads.retain(|head| specs.get(&head.id).is_none_or(|spec| spec.keys(matchers).iter().all(looked_up)));
    let busy = looked_at - heads.len();
    let candidates: Vec<Candidate> = heads
        .iter()
        .map(|head| {
            specs.get(&head.id).map_or_else(Candidate::default, |spec| candidate(matchers, &locked, head, spec))
        })
        .collect();
    let verdicts = admission::admit(&candidates, &mut locked.slots, limit);

    let judged = || heads.iter().zip(&candidates).zip(&verdicts).map(|((head, candidate), v)| (head, candidate, *v));
    let admitted: Vec<(&QueueHead, &Candidate)> =
        judged().filter(|(_, _, v)| *v == Admission::Starts).map(|(head, candidate, _)| (head, candidate)).collect();
    let tasks = claim_admitted(tx, &admitted, lease).await?;
    let blocked: Vec<(Uuid, &[SlotLimit])> = judged()
        .filter(|(_, _, v)| *v == Admission::Blocked)
        .map(|(head, candidate, _)| (head.id, candidate.limits.as_slice()))
        .collect();
    slots::block(tx, &blocked).await?;
    let parked = judged().filter(|(head, _, v)| *v == Admission::Blocked && head.parked_on.is_none()).count();

    if !recheck.is_empty() {
        let is_open = |limits: &[SlotLimit]| {
            limits.iter().all(|limit| limit.is_open(locked.slots.get(&limit.slot).copied().unwrap_or_default()))
        };
        let (open, closed): (Vec<_>, Vec<_>) = recheck.iter().partition(|(_, limits)| is_open(limits));
        let ids = |of: Vec<(&i64, &Vec<SlotLimit>)>| of.into_iter().map(|(id, _)| *id).collect::<Vec<i64>>();
        // What is left although its limits are open is locked by somebody, unless there was no room for it.
        more |= slots::looked_at(tx, &ids(closed), &ids(open)).await? && !tasks.is_empty();
    }
    Ok(Claims { tasks, parked, busy, more, unknown })
}

impl Spec {
    /// Every slot that the task would occupy or that one of its rules looks at.
    fn keys(&self, matchers: &Matchers) -> Vec<MatcherKey> {
        let metadata = self.metadata.as_ref();
        let judged = self.rules.iter().filter_map(|rule| matchers.judged(rule, metadata));
        matchers.occupied(&self.kind, metadata).into_iter().chain(judged).collect()
    }
}

async fn lock_first(tx: &mut Tx, look: usize) -> Result<Vec<QueueHead>> {
    Ok(sqlx::query_as!(
        QueueHead,
        r#"with first as materialized (
               select id, priority, turn, parked_on, expected_count - success - failures as remaining
               from task where status = 'pending' and not_before is null and parked_on is null
               order by priority desc, turn, id limit $1 for update skip locked
           )
           select f.id, f.priority, f.turn, f.parked_on, greatest(0, coalesce(f.remaining, 0)) as "remaining!",
               s.bytes as "bytes!"
           from first f cross join lateral (
               select coalesce(octet_length(actions), 0) as bytes from task_spec where id = f.id offset 0
           ) s"#,
        i64::try_from(look).unwrap_or(i64::MAX),
    )
    .fetch_all(tx.conn().await?)
    .await?)
}

/// The first of those parked where something has become free: as many as there may be room for, seen without locks.
async fn lock_blocked(tx: &mut Tx, recheck: &BTreeMap<i64, Vec<SlotLimit>>, limit: usize) -> Result<Vec<QueueHead>> {
    let groups: Vec<i64> = recheck.keys().copied().collect();
    Ok(sqlx::query_as!(
        QueueHead,
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
               greatest(0, coalesce(t.expected_count - t.success - t.failures, 0)) as "remaining!",
               coalesce(octet_length(s.actions), 0) as "bytes!"
           from first f join task t on t.id = f.id join task_spec s on s.id = f.id
           where t.status = 'pending' and t.parked_on = f.parking_id
           for update of t skip locked"#,
        &groups,
        i32::try_from(limit).unwrap_or(i32::MAX),
    )
    .fetch_all(tx.conn().await?)
    .await?)
}

/// Read after the tasks were locked: what they say may have changed until then. Of the metadata only what the rules look at,
/// and no more at a time than a bound: some of it may be large.
async fn specs(tx: &mut Tx, matchers: &Matchers, heads: &[QueueHead]) -> Result<HashMap<Uuid, Spec>> {
    let mut left: Vec<Uuid> = heads.iter().map(|head| head.id).collect();
    let mut specs = HashMap::new();
    while !left.is_empty() {
        let rows = sqlx::query!(
            r#"with wanted as materialized (
                   select u.n, s.id, s.kind, s.rules, m.metadata, coalesce(sum(octet_length(m.metadata::text)) over (
                       order by u.n rows between unbounded preceding and 1 preceding
                   ), 0) as before
                   from unnest($1::uuid[]) with ordinality u(id, n)
                   join task_spec s on s.id = u.id and (s.rules is not null or s.kind = any($2))
                   cross join lateral (
                       select jsonb_object_agg(f.name, s.metadata -> f.name) as metadata from (
                           select unnest($3::text[]) as name union
                           select json_array_elements_text(r -> 'matcher' -> 'fields')
                           from json_array_elements(s.rules::json) r
                       ) f where s.metadata ? f.name
                   ) m
               )
               select n as "n!", id as "id!", kind as "kind!", rules, metadata, (select max(n) from wanted) as "last!"
               from wanted where before < $4 order by n"#,
            &left,
            &matchers.kinds() as &[&str],
            &matchers.fields() as &[&str],
            SPEC_BYTES,
        )
        .fetch_all(tx.conn().await?)
        .await?;
        let read = match rows.last() {
            Some(row) if row.n < row.last => usize::try_from(row.n).map_err(Error::corrupt)?,
            _ => left.len(),
        };
        left.drain(..read);
        for row in rows {
            let rules = row.rules.as_deref().map(serde_json::from_str).transpose();
            let rules = rules.map_err(|error| Error::corrupt(format!("rules of task {}: {error}", row.id)))?;
            let spec = Spec { kind: row.kind, metadata: row.metadata, rules: rules.unwrap_or_default() };
            specs.insert(row.id, spec);
        }
    }
    Ok(specs)
}

fn candidate(matchers: &Matchers, locked: &slots::LockedSlots, head: &QueueHead, spec: &Spec) -> Candidate {
    let metadata = spec.metadata.as_ref();
    let judged = |rule| locked.id(&matchers.judged(rule, metadata)?).map(|slot| (rule, slot));
    let mut takes: Vec<i64> = matchers.occupied(&spec.kind, metadata).iter().filter_map(|key| locked.id(key)).collect();
    takes.sort_unstable();
    Candidate { takes, remaining: head.remaining, limits: admission::limits(spec.rules.iter().filter_map(judged)) }
}

async fn claim_admitted(tx: &mut Tx, admitted: &[(&QueueHead, &Candidate)], lease: Duration) -> Result<Vec<Claimed>> {
    if admitted.is_empty() {
        return Ok(Vec::new());
    }
    let (now, by) = (tx.store.clock().param(), tx.store.instance());
    let written = |takes: &[i64]| {
        let ids: Vec<String> = takes.iter().map(ToString::to_string).collect();
        (!ids.is_empty()).then(|| format!("{{{}}}", ids.join(",")))
    };
    let rows = sqlx::query_as!(
        ClaimedRow,
        r#"update task t set status = 'claimed', claimed_by = $3, claimed_run = t.run, claim = t.claim + 1, wait_count = 0,
               parked_on = null, slots = u.slots::bigint[],
               timeout_at = coalesce($4, statement_timestamp()) + make_interval(secs => $5),
               last_updated = greatest(t.last_updated, coalesce($4, statement_timestamp()))
           from unnest($1::uuid[], $2::text[], $6::text[]::task_status[]) u(id, slots, from_status)
           join task_spec s on s.id = u.id
           where t.id = u.id and t.status = u.from_status
           returning t.id, t.batch_id, t.run, t.claim, t.attempt, t.priority, t.turn, t.last_updated,
               case when t.flags & $7 <> 0 then s.actions end as actions"#,
        &admitted.iter().map(|(head, _)| head.id).collect::<Vec<_>>(),
        &admitted.iter().map(|(_, candidate)| written(&candidate.takes)).collect::<Vec<_>>() as &[Option<String>],
        by,
        now,
        lease.as_secs_f64(),
        &vec![Status::Pending.as_str(); admitted.len()] as &[&str],
        Flags::ON_START.0,
    )
    .fetch_all(tx.conn().await?)
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

/// For how many seconds the task at the head of the queue has been in it.
pub async fn queue_age(store: &Store) -> Result<f64> {
    let first = sqlx::query_scalar!(
        r#"select extract(epoch from coalesce($1, statement_timestamp()) - last_updated)::double precision as "age!" from task
           where status = 'pending' and not_before is null and parked_on is null
           order by priority desc, turn, id limit 1"#,
        store.clock().param(),
    );
    let age = store.listing(async |tx| Ok(first.fetch_optional(tx.conn().await?).await?)).await?;
    Ok(age.unwrap_or(0.0))
}
