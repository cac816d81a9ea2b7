//! Dead ends: the search upward from tasks that end badly (Failure or Canceled), to parents on which no alive task
//! depends any more. The domain decides which parents are canceled; this file finds and locks them.
//!
//! All other statements lock rows from parents to children, in the order of their ids. This search goes the other way:
//!
//! - It misses nothing. [`find`] runs after the bad ends are written. It locks the alive ancestors, and only then
//!   counts their alive children, in a statement of its own. Two last children that end at the same time queue up for
//!   the row of their parent, and the second transaction sees what the first has committed.
//! - It causes no deadlocks in normal operation. A transaction that ends a parent holds it and then locks its
//!   children; a transaction that ends another parent of such a child would hold the child and then lock the first
//!   parent. With many parents of one child this would happen constantly, and the server takes a second to detect each
//!   deadlock. So a
//!   transaction that is about to end tasks badly calls [`lock_ancestors`] before it writes anything: if ancestors may
//!   be canceled, it releases its locks and locks all that the end can reach, up and down, in the order of ids. What
//!   has changed in between shows when the caller decides again. A link that `lock_ancestors` did not see yet costs a
//!   deadlock at worst, and the transaction is repeated.
//!
//! Batches without `dead_end_cancel` pay nothing: the flags of their tasks exclude them.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use uuid::Uuid;

use crate::domain::graph::dead_end::{self, Upward};
use crate::domain::task::lifecycle::{Decision, Moment, Transition};
use crate::domain::task::{Flags, Task};
use crate::store::tasks::lock::{self, LockedTasks};
use crate::store::{Result, Tx};

/// Locks all that the end of these tasks can reach, if `decide` ends one of them badly and the tasks that then fail
/// have alive ancestors. Nothing may have been written yet. The tasks may have changed, so the caller must decide
/// again.
pub async fn lock_ancestors(
    tx: &mut Tx,
    locked: LockedTasks,
    decide: impl Fn(&Task, Moment) -> Decision,
) -> Result<LockedTasks> {
    let reaches = |task: &Task| {
        task.flags.has(Flags::TELLS_PARENTS) || task.flags.has(Flags::DEAD_END) && task.flags.has(Flags::HAS_CHILDREN)
    };
    let ends_badly = |task: &Task| decide(task, locked.moment).is_ok_and(|t| t.is_some_and(|t| t.ends_badly()));
    let ending: Vec<Uuid> = locked.tasks.iter().filter(|t| reaches(t) && ends_badly(t)).map(|t| t.id).collect();
    if ending.is_empty() {
        return Ok(locked);
    }
    // The tasks that fail and their children, which would be locked anyway, and the ancestors of those that fail.
    let rows = sqlx::query!(
        r#"with recursive down(id) as (
               select unnest($1::uuid[])
               union
               select l.child_id from down d cross join lateral (
                   select child_id from link where parent_id = d.id and requires_success offset 0
               ) l
           ), up(id, tells, above) as (
               select t.id, t.flags & $3 <> 0, false from down d cross join lateral (
                   select id, flags from task where id = d.id offset 0
               ) t
               union
               select p.id, p.flags & $3 <> 0, true from up u
               cross join lateral (select parent_id from link where child_id = u.id offset 0) l
               cross join lateral (
                   select id, flags from task
                   where id = l.parent_id and ended_at is null and flags & $2 <> 0 offset 0
               ) p
               where u.tells
           )
           select id as "id!", above as "above!" from up
           union all
           select l.child_id, false
           from down d cross join lateral (select child_id from link where parent_id = d.id offset 0) l"#,
        &ending,
        Flags::DEAD_END.0,
        Flags::TELLS_PARENTS.0,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let below: HashSet<Uuid> = rows.iter().filter(|row| !row.above).map(|row| row.id).collect();
    if rows.iter().all(|row| below.contains(&row.id)) {
        return Ok(locked);
    }
    let asked: BTreeSet<Uuid> = locked.tasks.iter().map(|t| t.id).collect();
    let all: BTreeSet<Uuid> = asked.iter().copied().chain(rows.iter().map(|row| row.id)).collect();
    tx.restart().await?;
    let mut wider = lock::by_ids(tx, &all.into_iter().collect::<Vec<_>>()).await?;
    wider.tasks.retain(|task| asked.contains(&task.id));
    Ok(wider)
}

