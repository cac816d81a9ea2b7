//! Matchers: by what tasks are counted while they execute. They are few, known to every instance, and forgotten when no
//! task alive carries a rule with them.
//!
//! Claims hold [`CLAIM_LOCK`] shared: a matcher that is new counts what executes under the exclusive lock, so no claim can
//! slip in between the count and its being known. Ends of executions need no such care. They release what their row
//! says, and counting a new matcher locks those rows. Nobody waits for rows under the exclusive lock.
//!
//! A claim that meets a rule whose matcher is not known leaves the task alone and names the matcher, to be registered. So
//! forgetting one too early costs a moment and never lets a task start that must not.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use serde_json::Value;
use uuid::Uuid;

use super::{MatcherKey, slots};
use crate::domain::admission::{Rule, RuleMatcher, key_of};
use crate::domain::task::Flags;
use crate::store::{Actor, Error, Patience, Result, Session, Store, Tx};

/// The advisory lock between claims and changes of matchers. Claims take it as they begin.
pub(in crate::store) const CLAIM_LOCK: i64 = 0x7265_7072_6973_6501;
/// New matchers in one request at most: claims of all instances wait while they are counted.
pub const MOST_NEW: usize = 1000;
/// How long a try to register waits for the next one when something was in other hands.
const PAUSE: Duration = Duration::from_millis(100);
/// A matcher is kept for so many minutes before anybody looks whether it is used.
const YOUNG_MINS: i32 = 10;

/// The matchers that this instance knows.
#[derive(Clone, Debug, Default)]
pub(in crate::store) struct MatcherCache(Arc<RwLock<Arc<Matchers>>>);

#[derive(Clone, Debug, Default)]
pub struct Matchers {
    /// What tells one state of the table from another.
    version: (i64, i32),
    /// Whether a task alive carries rules.
    ruled: bool,
    ids: HashMap<(String, Vec<String>), i32>,
    by_kind: HashMap<String, Vec<(i32, Vec<String>)>>,
}

impl Matchers {
    /// Nothing is counted, and nothing has to be looked at.
    pub fn is_idle(&self) -> bool {
        self.ids.is_empty() && !self.ruled
    }

    pub fn kinds(&self) -> Vec<&str> {
        self.by_kind.keys().map(String::as_str).collect()
    }

    /// Every field that one of them looks at.
    pub(in crate::store) fn fields(&self) -> Vec<&str> {
        let fields = self.ids.keys().flat_map(|(_, fields)| fields).map(String::as_str);
        fields.collect::<BTreeSet<_>>().into_iter().collect()
    }

    pub(in crate::store) fn knows(&self, matcher: &RuleMatcher) -> bool {
        self.id(matcher).is_some()
    }

    fn id(&self, matcher: &RuleMatcher) -> Option<i32> {
        self.ids.get(&(matcher.kind.clone(), matcher.fields.clone())).copied()
    }

    pub(in crate::store) fn unknown_of<'a>(&self, rules: impl Iterator<Item = &'a Rule>) -> BTreeSet<RuleMatcher> {
        rules.map(Rule::matcher).filter(|matcher| !self.knows(matcher)).cloned().collect()
    }

    /// What a task of this kind occupies while it executes.
    pub(in crate::store) fn occupied(&self, kind: &str, metadata: Option<&Value>) -> Vec<MatcherKey> {
        let matchers = self.by_kind.get(kind).into_iter().flatten();
        matchers.filter_map(|(id, fields)| Some((*id, key_of(fields, metadata)?))).collect()
    }

    /// The slot that a rule looks at. Fields are never taken away from metadata, so they are there.
    pub(in crate::store) fn judged(&self, rule: &Rule, metadata: Option<&Value>) -> Option<MatcherKey> {
        Some((self.id(rule.matcher())?, key_of(&rule.matcher().fields, metadata)?))
    }

    fn add(&mut self, id: i32, kind: String, fields: Vec<String>) {
        self.by_kind.entry(kind.clone()).or_default().push((id, fields.clone()));
        self.ids.insert((kind, fields), id);
    }
}

impl MatcherCache {
    fn get(&self) -> Arc<Matchers> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn put(&self, matchers: Arc<Matchers>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = matchers;
    }
}

