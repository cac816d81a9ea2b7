//! Pending → Claimed while rules are in force: locks the first tasks of the queue, together with the first tasks of the
//! blocked groups whose limits may have opened, judges all of them under the locks of their slots, and writes each as
//! admitted or blocked. It never starts a task whose rules name a matcher that is not registered.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use serde_json::Value;
use uuid::Uuid;

use super::{CLAIM_BYTES, Claimed, ClaimedRow, Claims, queue_order, record_claims};
use crate::domain::rules::{self, Admission, Candidate, Rule, SlotLimit};
use crate::domain::task::Flags;
use crate::domain::task::status::Status;
use crate::store::rules::matchers::Matchers;
use crate::store::rules::{MatcherKey, slots};
use crate::store::{Error, Result, Tx};

/// The most bytes of metadata, as far as rules read it, that one statement returns.
const SPEC_BYTES: i64 = 4 * 1024 * 1024;

/// A locked task at the head of the queue or of a blocked group.
struct QueueHead {
    id: Uuid,
    priority: i16,
    turn: i64,
    /// The blocked group that the task is in.
    parked_on: Option<i64>,
    /// The work that it has left.
    remaining: i64,
    bytes: i32,
}

/// The specification of a task that has rules or occupies slots, as far as rules read it.
struct Spec {
    kind: String,
    metadata: Option<Value>,
    rules: Vec<Rule>,
}

/// Claims up to `limit` tasks among the first `window` of the queue and the first of the blocked groups to recheck.
pub(super) async fn claim_by_rules(
    tx: &mut Tx,
    matchers: &Matchers,
    limit: usize,
    window: usize,
    lease: Duration,
) -> Result<Claims> {
    let mut heads = lock_first(tx, window).await?;
    let mut more = heads.len() == window;
    let mut recheck = slots::to_recheck(tx).await?;
    if !recheck.is_empty() {
        heads.extend(lock_blocked(tx, &recheck, limit).await?);
        heads.sort_unstable_by_key(|head| queue_order(head.priority, head.turn, head.id));
    }
    // The cut comes before the judgement: no task may be blocked by one that is then cut.
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

    // All slots that these tasks need are locked at once.
    let mut keys: BTreeSet<MatcherKey> = BTreeSet::new();
    for spec in heads.iter().filter_map(|head| specs.get(&head.id)) {
        keys.extend(spec.keys(matchers));
    }
    let recheck_slots: BTreeSet<i64> = recheck.values().flatten().map(|limit| limit.slot).collect();
    let mut locked = slots::lock(tx, keys, &recheck_slots).await?;
    // Tasks and groups that need a slot held by another transaction are left for a later claim.
    recheck.retain(|_, limits| limits.iter().all(|limit| !locked.is_busy(limit.slot)));
    let is_locked = |key: &MatcherKey| locked.id(key).is_some();
    let all_heads = heads.len();
    heads.retain(|head| specs.get(&head.id).is_none_or(|spec| spec.keys(matchers).iter().all(is_locked)));
    let busy = all_heads - heads.len();
    let candidates: Vec<Candidate> = heads
        .iter()
        .map(|head| {
            specs.get(&head.id).map_or_else(Candidate::default, |spec| candidate(matchers, &locked, head, spec))
        })
        .collect();
    let verdicts = rules::admit(&candidates, &mut locked.slots, limit);

    let judged = || heads.iter().zip(&candidates).zip(&verdicts).map(|((head, candidate), v)| (head, candidate, *v));
    let admitted: Vec<(&QueueHead, &Candidate)> =
        judged().filter(|(_, _, v)| *v == Admission::Starts).map(|(head, candidate, _)| (head, candidate)).collect();
    let tasks = claim_admitted(tx, &admitted, lease).await?;
    let blocked: Vec<(Uuid, &[SlotLimit])> = judged()
        .filter(|(_, _, v)| *v == Admission::Blocked)
        .map(|(head, candidate, _)| (head.id, candidate.limits.as_slice()))
        .collect();
    slots::block(tx, &blocked).await?;
    let newly_blocked = judged().filter(|(head, _, v)| *v == Admission::Blocked && head.parked_on.is_none()).count();

    if !recheck.is_empty() {
        let is_open = |limits: &[SlotLimit]| {
            limits.iter().all(|limit| limit.is_open(locked.slots.get(&limit.slot).copied().unwrap_or_default()))
        };
        let (open, closed): (Vec<_>, Vec<_>) = recheck.iter().partition(|(_, limits)| is_open(limits));
        let ids = |of: Vec<(&i64, &Vec<SlotLimit>)>| of.into_iter().map(|(id, _)| *id).collect::<Vec<i64>>();
        // Tasks left in an open group are locked by another transaction, unless there was no room for them.
        more |= slots::finish_recheck(tx, &ids(closed), &ids(open)).await? && !tasks.is_empty();
    }
    Ok(Claims { tasks, blocked: newly_blocked, busy, more, unknown })
}

impl Spec {
    /// Returns every slot that the task would occupy or that one of its rules limits.
    fn keys(&self, matchers: &Matchers) -> Vec<MatcherKey> {
        let metadata = self.metadata.as_ref();
        let limited = self.rules.iter().filter_map(|rule| matchers.limited_slot(rule, metadata));
        matchers.occupied(&self.kind, metadata).into_iter().chain(limited).collect()
    }
}

/// Locks the first tasks of the queue, skipping locked ones.
async fn lock_first(tx: &mut Tx, window: usize) -> Result<Vec<QueueHead>> {
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
        i64::try_from(window).unwrap_or(i64::MAX),
    )
    .fetch_all(tx.conn().await?)
    .await?)
}

/// Locks the first tasks of the blocked groups to recheck: as many as there may be room for, by the slots read without
/// locks.
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

/// Reads the specifications of locked tasks, which may have changed before the lock was taken. Of the metadata it reads only the
/// fields that rules name, and at most [`SPEC_BYTES`] at a time, because some values may be large.
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

/// Builds the candidate that the domain judges.
fn candidate(matchers: &Matchers, locked: &slots::LockedSlots, head: &QueueHead, spec: &Spec) -> Candidate {
    let metadata = spec.metadata.as_ref();
    let limited = |rule| locked.id(&matchers.limited_slot(rule, metadata)?).map(|slot| (rule, slot));
    let mut takes: Vec<i64> = matchers.occupied(&spec.kind, metadata).iter().filter_map(|key| locked.id(key)).collect();
    takes.sort_unstable();
    Candidate { takes, remaining: head.remaining, limits: rules::limits(spec.rules.iter().filter_map(limited)) }
}

/// Writes the claims of the admitted tasks, with the slots that they take.
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
    record_claims(tx, rows)
}
