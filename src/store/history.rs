//! The audit trail: who moved which task from where to where, and why. Written with the moves themselves.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::lock::read_status;
use super::query::Page;
use super::tx::Move;
use super::{Result, Store, Tx};
use crate::domain::status::Status;
use crate::domain::view::{Event, Timestamp};

/// Tasks that one row tells of at most.
const PER_ROW: usize = 100;
/// The number of an event: its row's, and the place in the row.
const PLACES: i64 = 1000;

/// The moves of a transaction, those of a kind together.
#[derive(Default)]
pub(super) struct Trail(BTreeMap<Kind, Vec<Uuid>>);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    batch_id: Uuid,
    from: Option<Status>,
    to: Status,
    cause: &'static str,
    run: i32,
    attempt: i16,
}

impl Trail {
    pub fn add(&mut self, task: Move) {
        let Move { id, batch_id, from, to, cause, run, attempt } = task;
        self.0.entry(Kind { batch_id, from, to, cause, run, attempt }).or_default().push(id);
    }
}

pub(super) async fn insert(tx: &mut Tx, trail: &Trail, now: Option<DateTime<Utc>>) -> Result<()> {
    if trail.0.is_empty() {
        return Ok(());
    }
    let (mut ids, mut rows, mut from, mut to) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (kind, tasks) in &trail.0 {
        for chunk in tasks.chunks(PER_ROW) {
            rows.push(*kind);
            from.push(i32::try_from(ids.len() + 1).unwrap_or(i32::MAX));
            ids.extend_from_slice(chunk);
            to.push(i32::try_from(ids.len()).unwrap_or(i32::MAX));
        }
    }
    let (actor, instance) = (tx.actor(), tx.store.instance());
    sqlx::query!(
        "insert into event (at, actor, instance, batch_id, from_status, to_status, cause, run, attempt, task_ids)
         select coalesce($1, now()), $2, $3, u.batch_id, u.from_status, u.to_status, u.cause, u.run, u.attempt,
                ($4::uuid[])[u.first:u.last]
         from unnest($5::int[], $6::int[], $7::uuid[], $8::text[]::task_status[], $9::text[]::task_status[], $10::text[],
                     $11::int[], $12::smallint[])
             u(first, last, batch_id, from_status, to_status, cause, run, attempt)",
        now,
        actor,
        instance,
        &ids,
        &from,
        &to,
        &rows.iter().map(|r| r.batch_id).collect::<Vec<_>>(),
        &rows.iter().map(|r| r.from.map(Status::as_str)).collect::<Vec<_>>() as &[Option<&str>],
        &rows.iter().map(|r| r.to.as_str()).collect::<Vec<_>>() as &[&str],
        &rows.iter().map(|r| r.cause).collect::<Vec<_>>() as &[&str],
        &rows.iter().map(|r| r.run).collect::<Vec<_>>(),
        &rows.iter().map(|r| r.attempt).collect::<Vec<_>>(),
    )
    .execute(tx.conn())
    .await?;
    Ok(())
}

/// The trail of a task, oldest first; `None` if there is no such task.
pub async fn of_task(store: &Store, id: Uuid, page: Page<i64>, limit: i64) -> Result<Option<Vec<Event>>> {
    let spec =
        sqlx::query!("select batch_id, kind from task_spec where id = $1", id).fetch_optional(&store.pool).await?;
    let Some(spec) = spec else { return Ok(None) };
    let (after, offset) = match page {
        Page::After(seq) => (seq / PLACES, 0),
        Page::Offset(offset) => (0, offset),
    };
    let rows = sqlx::query!(
        r#"select seq, at, from_status::text as "from_status?", to_status::text as "to_status!", cause, actor, instance,
                  run, attempt, array_position(task_ids, $2) as "place!"
           from event where batch_id = $1 and seq > $3 and $2 = any(task_ids) order by seq limit $4 offset $5"#,
        spec.batch_id,
        id,
        after,
        limit,
        offset,
    )
    .fetch_all(&store.pool)
    .await?;
    let mut events = Vec::with_capacity(rows.len());
    for row in rows {
        events.push(Event {
            seq: row.seq * PLACES + i64::from(row.place),
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
        });
    }
    Ok(Some(events))
}
