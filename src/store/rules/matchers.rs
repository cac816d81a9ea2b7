//! Matchers: the kinds and metadata fields by which executing tasks are counted. They are few, every instance knows
//! them, and they are retired when no alive task has a rule with them.
//!
//! Claims hold [`CLAIM_LOCK`] shared. A new matcher counts the executing tasks under the exclusive lock, so no claim
//! can slip in between the count and the registration. Ends of executions need no such care: they release the slots
//! that their row lists, and counting a new matcher locks those rows. A transaction with the exclusive lock must not
//! wait long for rows.
//!
//! A claim that meets a rule with an unknown matcher skips the task and names the matcher, to be registered. So
//! retiring a matcher too early costs a moment, and never lets a blocked task start.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use serde_json::Value;
use uuid::Uuid;

use super::{MatcherKey, slots};
use crate::domain::rules::{Rule, RuleMatcher, key_of};
use crate::domain::task::Flags;
use crate::store::{Actor, Error, Patience, Result, Session, Store, Tx};

/// The claim lock: the advisory lock between claims and changes of matchers. Claims take it when they begin.
pub(in crate::store) const CLAIM_LOCK: i64 = 0x7265_7072_6973_6501;
/// The most new matchers in one request: claims of all instances wait while they are counted.
pub const MOST_NEW: usize = 1000;
/// The pause between two tries to register, after another transaction held a lock.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// The age in minutes from which a matcher may be retired.
const MIN_AGE_MINS: i32 = 10;

/// The matchers that this instance knows, shared by all its transactions.
#[derive(Clone, Debug, Default)]
pub(in crate::store) struct MatcherCache(Arc<RwLock<Arc<Matchers>>>);

/// The registered matchers at one version of their table.
#[derive(Clone, Debug, Default)]
pub struct Matchers {
    /// The version of the table and its highest id, which change with its content.
    version: (i64, i32),
    /// Whether an alive task has rules.
    has_rules: bool,
    ids: HashMap<(String, Vec<String>), i32>,
    by_kind: HashMap<String, Vec<(i32, Vec<String>)>>,
}

impl Matchers {
    /// Whether no rules are in force: nothing is counted and no alive task has rules.
    pub fn is_idle(&self) -> bool {
        self.ids.is_empty() && !self.has_rules
    }

    /// Returns the kinds of tasks that are counted.
    pub fn kinds(&self) -> Vec<&str> {
        self.by_kind.keys().map(String::as_str).collect()
    }

    /// Returns every metadata field that a matcher reads, each once.
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

    /// Returns the matchers of these rules that are not registered.
    pub(in crate::store) fn unknown_of<'a>(&self, rules: impl Iterator<Item = &'a Rule>) -> BTreeSet<RuleMatcher> {
        rules.map(Rule::matcher).filter(|matcher| !self.knows(matcher)).cloned().collect()
    }

    /// Returns the slots that a task occupies while it executes.
    pub(in crate::store) fn occupied(&self, kind: &str, metadata: Option<&Value>) -> Vec<MatcherKey> {
        let matchers = self.by_kind.get(kind).into_iter().flatten();
        matchers.filter_map(|(id, fields)| Some((*id, key_of(fields, metadata)?))).collect()
    }

    /// Returns the slot that a rule limits. The metadata has the rule's fields, because fields are never removed from
    /// it.
    pub(in crate::store) fn limited_slot(&self, rule: &Rule, metadata: Option<&Value>) -> Option<MatcherKey> {
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

/// Returns all registered matchers. The transaction must hold [`CLAIM_LOCK`], shared or exclusive.
pub(in crate::store) async fn all(tx: &mut Tx) -> Result<Arc<Matchers>> {
    let state = sqlx::query!(
        r#"select version, coalesce((select max(id) from matcher), 0) as "last!",
               exists (select from task where ended_at is null and flags & 256 <> 0) as "ruled!"
           from matcher_version"#
    )
    .fetch_one(tx.conn().await?)
    .await?;
    const { assert!(Flags::HAS_RULES.0 == 256) };
    let (version, has_rules) = ((state.version, state.last), state.ruled);
    let known = tx.store.matchers.get();
    if known.version == version {
        if known.has_rules == has_rules {
            return Ok(known);
        }
        return Ok(cache(tx, Matchers { has_rules, ..(*known).clone() }));
    }
    let rows = sqlx::query!("select id, kind, fields from matcher where retired_at is null order by id")
        .fetch_all(tx.conn().await?)
        .await?;
    let mut all = Matchers { version, has_rules, ..Matchers::default() };
    for row in rows {
        all.add(row.id, row.kind, row.fields);
    }
    Ok(cache(tx, all))
}

fn cache(tx: &Tx, all: Matchers) -> Arc<Matchers> {
    let all = Arc::new(all);
    tx.store.matchers.put(Arc::clone(&all));
    all
}

/// Returns the matchers of these rules that this instance does not know.
pub fn unknown<'a>(store: &Store, rules: impl IntoIterator<Item = &'a Rule>) -> BTreeSet<RuleMatcher> {
    let known = store.matchers.get();
    let all: BTreeSet<&RuleMatcher> = rules.into_iter().map(Rule::matcher).collect();
    all.into_iter().filter(|matcher| !known.knows(matcher)).cloned().collect()
}