/// All matchers there are, for a transaction that holds [`CLAIM_LOCK`].
pub(in crate::store) async fn all(tx: &mut Tx) -> Result<Arc<Matchers>> {
    let state = sqlx::query!(
        r#"select version, coalesce((select max(id) from matcher), 0) as "last!",
               exists (select from task where ended_at is null and flags & 256 <> 0) as "ruled!"
           from matcher_version"#
    )
    .fetch_one(tx.conn().await?)
    .await?;
    const { assert!(Flags::HAS_RULES.0 == 256) };
    let (version, ruled) = ((state.version, state.last), state.ruled);
    let known = tx.store.matchers.get();
    if known.version == version {
        if known.ruled == ruled {
            return Ok(known);
        }
        return Ok(keep(tx, Matchers { ruled, ..(*known).clone() }));
    }
    let rows = sqlx::query!("select id, kind, fields from matcher where retired_at is null order by id")
        .fetch_all(tx.conn().await?)
        .await?;
    let mut all = Matchers { version, ruled, ..Matchers::default() };
    for row in rows {
        all.add(row.id, row.kind, row.fields);
    }
    Ok(keep(tx, all))
}

fn keep(tx: &Tx, all: Matchers) -> Arc<Matchers> {
    let all = Arc::new(all);
    tx.store.matchers.put(Arc::clone(&all));
    all
}

/// The matchers of these rules that this instance does not know.
pub fn unknown<'a>(store: &Store, rules: impl IntoIterator<Item = &'a Rule>) -> BTreeSet<RuleMatcher> {
    let known = store.matchers.get();
    let all: BTreeSet<&RuleMatcher> = rules.into_iter().map(Rule::matcher).collect();
    all.into_iter().filter(|matcher| !known.knows(matcher)).cloned().collect()
}

/// Makes matchers known, before any task carries them. New ones count what executes already.
pub async fn register(store: &Store, wanted: &BTreeSet<RuleMatcher>) -> Result<()> {
    if wanted.is_empty() {
        return Ok(());
    }
    let until = Instant::now() + store.limit();
    loop {
        match try_register(store, wanted).await {
            Err(error) if error.is_busy() && Instant::now() < until => tokio::time::sleep(PAUSE).await,
            result => return result,
        }
    }
}

/// The same with one try.
pub async fn try_register(store: &Store, wanted: &BTreeSet<RuleMatcher>) -> Result<()> {
    store.retrying(Patience::Least, |session| register_once(session, wanted)).await
}

