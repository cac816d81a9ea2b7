//! The audit: compares counters and derived columns with the rows that they summarize, and repairs them. They change in
//! the transaction that changes the rows, so within one snapshot they agree, whatever is going on. A difference is a
//! bug. The audit itself never writes; only the repair does.

mod counters;
mod derived_columns;

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::time::Duration;

use uuid::Uuid;

use crate::store::{Patience, Result, Store};

/// A group of counters or columns that the audit compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Counter {
    /// Slots of rules, compared with the executing tasks.
    Slots,
    /// Blocked groups, compared with the slot limits that they wait for.
    BlockedGroups,
    /// Counters of batches, compared with their tasks.
    Batches,
    /// Wait counts of tasks, compared with their parents that have not ended.
    Waiting,
    /// Counts by status, compared with all tasks.
    Totals,
    /// Columns that repeat other columns for an index, compared with those columns.
    Derived,
}

impl Counter {
    pub const ALL: [Counter; 6] =
        [Counter::Slots, Counter::BlockedGroups, Counter::Batches, Counter::Waiting, Counter::Totals, Counter::Derived];

    pub const fn as_str(self) -> &'static str {
        match self {
            Counter::Slots => "slots",
            Counter::BlockedGroups => "blocked groups",
            Counter::Batches => "batches",
            Counter::Waiting => "waiting",
            Counter::Totals => "totals",
            Counter::Derived => "derived",
        }
    }
}

/// One counter or column.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Entry {
    Slot(i64),
    BlockedGroup(i64),
    Batch(Uuid),
    Task(Uuid),
    Totals,
    Derived(Uuid),
}

/// A counter, or a derived column, that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub counter: Counter,
    entry: Entry,
    recorded: String,
    actual: String,
}

impl Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { counter, recorded, actual, .. } = self;
        match &self.entry {
            Entry::Slot(id) | Entry::BlockedGroup(id) => {
                write!(f, "{}: {id}: recorded {recorded}, actual {actual}", counter.as_str())
            }
            Entry::Batch(id) | Entry::Task(id) | Entry::Derived(id) => {
                write!(f, "{}: {id}: recorded {recorded}, actual {actual}", counter.as_str())
            }
            Entry::Totals => write!(f, "{}: recorded {recorded}, actual {actual}", counter.as_str()),
        }
    }
}

/// How much the audit reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Only rows that concern alive tasks: cheap enough to run regularly.
    Alive,
    /// Every row.
    All,
}

/// Compares everything in one snapshot, and returns at most a thousand differences per counter. Fails after `limit`.
pub async fn audit(store: &Store, extent: Extent, limit: Duration) -> Result<Vec<Difference>> {
    store
        .snapshot(limit, async |tx| {
            let mut found = Vec::new();
            for counter in Counter::ALL {
                found.extend(match counter {
                    Counter::Slots => counters::slots(tx).await?,
                    Counter::BlockedGroups => counters::blocked_groups(tx).await?,
                    Counter::Batches => counters::batches(tx, extent).await?,
                    Counter::Waiting => counters::waiting(tx).await?,
                    Counter::Totals if extent == Extent::Alive => Vec::new(),
                    Counter::Totals => counters::totals(tx).await?,
                    Counter::Derived => derived_columns::audit(tx, extent).await?,
                });
            }
            Ok(found)
        })
        .await
}

/// Repairs what `audit` has found: each counter in a transaction of its own, and all derived columns together, in
/// chunks.
pub async fn repair(store: &Store, found: &[Difference]) -> Result<()> {
    if found.iter().any(|difference| difference.counter == Counter::Derived) {
        derived_columns::repair(store).await?;
    }
    for difference in found.iter().filter(|difference| difference.counter != Counter::Derived) {
        store.retrying(Patience::Long, |session| counters::repair(session, &difference.entry)).await?;
    }
    Ok(())
}

/// Counts the differences by counter.
pub fn by_counter(found: &[Difference]) -> BTreeMap<Counter, usize> {
    let mut counts: BTreeMap<Counter, usize> = Counter::ALL.into_iter().map(|counter| (counter, 0)).collect();
    for difference in found {
        *counts.entry(difference.counter).or_default() += 1;
    }
    counts
}