/// Registers matchers before a task with them is stored. A new matcher counts the tasks that already execute. Retries
/// while another transaction holds a lock, up to the store's time limit.
pub async fn register(store: &Store, wanted: &BTreeSet<RuleMatcher>) -> Result<()> {
    if wanted.is_empty() {
        return Ok(());
    }
    let until = Instant::now() + store.limit();
    loop {
        match try_register(store, wanted).await {
            Err(error) if error.is_busy() && Instant::now() < until => tokio::time::sleep(RETRY_PAUSE).await,
            result => return result,
        }
    }
}

/// Registers matchers as [`register`] does, but tries once and hardly waits for locks.
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
    bump_version(&mut tx).await?;
    // The cache is not changed here: the next claim reads them, once they are committed.
    tx.commit().await
}

/// Takes the claim lock exclusively: until the end of the transaction, no instance claims.
async fn lock_out_claims(tx: &mut Tx) -> Result<()> {
    sqlx::query!("select pg_advisory_xact_lock($1)", CLAIM_LOCK).execute(tx.conn().await?).await?;
    Ok(())
}

/// Tells every instance that the table has changed.
async fn bump_version(tx: &mut Tx) -> Result<()> {
    sqlx::query!("update matcher_version set version = version + 1").execute(tx.conn().await?).await?;
    Ok(())
}

/// Counts the executing tasks that new matchers match, and adds the slots to their rows.
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

/// Returns the distinct rules of alive tasks: of those with the flag `HAS_RULES`, which an index holds, or of those
/// without it. An instance of a version before the flag created the latter; they are found in all batches that are not
/// complete.
async fn rules_in_use(tx: &mut Tx, flagged: bool) -> Result<Vec<String>> {
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

/// Retires matchers that no rule of an alive task uses, and deletes retired matchers without slots. Returns how many.
pub async fn forget_unused(session: &Session) -> Result<u64> {
    let mut tx = session.begin(Actor::Loop("retention")).await?;
    let now = tx.store.clock().param();
    let old = sqlx::query!(
        "select id, kind, fields from matcher where retired_at is null
           and created_at < coalesce($1, statement_timestamp()) - make_interval(mins => $2)",
        now,
        MIN_AGE_MINS
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let mut unused: HashMap<(String, Vec<String>), i32> =
        old.into_iter().map(|row| ((row.kind, row.fields), row.id)).collect();
    for flagged in [true, false] {
        if unused.is_empty() {
            break;
        }
        for rules in rules_in_use(&mut tx, flagged).await? {
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
        bump_version(&mut tx).await?;
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