async fn register_once(session: Session, wanted: &BTreeSet<RuleMatcher>) -> Result<()> {
    let mut tx = session.begin(Actor::Api).await?;
    lock_out_claims(&mut tx).await?;
    let known = all(&mut tx).await?;
    let new: Vec<&RuleMatcher> = wanted.iter().filter(|matcher| !known.knows(matcher)).collect();
    if new.is_empty() {
        return tx.rollback().await;
    }
    let fields = new.iter().map(|matcher| serde_json::to_string(&matcher.fields).map_err(Error::corrupt));
    let now = tx.store.clock().param();
    let rows = sqlx::query!(
        "insert into matcher (kind, fields, created_at)
         select u.kind, array(select json_array_elements_text(u.fields::json)), coalesce($3, statement_timestamp())
         from unnest($1::text[], $2::text[]) u(kind, fields) returning id, kind, fields",
        &new.iter().map(|matcher| matcher.kind.as_str()).collect::<Vec<_>>() as &[&str],
        &fields.collect::<Result<Vec<_>>>()?,
        now,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let mut counted = Matchers::default();
    for row in rows {
        counted.add(row.id, row.kind, row.fields);
    }
    count_executing(&mut tx, &counted).await?;
    changed(&mut tx).await?;
    // They become known here with everybody else's next look: only what is committed may be.
    tx.commit().await
}

/// From here to the end of the transaction nobody claims.
async fn lock_out_claims(tx: &mut Tx) -> Result<()> {
    sqlx::query!("select pg_advisory_xact_lock($1)", CLAIM_LOCK).execute(tx.conn().await?).await?;
    Ok(())
}

async fn changed(tx: &mut Tx) -> Result<()> {
    sqlx::query!("update matcher_version set version = version + 1").execute(tx.conn().await?).await?;
    Ok(())
}

async fn count_executing(tx: &mut Tx, new: &Matchers) -> Result<()> {
    let rows = sqlx::query!(
        r#"select t.id, s.kind, (
               select jsonb_object_agg(f, s.metadata -> f) from unnest($2::text[]) f where s.metadata ? f
           ) as metadata, greatest(0, coalesce(t.expected_count - t.success - t.failures, 0)) as "remaining!"
           from task t join task_spec s on s.id = t.id
           where t.status in ('claimed', 'running') and s.kind = any($1) order by t.id for update of t"#,
        &new.kinds() as &[&str],
        &new.fields() as &[&str],
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let occupied: Vec<(Uuid, i64, Vec<MatcherKey>)> = rows
        .iter()
        .map(|row| {
            (row.id, row.remaining, new.occupied(&row.kind, Some(row.metadata.as_ref().unwrap_or(&Value::Null))))
        })
        .collect();
    let keys: BTreeSet<MatcherKey> = occupied.iter().flat_map(|(_, _, keys)| keys).cloned().collect();
    let slots = slots::lock(tx, keys, &BTreeSet::new()).await?;
    let mut by_task: BTreeMap<Uuid, Vec<String>> = BTreeMap::new();
    for (task, remaining, keys) in &occupied {
        for slot in keys.iter().filter_map(|key| slots.id(key)) {
            tx.slot(slot, 1, *remaining);
            by_task.entry(*task).or_default().push(slot.to_string());
        }
    }
    sqlx::query!(
        "update task t set slots = coalesce(t.slots, '{}') || u.slots::bigint[]
         from unnest($1::uuid[], $2::text[]) u(id, slots) where t.id = u.id",
        &by_task.keys().copied().collect::<Vec<_>>(),
        &by_task.values().map(|slots| format!("{{{}}}", slots.join(","))).collect::<Vec<_>>(),
    )
    .execute(tx.conn().await?)
    .await?;
    Ok(())
}

/// The rules that tasks alive carry, each once. An index has those whose flag says so, which are all but those that an
/// instance from before the flag has created: these are found by a look through all batches that are not complete.
async fn carried(tx: &mut Tx, flagged: bool) -> Result<Vec<String>> {
    let rules = if flagged {
        sqlx::query_scalar!(
            r#"select distinct s.rules as "rules!" from task t join task_spec s on s.id = t.id
               where t.ended_at is null and t.flags & 256 <> 0 and s.rules is not null"#
        )
        .fetch_all(tx.conn().await?)
        .await?
    } else {
        sqlx::query_scalar!(
            r#"select distinct s.rules as "rules!" from batch b join task_spec s on s.batch_id = b.id
               join task t on t.id = s.id
               where b.completed_at is null and s.rules is not null and t.ended_at is null and t.flags & 256 = 0"#
        )
        .fetch_all(tx.conn().await?)
        .await?
    };
    Ok(rules)
}

/// Retires matchers that no task alive carries, and deletes retired ones whose slots are gone. Answers how many.
pub async fn forget_unused(session: &Session) -> Result<u64> {
    let mut tx = session.begin(Actor::Loop("retention")).await?;
    let now = tx.store.clock().param();
    let old = sqlx::query!(
        "select id, kind, fields from matcher where retired_at is null
           and created_at < coalesce($1, statement_timestamp()) - make_interval(mins => $2)",
        now,
        YOUNG_MINS
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let mut unused: HashMap<(String, Vec<String>), i32> =
        old.into_iter().map(|row| ((row.kind, row.fields), row.id)).collect();
    for flagged in [true, false] {
        if unused.is_empty() {
            break;
        }
        for rules in carried(&mut tx, flagged).await? {
            let rules: Vec<Rule> = serde_json::from_str(&rules).map_err(Error::corrupt)?;
            for matcher in rules.iter().map(Rule::matcher) {
                unused.remove(&(matcher.kind.clone(), matcher.fields.clone()));
            }
        }
    }
    let unused: Vec<i32> = unused.into_values().collect();
    if !unused.is_empty() {
        lock_out_claims(&mut tx).await?;
        sqlx::query!(
            "update matcher set retired_at = coalesce($2, statement_timestamp()) where id = any($1)",
            &unused,
            now
        )
        .execute(tx.conn().await?)
        .await?;
        changed(&mut tx).await?;
    }
    let deleted = sqlx::query!(
        "delete from matcher m where m.retired_at is not null and not exists (select from slot s where s.matcher_id = m.id)"
    )
    .execute(tx.conn().await?)
    .await?
    .rows_affected();
    tx.commit().await?;
    Ok(unused.len() as u64 + deleted)
}
