//! Manual retries: finds and locks the tasks to retry, the tasks that failed because of them, and all parents and
//! children of both. The domain decides which of them are revived.

use chrono::TimeDelta;
use uuid::Uuid;

use crate::domain::graph::{self, Edge, NoRevival, Revival};
use crate::domain::task::status::Status;
use crate::store::tasks::{lock, transitions};
use crate::store::{Result, Tx};

/// The tasks to retry.
pub enum Targets {
    /// One task, by its id.
    Named(Uuid),
    /// The tasks among these that are still in Failure once they are locked: other requests may retry them too.
    Failed(Vec<Uuid>),
}

impl Targets {
    fn ids(&self) -> &[Uuid] {
        match self {
            Targets::Named(id) => std::slice::from_ref(id),
            Targets::Failed(ids) => ids,
        }
    }
}

/// Decides the retry of `targets` without writing anything. Parents are locked too: otherwise a task could wait for a
/// parent that has ended meanwhile.
pub async fn decide(
    tx: &mut Tx,
    targets: &Targets,
    cascade: bool,
    stuck_after: TimeDelta,
) -> Result<Result<Decided, NoRevival>> {
    let mut edges = connected_edges(tx, targets).await?;
    let (edges, locked) = loop {
        let ids = affected_ids(targets, &edges);
        let locked = lock::by_ids(tx, &ids).await?;
        // A task may have got children in a new batch before it was locked.
        let again = connected_edges(tx, targets).await?;
        let known = affected_ids(targets, &again) == ids;
        edges = again;
        if known {
            break (edges, locked);
        }
    };
    let mut wanted = targets.ids().to_vec();
    if let Targets::Failed(_) = targets {
        let still = |id: &Uuid| {
            let found = locked.tasks.binary_search_by_key(id, |task| task.id);
            found.is_ok_and(|at| locked.tasks[at].status == Status::Failure)
        };
        wanted.retain(still);
    }
    let decided = graph::revive(&wanted, cascade, &edges, &locked.tasks, stuck_after, locked.moment);
    Ok(decided.map(|revival| Decided { revival, locked }))
}

/// Returns the edges at a target or at a task that required edges connect to it.
async fn connected_edges(tx: &mut Tx, targets: &Targets) -> Result<Vec<Edge>> {
    let edges = sqlx::query!(
        r#"with recursive reached(id) as (
               select unnest($1::uuid[])
               union
               select l.child_id from reached r cross join lateral (
                   select child_id from link where parent_id = r.id and requires_success offset 0
               ) l
           )
           select l.parent_id as "parent_id!", l.child_id as "child_id!", l.requires_success as "requires_success!"
           from reached r cross join lateral (select * from link where parent_id = r.id offset 0) l
           union
           select l.parent_id, l.child_id, l.requires_success
           from reached r cross join lateral (select * from link where child_id = r.id offset 0) l"#,
        targets.ids(),
    )
    .map(|row| Edge { parent: row.parent_id, child: row.child_id, requires_success: row.requires_success })
    .fetch_all(tx.conn().await?)
    .await?;
    Ok(edges)
}

/// Returns the targets and both ends of all edges, in order, each once.
fn affected_ids(targets: &Targets, edges: &[Edge]) -> Vec<Uuid> {
    let mut ids: Vec<Uuid> = targets.ids().to_vec();
    ids.extend(edges.iter().flat_map(|edge| [edge.parent, edge.child]));
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// A decision, with the locked tasks that it concerns.
pub struct Decided {
    pub revival: Revival,
    pub locked: lock::LockedTasks,
}

impl Decided {
    /// Writes the decision.
    pub async fn apply(&self, tx: &mut Tx) -> Result<()> {
        let Revival { retried, revived, waiting } = &self.revival;
        let all: Vec<_> = retried.iter().chain(revived).chain(waiting).cloned().collect();
        transitions::apply(tx, &all, self.locked.moment).await
    }
}

/// Returns the tasks of a batch that failed by themselves, not because of a parent.
pub async fn failed_of_batch(tx: &mut Tx, batch_id: Uuid) -> Result<Vec<Uuid>> {
    Ok(sqlx::query_scalar!(
        "select s.id from task_spec s join task t on t.id = s.id
         where s.batch_id = $1 and t.status = 'failure' and t.failure_type is distinct from 'dependency' order by s.id",
        batch_id
    )
    .fetch_all(tx.conn().await?)
    .await?)
}
