//! Counters, compared with a fresh count of the rows, and their repair. A repair must lock the row of the counter
//! before it counts: a transaction that has changed rows but not yet this counter will still add to it.

use uuid::Uuid;

use super::{Counter, Difference, Entry, Extent};
use crate::domain::task::lifecycle::{Event, decide};
use crate::store::tasks::{lock, transitions};
use crate::store::tx::settle::SumDeltas;
use crate::store::{Actor, Error, Result, Session, Tx};

/// Finds wrong slots.
pub(super) async fn slots(tx: &mut Tx) -> Result<Vec<Difference>> {
    let rows = sqlx::query!(
        r#"with held as (
               select u.slot, count(*) as used,
                      sum(greatest(0, coalesce(t.expected_count - t.success - t.failures, 0)))::bigint as load
               from task t cross join lateral unnest(t.slots) u(slot)
               where t.status in ('claimed', 'running') group by 1
           )
           select s.id, s.used, s.load, coalesce(h.used, 0) as "is_used!", coalesce(h.load, 0) as "is_load!"
           from slot s left join held h on h.slot = s.id
           where (s.used, s.load) is distinct from (coalesce(h.used, 0), coalesce(h.load, 0)) order by 1 limit 1000"#
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let shown = |used: i64, load: i64| format!("{used} tasks with {load} to do");
    let difference =
        |id, recorded, actual| Difference { counter: Counter::Slots, entry: Entry::Slot(id), recorded, actual };
    Ok(rows
        .into_iter()
        .map(|row| difference(row.id, shown(row.used.into(), row.load), shown(row.is_used, row.is_load)))
        .collect())
}

/// Finds groups of blocked tasks that no claim would recheck although their limits are open.
pub(super) async fn blocked_groups(tx: &mut Tx) -> Result<Vec<Difference>> {
    let rows = sqlx::query!(
        r#"select t.parked_on as "id!", count(*) as "tasks!", min(p.state) as state
           from task t left join parking p on p.id = t.parked_on
           where t.status = 'pending' and t.parked_on is not null and coalesce(p.state, 0) < 2
             and (coalesce(p.state, 0) = 0 or not exists (
                 select from gate g join slot s on s.id = g.slot_id
                 where g.parking_id = p.id and (s.used >= g.max_tasks or s.load >= g.max_load)
             ))
           group by 1 order by 1 limit 1000"#
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let recorded = |state: Option<i16>| match state {
        None => "nothing",
        Some(0) => "empty",
        Some(_) => "blocked",
    };
    Ok(rows
        .into_iter()
        .map(|row| Difference {
            counter: Counter::BlockedGroups,
            entry: Entry::BlockedGroup(row.id),
            recorded: recorded(row.state).into(),
            actual: format!("{} tasks ready for a recheck", row.tasks),
        })
        .collect())
}

/// Reads the counters of batches and whether each is complete, as recorded (`says`) and as its tasks are (`is`).
macro_rules! batch_counts {
    ($rest:literal, $($args:expr),*) => {
        sqlx::query!(
            r#"select b.id, b.completed_at is not null as "complete!",
                   array[c.waiting, c.pending, c.claimed, c.running, c.retry_pending, c.paused, c.success, c.failure,
                         c.canceled, c.total_success, c.total_failures, c.total_expected] as "says!", t.counts as "is!"
               from batch b join batch_counts c on c.batch_id = b.id cross join lateral (
                   select array[
                       count(*) filter (where t.status = 'waiting'), count(*) filter (where t.status = 'pending'),
                       count(*) filter (where t.status = 'claimed'), count(*) filter (where t.status = 'running'),
                       count(*) filter (where t.status = 'retry_pending'), count(*) filter (where t.status = 'paused'),
                       count(*) filter (where t.status = 'success'), count(*) filter (where t.status = 'failure'),
                       count(*) filter (where t.status = 'canceled'), coalesce(sum(t.success), 0),
                       coalesce(sum(t.failures), 0), coalesce(sum(t.expected_count), 0)]::bigint[] as counts
                   from task_spec s join task t on t.id = s.id where s.batch_id = b.id
               ) t "# + $rest,
            $($args),*
        )
    };
}

/// Finds batches with wrong counters, and batches that are complete with alive tasks or incomplete without.
pub(super) async fn batches(tx: &mut Tx, extent: Extent) -> Result<Vec<Difference>> {
    let rows = batch_counts!(
        "where ($1 or b.completed_at is null)
           and (array[c.waiting, c.pending, c.claimed, c.running, c.retry_pending, c.paused, c.success, c.failure,
                      c.canceled, c.total_success, c.total_failures, c.total_expected] <> t.counts
                or (b.completed_at is null) = (0 = all(t.counts[1:6])))
         order by 1 limit 1000",
        extent == Extent::All
    )
    .fetch_all(tx.conn().await?)
    .await?;
    let shown = |counts: &[i64], complete: bool| format!("{counts:?}{}", if complete { " and complete" } else { "" });
    Ok(rows
        .into_iter()
        .map(|row| Difference {
            counter: Counter::Batches,
            entry: Entry::Batch(row.id),
            recorded: shown(&row.says, row.complete),
            actual: shown(&row.is, row.is.iter().take(6).all(|n| *n == 0)),
        })
        .collect())
}

/// Finds tasks with a wrong wait count.
pub(super) async fn waiting(tx: &mut Tx) -> Result<Vec<Difference>> {
    // A task that has been claimed keeps no count.
    let rows = sqlx::query!(
        r#"select t.id, t.wait_count, p.open as "open!"
           from batch b join task_spec s on s.batch_id = b.id join task t on t.id = s.id cross join lateral (
               select count(*) filter (where p.ended_at is null) as open
               from link l join task p on p.id = l.parent_id where l.child_id = t.id
           ) p
           where b.completed_at is null and t.status in ('waiting', 'pending', 'paused') and t.wait_count <> p.open
             and coalesce(t.claimed_run < coalesce(t.manual_run, 0), true)
           order by 1 limit 1000"#
    )
    .fetch_all(tx.conn().await?)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| Difference {
            counter: Counter::Waiting,
            entry: Entry::Task(row.id),
            recorded: row.wait_count.to_string(),
            actual: row.open.to_string(),
        })
        .collect())
}

