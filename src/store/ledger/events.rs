//! The audit trail: which actor moved which task from which status to which, and why. Events are written in the
//! transaction of the move and never changed.

use std::collections::BTreeMap;

use uuid::Uuid;

use crate::domain::task::status::Status;
use crate::domain::view::{TaskEvent, Timestamp};
use crate::store::page::Page;
use crate::store::tasks::row::read_status;
use crate::store::{Result, Store, Tx};

/// The most tasks in one row.
const PER_ROW: usize = 100;
/// Numbers per row. The number of an event is that of its row times this, plus the position of the task in the row.
const SEQ_PER_ROW: i64 = 1000;

/// The moves of a transaction, with the tasks that made each.
#[derive(Default)]
pub(in crate::store) struct Trail(BTreeMap<Move, Vec<Uuid>>);

/// A change of status, or the creation, of a task in a batch.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::store) struct Move {
    pub batch_id: Uuid,
    pub from: Option<Status>,
    pub to: Status,
    pub cause: &'static str,
    pub run: i32,
    pub attempt: i16,
    /// Details beyond the cause, if any.
    pub reason: Option<String>,
}

/// A row to write. Its tasks are the ids from `first` to `last` of all ids, counted from one.
pub(in crate::store) struct EventRow {
    pub made: Move,
    pub first: i32,
    pub last: i32,
}

impl Trail {
    pub fn add(&mut self, id: Uuid, made: Move) {
        self.0.entry(made).or_default().push(id);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the tasks that moved, each with its new status.
    pub fn moves(&self) -> impl Iterator<Item = (Uuid, Status)> {
        self.0.iter().flat_map(|(made, tasks)| tasks.iter().map(|id| (*id, made.to)))
    }

    /// Returns the ids of all tasks, and the rows.
    pub fn rows(&self) -> (Vec<Uuid>, Vec<EventRow>) {
        let position = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let (mut ids, mut rows) = (Vec::new(), Vec::new());
        for (made, tasks) in &self.0 {
            for chunk in tasks.chunks(PER_ROW) {
                let first = position(ids.len() + 1);
                ids.extend_from_slice(chunk);
                rows.push(EventRow { made: made.clone(), first, last: position(ids.len()) });
            }
        }
        (ids, rows)
    }
}

/// Reads the events of a task, oldest first; `None` if there is no such task.
pub async fn of_task(store: &Store, id: Uuid, page: Page<i64>, limit: i64) -> Result<Option<Vec<TaskEvent>>> {
    store.listing(async |tx| in_tx(tx, id, page, limit).await).await
}

async fn in_tx(tx: &mut Tx, id: Uuid, page: Page<i64>, limit: i64) -> Result<Option<Vec<TaskEvent>>> {
    let spec =
        sqlx::query!("select batch_id, kind from task_spec where id = $1", id).fetch_optional(tx.conn().await?).await?;
    let Some(spec) = spec else { return Ok(None) };
    let (after, offset) = match page {
        Page::After(seq) => (seq / SEQ_PER_ROW, 0),
        Page::Offset(offset) => (0, offset),
    };
    let rows = sqlx::query!(
        r#"select seq, at, from_status::text as "from_status?", to_status::text as "to_status!", cause, actor, instance,
                  run, attempt, reason, array_position(task_ids, $2) as "place!"
           from event where batch_id = $1 and seq > $3 and $2 = any(task_ids) order by seq limit $4 offset $5"#,
        spec.batch_id,
        id,
        after,
        limit,
        offset,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let mut events = Vec::with_capacity(rows.len());
    for row in rows {
        events.push(TaskEvent {
            seq: row.seq * SEQ_PER_ROW + i64::from(row.place),
            at: Timestamp(row.at),
            task_id: id,
            batch_id: spec.batch_id,
            kind: spec.kind.clone(),
            from: row.from_status.as_deref().map(read_status).transpose()?,
            to: read_status(&row.to_status)?,
            cause: row.cause,
            actor: row.actor,
            instance: row.instance,
            run: row.run,
            attempt: row.attempt,
            reason: row.reason,
        });
    }
    Ok(Some(events))
}
