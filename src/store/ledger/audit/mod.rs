//! Compares counters and derived columns with the rows they stand for. Both change in the transaction that changes the
//! rows, so within one snapshot they agree, whatever is going on; a difference is a fault.

mod counters;
mod derived_columns;

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::time::Duration;

use uuid::Uuid;

use crate::store::{Patience, Result, Store};

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Counter {
    /// Slots of rules against the tasks that execute.
    Slots,
    /// Parked tasks against the gates they wait for.
    BlockedGroups,
    /// The counters of batches against their tasks.
    Batches,
    /// How many parents a task waits for against its open parents.
    Waiting,
    /// All tasks by status.
    Totals,
    /// Columns that repeat what other columns say, for an index.
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
    says: String,
    is: String,
}

impl Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { counter, says, is, .. } = self;
        match &self.entry {
            Entry::Slot(id) | Entry::BlockedGroup(id) => write!(f, "{}: {id}: says {says}, is {is}", counter.as_str()),
            Entry::Batch(id) | Entry::Task(id) | Entry::Derived(id) => {
                write!(f, "{}: {id}: says {says}, is {is}", counter.as_str())
            }
            Entry::Totals => write!(f, "{}: says {says}, is {is}", counter.as_str()),
        }
    }
}

/// How much is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// What concerns tasks that are alive: cheap enough to be done regularly.
    Alive,
    /// Every row.
    All,
}

/// Compares everything in one snapshot; at most a thousand differences of a kind. The server gives up after `limit`.
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

/// Mends what `audit` has found: each counter in a transaction of its own, derived columns all at once, in chunks.
pub async fn repair(store: &Store, found: &[Difference]) -> Result<()> {
    if found.iter().any(|difference| difference.counter == Counter::Derived) {
        derived_columns::repair(store).await?;
    }
    for difference in found.iter().filter(|difference| difference.counter != Counter::Derived) {
        store.retrying(Patience::Long, |session| counters::repair(session, &difference.entry)).await?;
    }
    Ok(())
}

/// How many differences there are, by counter.
pub fn by_counter(found: &[Difference]) -> BTreeMap<Counter, usize> {
    let mut counts: BTreeMap<Counter, usize> = Counter::ALL.into_iter().map(|counter| (counter, 0)).collect();
    for difference in found {
        *counts.entry(difference.counter).or_default() += 1;
    }
    counts
}