/// Finds the dead ends above the `ended` tasks, which have the flag `TELLS_PARENTS` and have ended badly in this
/// transaction. Returns the cancellations of the dead ends and the moment of that decision, which is not before the last
/// change of one of them. The tasks of a `stopped` batch are left out, because they are canceled anyway.
pub(in crate::store) async fn find(
    tx: &mut Tx,
    ended: &[Uuid],
    stopped: Option<Uuid>,
    mut moment: Moment,
) -> Result<(Vec<Transition>, Moment)> {
    let mut ancestors: Vec<Task> = Vec::new();
    loop {
        let links = links_above(tx, ended, stopped).await?;
        if links.is_empty() {
            return Ok((Vec::new(), moment));
        }
        let known: HashSet<Uuid> = ancestors.iter().map(|t| t.id).collect();
        let parents = links.iter().filter(|link| link.tells).map(|link| link.parent);
        let new: BTreeSet<Uuid> = parents.filter(|id| !known.contains(id)).collect();
        // The links are those of the locked rows only if no new ancestor has appeared since they were locked.
        if new.is_empty() {
            let alive = alive_children(tx, &links, &ancestors).await?;
            return Ok((dead_end::dead_ends(ended, &links, &ancestors, alive, moment), moment));
        }
        let locked = lock::by_ids(tx, &new.into_iter().collect::<Vec<_>>()).await?;
        moment = moment.not_before(locked.moment);
        ancestors.extend(locked.tasks);
    }
}

/// Returns the links to alive parents from `ended` and from each alive ancestor that is reached through tasks with
/// `TELLS_PARENTS`. `offset 0` makes each lookup go by the key, as in the cascade downward.
async fn links_above(tx: &mut Tx, ended: &[Uuid], stopped: Option<Uuid>) -> Result<Vec<Upward>> {
    Ok(sqlx::query_as!(
        Upward,
        r#"with recursive up(id, tells) as (
               select unnest($1::uuid[]), true
               union
               select p.id, p.flags & $3 <> 0 from up u
               cross join lateral (select parent_id from link where child_id = u.id offset 0) l
               cross join lateral (
                   select id, flags from task
                   where id = l.parent_id and ended_at is null and flags & $2 <> 0 and batch_id is distinct from $4
                   offset 0
               ) p
               where u.tells
           )
           select u.id as "child!", p.id as "parent!", u.tells as "tells!" from up u
           cross join lateral (select parent_id from link where child_id = u.id offset 0) l
           cross join lateral (
               select id from task
               where id = l.parent_id and ended_at is null and flags & $2 <> 0 and batch_id is distinct from $4
               offset 0
           ) p"#,
        ended,
        Flags::DEAD_END.0,
        Flags::TELLS_PARENTS.0,
        stopped,
    )
    .fetch_all(tx.conn().await?)
    .await?)
}

/// Counts the alive children of each ancestor, but stops at the first child that is not an ancestor itself, so that it
/// does not count ten thousand children each time one ends. It counts from the last child on, which is the last to end.
async fn alive_children(tx: &mut Tx, links: &[Upward], ancestors: &[Task]) -> Result<BTreeMap<Uuid, i64>> {
    let among = dead_end::alive_among(links, ancestors);
    let rows = sqlx::query!(
        r#"select a.id as "id!", c.alive as "alive!" from unnest($1::uuid[], $2::bigint[]) a(id, most)
           cross join lateral (
               select count(*) as alive from (
                   select from link l
                   cross join lateral (select from task where id = l.child_id and ended_at is null offset 0) t
                   where l.parent_id = a.id order by l.child_id desc limit a.most
               ) c
           ) c"#,
        &among.keys().copied().collect::<Vec<_>>(),
        &among.values().map(|count| count + 1).collect::<Vec<_>>(),
    )
    .fetch_all(tx.conn().await?)
    .await?;
    Ok(rows.into_iter().map(|row| (row.id, row.alive)).collect())
}
