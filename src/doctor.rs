//! `reprise doctor`: recounts slots, blocked groups, batches, waiting tasks and totals, compares derived columns,
//! prints the differences and, with `--fix`, repairs them.

use std::time::Duration;

use crate::output::print;
use crate::store::ledger::audit::{self, Counter, Extent};
use crate::store::{self, Store};

/// Maximum number of differences that are printed.
const SHOWN: usize = 20;
/// Maximum number of repairs. A repair can reveal another difference: a slot is released, a child changes its batch.
const ROUNDS: usize = 5;
/// Time limit of the audit, which reads every task.
const LIMIT: Duration = Duration::from_secs(3600);

/// Audits all counters and prints the result. An error is the last line to print: why the audit failed, or what
/// differs.
pub async fn run(store: &Store, fix: bool) -> Result<(), String> {
    if !store.is_migrated().await.map_err(|error| error.to_string())? {
        return Err("the tables are out of date; run `reprise migrate` first".into());
    }
    let mut differences = audit_all(store).await?;
    let width = Counter::ALL.iter().map(|counter| counter.as_str().len()).max().unwrap_or(0);
    for (counter, count) in audit::by_counter(&differences) {
        let found = if count == 0 { "ok".into() } else { format!("{count} wrong") };
        print(&format!("{:<width$}  {found}\n", counter.as_str()))?;
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
        return Err(match differences.len() {
            1 => "1 difference; `reprise doctor --fix` repairs it".into(),
            count => format!("{count} differences; `reprise doctor --fix` repairs them"),
        });
    }
    for _ in 0..ROUNDS {
        audit::repair(store, &differences).await.map_err(|error| error.to_string())?;
        differences = audit_all(store).await?;
        if differences.is_empty() {
            return print("repaired\n");
        }
    }
    Err(match differences.as_slice() {
        [only] => format!("1 difference remains: {only}"),
        many => format!("{} differences remain, the first: {}", many.len(), many[0]),
    })
}

async fn audit_all(store: &Store) -> Result<Vec<audit::Difference>, String> {
    // The server ends its statements after the limit. The timeout is for a server that no longer answers.
    let result = tokio::time::timeout(LIMIT + store.limit(), audit::audit(store, Extent::All, LIMIT));
    let result = result.await.unwrap_or_else(|_| Err(store::Error::timed_out(LIMIT)));
    result.map_err(|error| error.to_string())
}
