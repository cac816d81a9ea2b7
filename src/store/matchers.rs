//! Matchers: by what tasks are counted while they execute. They are few, known to every instance, and only ever become
//! more.
//!
//! Claims hold [`GATE`] shared: a matcher that is new counts what executes under the exclusive lock, so no claim can
//! slip in between the count and its being known. Ends of executions need no such care. They release what their row
//! says, and counting a new matcher locks those rows.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, RwLock};

use serde_json::Value;

use super::{Actor, Result, Store, Tx, slots};
use crate::domain::rules::{Matcher, Rule, key_of};

/// The advisory lock between claims and new matchers. Claims take it as they begin.
pub(super) const GATE: i64 = 0x7265_7072_6973_6501;

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
pub(super) async fn all(tx: &mut Tx) -> Result<Arc<Matchers>> {
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
    store.retrying(|| register_once(store, &new)).await
}

async fn register_once(store: &Store, wanted: &BTreeSet<&Matcher>) -> Result<()> {
    let mut tx = store.begin(Actor::Api).await?;
    sqlx::query!("select pg_advisory_xact_lock($1)", GATE).execute(tx.conn()).await?;
    let known = all(&mut tx).await?;
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
    let slots = slots::lock(tx, keys.iter().flatten().cloned().collect(), &BTreeSet::new()).await?;
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
