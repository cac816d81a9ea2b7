//! Dead ends: what looks upward from tasks that end badly, to parents on which nothing alive depends any more.
//!
//! Everything else locks rows from parents to children, in the order of their ids. This goes the other way, so:
//!
//! - Nothing is missed. [`found`] is asked after the bad ends are written. It locks the alive ancestors, and counts
//!   their alive children only then, in a statement of its own. Two last children that end at the same time queue up
//!   for the row of their parent; whoever gets it second sees what the first has committed.
//! - Deadlocks are no part of the normal course. Whoever ends a parent holds it and wants its children; whoever ends
//!   another parent of such a child would hold the child and want the first one. With many parents of one child that
//!   would be the rule, and each time a second goes by before the server notices. So those who are about to end tasks
//!   badly call [`lock_ancestors`] before they write anything: if ancestors may fall, they give back what they have locked and
//!   lock all that the end can reach, up and down, in the order of ids. What has changed between the two shows when
//!   they decide again, and a link that `lock_ancestors` did not see yet costs a deadlock at worst, which is repeated.
//!
//! Batches without dead ends pay for none of it: the flags of the tasks say so.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use uuid::Uuid;

use crate::domain::graph::dead_end::{self, Upward};
use crate::domain::task::lifecycle::{Decision, Moment, Transition};
use crate::domain::task::{Flags, Task};
use crate::store::tasks::lock::{self, LockedTasks};
use crate::store::{Result, Tx};

/// Locks all that the end of these tasks can reach, if `decide` is about to end one of them badly and ancestors of
/// what then falls are alive. Nothing may have been written yet. The rows may be others than before: decide again.
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
    // What falls and what hangs on it, which would be locked anyway; and what is above that.
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
    tx.anew().await?;
    let mut wider = lock::by_ids(tx, &all.into_iter().collect::<Vec<_>>()).await?;
    wider.tasks.retain(|task| asked.contains(&task.id));
    Ok(wider)
}

/// The dead ends above `ended`, which have ended badly in this transaction and tell their parents, and the moment at which
/// they are found: not before the last change of one of them. While a batch is
/// stopped its own tasks are left out: they are canceled anyway.
pub(in crate::store) async fn found(
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
        let told = links.iter().filter(|link| link.tells).map(|link| link.parent);
        let new: BTreeSet<Uuid> = told.filter(|id| !known.contains(id)).collect();
        // Only when nothing new has come since they were locked are the links those of the locked rows.
        if new.is_empty() {
            let alive = alive_children(tx, &links, &ancestors).await?;
            return Ok((dead_end::dead_ends(ended, &links, &ancestors, alive, moment), moment));
        }
        let locked = lock::by_ids(tx, &new.into_iter().collect::<Vec<_>>()).await?;
        moment = moment.not_before(locked.moment);
        ancestors.extend(locked.tasks);
    }
}

/// From `ended`, and from each alive ancestor that can be reached over those that tell their parents, to the alive
/// tasks above. One look-up after the other, as in the cascade downward.
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

/// How many children of each are alive, counted no further than to one that is no ancestor itself: a task with ten
/// thousand children is not counted through for each that ends. From the last one on, which is the last to end.
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