/// Compares the counts by status.
pub(super) async fn totals(tx: &mut Tx) -> Result<Vec<Difference>> {
    let (recorded, actual) = count_totals(tx).await?;
    let difference = || Difference {
        counter: Counter::Totals,
        entry: Entry::Totals,
        recorded: format!("{recorded:?}"),
        actual: format!("{actual:?}"),
    };
    Ok((recorded != actual).then(difference).into_iter().collect())
}

/// Returns the counts by status as recorded and as counted.
async fn count_totals(tx: &mut Tx) -> Result<(Vec<i64>, Vec<i64>)> {
    let row = sqlx::query!(
        r#"select coalesce((
               select array[sum(waiting), sum(pending), sum(claimed), sum(running), sum(retry_pending), sum(paused),
                            sum(success), sum(failure), sum(canceled)]::bigint[] from status_count having count(*) > 0
           ), array_fill(0::bigint, array[9])) as "says!", (
               select array_agg(coalesce(t.n, 0) order by s.status) from unnest(enum_range(null::task_status)) s(status)
               left join (select status, count(*) as n from task group by 1) t on t.status = s.status
           ) as "is!""#
    )
    .fetch_one(tx.conn().await?)
    .await?;
    Ok((row.says, row.is))
}

/// Repairs one counter.
pub(super) async fn repair(session: Session, entry: &Entry) -> Result<()> {
    let mut tx = session.begin(Actor::Loop("doctor")).await?;
    match entry {
        Entry::Slot(id) => repair_slot(&mut tx, *id).await?,
        Entry::BlockedGroup(id) => repair_blocked_group(&mut tx, *id).await?,
        Entry::Batch(id) => repair_batch(&mut tx, *id).await?,
        Entry::Task(id) => repair_waiting(&mut tx, *id).await?,
        Entry::Totals => repair_totals(&mut tx).await?,
        Entry::Derived(_) => {}
    }
    tx.commit().await
}

