//! Claimed → Pending, for tasks that an instance returns unstarted.

use uuid::Uuid;

use super::moved::Moved;
use crate::domain::task::status::Status;
use crate::store::tasks::lease::ClaimId;
use crate::store::{Result, Tx};

/// Claimed → Pending, for claims that this instance gives back unstarted. Skips locked tasks, which return when their
/// lease ends.
pub async fn give_back(tx: &mut Tx, claims: &[ClaimId]) -> Result<u64> {
    let (now, by) = (tx.store.clock().param(), tx.store.instance());
    let (ids, numbers): (Vec<Uuid>, Vec<i32>) = claims.iter().copied().unzip();
    let rows = sqlx::query!(
        r#"with held as materialized (
               select id, slots from task where id = any($1) order by id for update skip locked
           )
           update task t set status = 'pending', claimed_by = null, timeout_at = null, slots = null,
               last_updated = greatest(t.last_updated, coalesce($5, statement_timestamp()))
           from unnest($1::uuid[], $2::int[], $3::text[]::task_status[]) u(id, claim, from_status)
           join held h on h.id = u.id
           where t.id = u.id and t.claim = u.claim and t.status = u.from_status and t.claimed_by = $4
           returning t.id, t.batch_id, t.run, t.attempt, t.last_updated, h.slots as "slots?",
               greatest(0, coalesce(t.expected_count - t.success - t.failures, 0)) as "remaining!""#,
        &ids,
        &numbers,
        &vec![Status::Claimed.as_str(); ids.len()] as &[&str],
        by,
        now,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    for row in &rows {
        let (id, batch_id, run, attempt) = (row.id, row.batch_id, row.run, row.attempt);
        let moved = Moved { id, batch_id, run, attempt, last_updated: row.last_updated };
        moved.record(tx, Status::Claimed, Status::Pending, "given_back", None);
        for slot in row.slots.iter().flatten() {
            tx.slot(*slot, -1, -row.remaining);
        }
    }
    Ok(rows.len() as u64)
}
