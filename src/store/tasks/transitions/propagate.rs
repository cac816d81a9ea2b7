//! What the end of tasks does to the tasks below them.

use std::collections::HashSet;

use uuid::Uuid;

use super::write;
use crate::domain::graph::{self, Edge};
use crate::domain::task::lifecycle::{Moment, Settled, Transition};
use crate::domain::task::{Flags, Task};
use crate::store::tasks::lock;
use crate::store::{Result, Tx};

/// One pass, however deep the graph is: the whole cascade is found by one query, which goes on from alive tasks only,
/// locked by another and written like any other transitions.
pub(super) async fn propagate(tx: &mut Tx, settled: &[Settled], moment: Moment) -> Result<Vec<Transition>> {
    let mut below = Below::find(tx, settled).await?;
    let mut locked = lock::by_ids(tx, &below.children).await?;
    // Links never change, except that a task may get children in a new batch as long as nobody holds it. One that was
    // locked only now may have got some since the links were read; and one that had ended then may be alive again.
    while locked.tasks.iter().any(|task| task.flags.has(Flags::IN_OTHER_BATCHES) || below.stopped_short_of(task)) {
        let again = Below::find(tx, settled).await?;
        let known = again.children == below.children;
        below = again;
        if known {
            break;
        }
        locked = lock::by_ids(tx, &below.children).await?;
    }
    // They may have changed after those above them were locked.
    let moment = moment.not_before(locked.moment);
    let following = graph::propagate(settled, &below.edges, &locked.tasks, moment);
    write(tx, &following, moment.now).await?;
    Ok(following)
}

/// Everything that the end of some tasks can reach.
struct Below {
    edges: Vec<Edge>,
    /// In order, each once.
    children: Vec<Uuid>,
    /// Those that fall if they are alive.
    needy: HashSet<Uuid>,
    parents: HashSet<Uuid>,
}

impl Below {
    async fn find(tx: &mut Tx, settled: &[Settled]) -> Result<Below> {
        let (good, bad): (Vec<Settled>, Vec<Settled>) = settled.iter().partition(|s| s.outcome().is_success());
        let ids = |of: &[Settled]| of.iter().map(|s| s.id()).collect::<Vec<Uuid>>();
        // `offset 0` keeps the look-ups one by one over the key: without statistics, or with those of flat graphs, a
        // hash join over the whole table was chosen for every level (7 s for a chain of 10,000, instead of 0.3 s).
        let edges = sqlx::query!(
            r#"with recursive falling(id) as (
                   select unnest($2::uuid[])
                   union
                   select l.child_id from falling f
                   cross join lateral (select child_id from link where parent_id = f.id and requires_success offset 0) l
                   cross join lateral (select from task where id = l.child_id and ended_at is null offset 0) t
               )
               select l.parent_id as "parent_id!", l.child_id as "child_id!", l.requires_success as "requires_success!"
               from link l where l.parent_id = any($1)
               union all
               select l.parent_id, l.child_id, l.requires_success
               from falling f cross join lateral (select * from link where parent_id = f.id offset 0) l"#,
            &ids(&good),
            &ids(&bad),
        )
        .map(|row| Edge { parent: row.parent_id, child: row.child_id, requires_success: row.requires_success })
        .fetch_all(tx.conn().await?)
        .await?;
        let mut children: Vec<Uuid> = edges.iter().map(|edge| edge.child).collect();
        children.sort_unstable();
        children.dedup();
        let good: HashSet<Uuid> = good.iter().map(|s| s.id()).collect();
        let falls = |edge: &&Edge| edge.requires_success && !good.contains(&edge.parent);
        let needy = edges.iter().filter(falls).map(|edge| edge.child).collect();
        let parents = edges.iter().map(|edge| edge.parent).collect();
        Ok(Below { edges, children, needy, parents })
    }

    /// It falls, and what is below it was not looked for.
    fn stopped_short_of(&self, task: &Task) -> bool {
        let goes_on = !task.status.is_terminal() && task.flags.has(Flags::HAS_CHILDREN);
        goes_on && self.needy.contains(&task.id) && !self.parents.contains(&task.id)
    }
}
