//! Propagation: what the end of tasks does to their descendants. The domain decides; this file finds and locks the
//! tasks concerned. It never looks upward (`graph::dead_ends` does).

use std::collections::HashSet;

use uuid::Uuid;

use crate::domain::graph::{self, Edge};
use crate::domain::task::lifecycle::{Moment, Settled, Transition};
use crate::domain::task::{Flags, Task};
use crate::store::tasks::lock;
use crate::store::{Result, Tx};

/// Returns the transitions that follow from settled tasks, and the moment of the decision. One query finds the whole
/// cascade, however deep, going on from alive tasks only, and another locks it.
pub(in crate::store) async fn propagate(
    tx: &mut Tx,
    settled: &[Settled],
    moment: Moment,
) -> Result<(Vec<Transition>, Moment)> {
    let mut downstream = Downstream::find(tx, settled).await?;
    let mut locked = lock::by_ids(tx, &downstream.children).await?;
    // Links never change, except that a task may get children in a new batch while no transaction holds it. A task that
    // was locked only now may have got some since the links were read, and a task that had ended then may be alive
    // again.
    let is_incomplete =
        |found: &Downstream, task: &Task| task.flags.has(Flags::IN_OTHER_BATCHES) || found.misses_children_of(task);
    while locked.tasks.iter().any(|task| is_incomplete(&downstream, task)) {
        let again = Downstream::find(tx, settled).await?;
        let known = again.children == downstream.children;
        downstream = again;
        if known {
            break;
        }
        locked = lock::by_ids(tx, &downstream.children).await?;
    }
    // Children may have changed after their parents were locked.
    let moment = moment.not_before(locked.moment);
    Ok((graph::propagate(settled, &downstream.edges, &locked.tasks, moment), moment))
}

/// Everything that the end of some tasks can reach.
struct Downstream {
    edges: Vec<Edge>,
    /// All children, in order, each once.
    children: Vec<Uuid>,
    /// Children that fail if they are alive.
    failing: HashSet<Uuid>,
    /// Tasks whose children are known.
    parents: HashSet<Uuid>,
}

impl Downstream {
    async fn find(tx: &mut Tx, settled: &[Settled]) -> Result<Downstream> {
        let (good, bad): (Vec<Settled>, Vec<Settled>) = settled.iter().partition(|s| s.outcome().is_success());
        let ids = |of: &[Settled]| of.iter().map(|s| s.id()).collect::<Vec<Uuid>>();
        // `offset 0` makes each lookup go by the key: without statistics, or with those of flat graphs, the planner
        // chose a hash join over the whole table for every level (7 s for a chain of 10,000, instead of 0.3 s).
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
        let fails = |edge: &&Edge| edge.requires_success && !good.contains(&edge.parent);
        let failing = edges.iter().filter(fails).map(|edge| edge.child).collect();
        let parents = edges.iter().map(|edge| edge.parent).collect();
        Ok(Downstream { edges, children, failing, parents })
    }

    /// Whether the task fails and its children were not searched, because it had ended when the links were read.
    fn misses_children_of(&self, task: &Task) -> bool {
        let has_cascade = !task.status.is_terminal() && task.flags.has(Flags::HAS_CHILDREN);
        has_cascade && self.failing.contains(&task.id) && !self.parents.contains(&task.id)
    }
}