async fn repair_slot(tx: &mut Tx, id: i64) -> Result<()> {
    let recorded = sqlx::query!("select used, load from slot where id = $1 for update", id)
        .fetch_optional(tx.conn().await?)
        .await?;
    let Some(recorded) = recorded else { return Ok(()) };
    let actual = sqlx::query!(
        r#"select count(*)::int as "used!",
               coalesce(sum(greatest(0, coalesce(expected_count - success - failures, 0))), 0)::bigint as "load!"
           from task where status in ('claimed', 'running') and slots @> array[$1::bigint]"#,
        id
    )
    .fetch_one(tx.conn().await?)
    .await?;
    tx.slot(id, actual.used - recorded.used, actual.load - recorded.load);
    Ok(())
}

/// Marks a group for a recheck. Tasks of a group that does not exist return to the queue.
async fn repair_blocked_group(tx: &mut Tx, id: i64) -> Result<()> {
    let known = sqlx::query!("update parking set state = 2 where id = $1", id).execute(tx.conn().await?).await?;
    if known.rows_affected() == 0 {
        sqlx::query!("update task set parked_on = null where parked_on = $1 and status = 'pending'", id)
            .execute(tx.conn().await?)
            .await?;
    }
    tx.hint(crate::wake::Hints::START);
    Ok(())
}

async fn repair_batch(tx: &mut Tx, id: Uuid) -> Result<()> {
    sqlx::query!("select batch_id from batch_count where batch_id = $1 for update", id)
        .fetch_optional(tx.conn().await?)
        .await?;
    let Some(row) = batch_counts!("where b.id = $1", id).fetch_optional(tx.conn().await?).await? else { return Ok(()) };
    let delta = |i: usize| row.is.get(i).copied().unwrap_or(0) - row.says.get(i).copied().unwrap_or(0);
    let by_status = std::array::from_fn(|i| i32::try_from(delta(i)).unwrap_or(0));
    let reopened = row.complete && row.is.iter().take(6).any(|n| *n > 0);
    let sums = SumDeltas { success: delta(9), failures: delta(10), expected: delta(11) };
    tx.correct_batch(id, by_status, sums, reopened);
    Ok(())
}

/// Corrects a wait count by the same decision as if parents had just ended or come back to life.
async fn repair_waiting(tx: &mut Tx, id: Uuid) -> Result<()> {
    let locked = lock::by_ids(tx, &[id]).await?;
    let Some(task) = locked.tasks.first() else { return Ok(()) };
    let parents = sqlx::query!(
        r#"select count(*) filter (where p.ended_at is null)::int as "open!",
               count(*) filter (where l.requires_success and p.status in ('failure', 'canceled')) as "lost!"
           from link l join task p on p.id = l.parent_id where l.child_id = $1"#,
        id
    )
    .fetch_one(tx.conn().await?)
    .await?;
    let count = task.wait_count - parents.open;
    let event = if count < 0 {
        Event::ParentsReopened { count: -count }
    } else {
        Event::ParentsSettled { count, doomed: parents.lost > 0 }
    };
    let decided: Vec<_> = decide(task, &event, locked.moment).ok().flatten().into_iter().collect();
    transitions::apply(tx, &decided, locked.moment).await
}

/// Corrects the counts by status. Both counts come from one snapshot, so no other transaction has to be kept from
/// counting.
async fn repair_totals(tx: &mut Tx) -> Result<()> {
    let (recorded, actual) = count_totals(tx).await?;
    let deltas: Vec<i64> = actual.iter().zip(&recorded).map(|(actual, recorded)| actual - recorded).collect();
    tx.correct_totals(
        deltas.try_into().map_err(|_| Error::corrupt("table status_count: one count per status expected"))?,
    );
    Ok(())
}
