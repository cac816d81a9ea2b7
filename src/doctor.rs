//! `reprise doctor`: counts slots, batches, waiting tasks and totals anew, compares derived columns, says what differs,
//! and mends it if asked to.

use std::time::Duration;

use crate::output::print;
use crate::store::ledger::audit::{self, Extent};
use crate::store::{self, Store};

/// Differences printed one by one.
const SHOWN: usize = 20;
/// Mending one thing can show another: a slot that was freed, a child that moves its batch.
const ROUNDS: usize = 5;
/// Time to examine everything. Whoever asks for it is willing to wait.
const LIMIT: Duration = Duration::from_secs(3600);

/// Prints what it finds. An error is the one line for the end: what could not be examined, or is still wrong.
pub async fn run(store: &Store, fix: bool) -> Result<(), String> {
    if !store.is_migrated().await.map_err(|error| error.to_string())? {
        return Err("the tables are not up to date; run `reprise migrate` first".into());
    }
    let mut differences = examine(store).await?;
    for (counter, count) in audit::by_counter(&differences) {
        let found = if count == 0 { "ok".into() } else { format!("{count} wrong") };
        print(&format!("{:<9} {found}\n", counter.as_str()))?;
    }
    for difference in differences.iter().take(SHOWN) {
        print(&format!("  {difference}\n"))?;
    }
    if differences.len() > SHOWN {
        print(&format!("  and {} more\n", differences.len() - SHOWN))?;
    }
    if differences.is_empty() {
        return Ok(());
    }
    if !fix {
        return Err(format!("{} differences; `reprise doctor --fix` mends them", differences.len()));
    }
    for _ in 0..ROUNDS {
        audit::repair(store, &differences).await.map_err(|error| error.to_string())?;
        differences = examine(store).await?;
        if differences.is_empty() {
            return print("repaired\n");
        }
    }
    Err(format!("{} differences are left, the first is {}", differences.len(), differences[0]))
}

async fn examine(store: &Store) -> Result<Vec<audit::Difference>, String> {
    // The server ends its statements itself. One that does not answer any more is not waited for.
    let examined = tokio::time::timeout(LIMIT + store.limit(), audit::audit(store, Extent::All, LIMIT));
    let examined = examined.await.unwrap_or_else(|_| Err(store::Error::too_late(LIMIT)));
    examined.map_err(|error| error.to_string())
}
