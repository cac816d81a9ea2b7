//! Derived columns, which repeat a column of another table because an index cannot span two tables: `task.kind_hash` is
//! a hash of `task_spec.kind`, and `task_spec.timeout_secs` repeats `task.timeout_secs`. Every statement that writes
//! the one writes the other, except those of an instance from before the column existed, which may run beside newer
//! ones during an upgrade. This file finds and repairs what it left out. A new derived column must be added here.

use uuid::Uuid;

use super::{Counter, Difference, Entry, Extent};
use crate::store::{Actor, Patience, Result, Session, Store, Tx};

/// Tasks read by one repairing transaction.
const CHUNK: i64 = 10_000;

/// Finds tasks whose derived columns are wrong, at most a thousand.
pub(super) async fn audit(tx: &mut Tx, extent: Extent) -> Result<Vec<Difference>> {
    let rows = sqlx::query!(
        r#"select t.id, t.kind_hash, hashtext(s.kind) as "is_kind_hash!", s.timeout_secs,
                  t.timeout_secs as is_timeout_secs
           from batch b join task_spec s on s.batch_id = b.id join task t on t.id = s.id
           where ($1 or b.completed_at is null)
             and (t.kind_hash <> hashtext(s.kind) or s.timeout_secs <> t.timeout_secs)
           order by 1 limit 1000"#,
        extent == Extent::All,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let shown = |kind_hash: i32, timeout: i32| format!("kind_hash {kind_hash} and timeout_secs {timeout}");
    let difference =
        |id, recorded, actual| Difference { counter: Counter::Derived, entry: Entry::Derived(id), recorded, actual };
    Ok(rows
        .into_iter()
        .map(|row| {
            let recorded = shown(row.kind_hash, row.timeout_secs);
            difference(row.id, recorded, shown(row.is_kind_hash, row.is_timeout_secs))
        })
        .collect())
}

/// Goes through all tasks and repairs those that no other transaction holds. The next run repairs the others.
pub(super) async fn repair(store: &Store) -> Result<()> {
    let mut after = Uuid::nil();
    while let Some(last) = store.retrying(Patience::Long, |session| repair_chunk(session, after)).await? {
        after = last;
    }
    Ok(())
}

/// Repairs a chunk and returns its last task; `None` when there are no more.
async fn repair_chunk(session: Session, after: Uuid) -> Result<Option<Uuid>> {
    let mut tx = session.begin(Actor::Loop("doctor")).await?;
    let last = sqlx::query_scalar!(
        r#"with part as materialized (select id from task where id > $1 order by id limit $2),
           wrong as materialized (
               select t.id, hashtext(s.kind) as kind_hash, t.timeout_secs
               from part p join task t on t.id = p.id join task_spec s on s.id = p.id
               where t.kind_hash <> hashtext(s.kind) or s.timeout_secs <> t.timeout_secs
               order by t.id for update of t, s skip locked
           ), hashes as (
               update task t set kind_hash = w.kind_hash from wrong w where t.id = w.id and t.kind_hash <> w.kind_hash
           ), timeouts as (
               update task_spec s set timeout_secs = w.timeout_secs from wrong w
               where s.id = w.id and s.timeout_secs <> w.timeout_secs
           )
           select id from part order by id desc limit 1"#,
        after,
        CHUNK,
    )
    .fetch_optional(tx.conn().await?)
    .await?;
    tx.commit().await?;
    Ok(last)
}
