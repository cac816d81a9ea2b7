//! Fills tables directly, where the service would take too long. The rows and counters agree, as if the service had
//! done the work. Ids rise with time like those of the service, and all are in the past.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sqlx::PgConnection;
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{RawDatabase, database_error};
use crate::bench::progress::Progress;

/// Tasks per batch.
pub const PER_BATCH: usize = 1000;
/// Batches per transaction.
const BATCHES_PER_TRANSACTION: usize = 20;
const CONNECTIONS: usize = 2;

/// Inserts batches `$1` to `$2` of `$3`, spread over the last 30 days. Of 100 tasks, one has failed and one was
/// canceled. One task in 10 has metadata, and one kind has a single task. The rows of the trail have the size and order
/// of the service's: if they left more free space in their pages, new rows would go there and not to the end.
const FINISHED: &str = r#"
with made as materialized (
    select b, i, n, at, at + interval '20 ms' as ended,
           (prefix || '7' || lpad(to_hex(i), 3, '0') || '8' || lpad(to_hex(n), 15, '0'))::uuid as id,
           (prefix || '70009' || lpad(to_hex(b), 15, '0'))::uuid as batch_id,
           (case n % 100 when 0 then 'failure' when 1 then 'canceled' else 'success' end)::task_status as status,
           case n when 0 then 'rare' else 'kind-' || n % 20 end as kind
    from generate_series($1::bigint, $2::bigint) b
    cross join lateral (select now() - interval '30 days' + b * (interval '29 days' / $3::bigint) as at) t
    cross join lateral (select lpad(to_hex((extract(epoch from at) * 1000)::bigint), 12, '0') as prefix) p
    cross join generate_series(0, 999) i
    cross join lateral (select b * 1000 + i as n) number
), t as (
    insert into task (id, kind_hash, batch_id, status, priority, flags, timeout_secs, claimed_run, created_at, started_at,
                      ended_at, last_updated, failure_type, failure_reason)
    select id, hashtext(kind), batch_id, status, 0, 1, case when n % 1000 = 7 then 120 else 60 end,
           case when status <> 'canceled' then 0 end, at, case when status <> 'canceled' then at end, ended, ended,
           case status when 'failure' then 'server_error' end, case status when 'failure' then 'it broke' end
    from made order by id
), s as (
    insert into task_spec (id, batch_id, timeout_secs, name, kind, metadata, actions, created_at)
    select id, batch_id, case when n % 1000 = 7 then 120 else 60 end, 'name-' || n % 1000, kind,
           case when n % 10 = 3 then jsonb_build_object('tenant', 't' || n / 10 % 1000) end,
           '{"on_start":{"kind":"Webhook","params":{"url":"http://127.0.0.1:65535/","verb":"Post"}}}', at
    from made order by id
), a as (
    insert into attempt (task_id, run, attempt, instance, started_at, ended_at, outcome, cause, failure_type, error, reason)
    select id, 0, 0, batch_id, at, ended, case status when 'failure' then 'failed' else 'success' end, 'report',
           case status when 'failure' then 'server_error' end, case status when 'failure' then 'it broke' end, 'reported'
    from made where status <> 'canceled' order by id
), moves as (
    select batch_id, i / 100 as hundred, i / size as part, step, from_status, to_status, cause, moved_at,
           array_agg(id order by id) as ids
    from made cross join lateral (values
        (0, null::task_status, 'pending'::task_status, 'create', at, 100, true),
        (1, 'pending', 'claimed', 'claim', at, 100, status <> 'canceled'),
        (2, 'claimed', 'running', 'start', at, 100, status <> 'canceled'),
        (3, 'running', status, 'report', ended, 20, status <> 'canceled'),
        (3, 'pending', status, 'cancel', ended, 20, status = 'canceled')
    ) move(step, from_status, to_status, cause, moved_at, size, made) where move.made
    group by 1, 2, 3, 4, 5, 6, 7, 8
), e as (
    insert into event (at, batch_id, from_status, to_status, cause, actor, instance, run, attempt, task_ids)
    select moved_at, batch_id, from_status, to_status, cause, 'api', batch_id, 0, 0, ids from moves
    order by batch_id, hundred, step, part
), b as (
    insert into batch (id, scope, metadata, kinds, total, created_at, completed_at)
    select distinct batch_id, 'scope-' || b % 50, jsonb_build_object('team', 'm' || b % 100),
           array(select 'kind-' || k from generate_series(0, 19) k order by 1), 1000, at, ended from made
), c as (
    insert into batch_count (batch_id, success, failure, canceled, updated_at)
    select batch_id, count(*) filter (where status = 'success'), count(*) filter (where status = 'failure'),
           count(*) filter (where status = 'canceled'), min(ended)
    from made group by 1
)
insert into status_count as s (shard, success, failure, canceled)
select $4::smallint, count(*) filter (where status = 'success'), count(*) filter (where status = 'failure'),
       count(*) filter (where status = 'canceled') from made
on conflict (shard) do update set success = s.success + excluded.success, failure = s.failure + excluded.failure,
    canceled = s.canceled + excluded.canceled"#;

/// Inserts at least `count` finished tasks and returns their number.
pub async fn finished(database: &RawDatabase, count: usize) -> Result<usize, String> {
    let batches = count.div_ceil(PER_BATCH);
    let progress = Progress::start(&format!("insert {} finished tasks", batches * PER_BATCH), batches);
    let (next, mut running) = (Arc::new(AtomicUsize::new(0)), JoinSet::new());
    for shard in 0..CONNECTIONS {
        let (mut connection, next, progress) = (database.connect().await?, Arc::clone(&next), progress.clone());
        running.spawn(async move {
            sqlx::raw_sql("set synchronous_commit = off").execute(&mut connection).await?;
            loop {
                let first = next.fetch_add(BATCHES_PER_TRANSACTION, Ordering::Relaxed);
                if first >= batches {
                    return Ok(());
                }
                let last = (first + BATCHES_PER_TRANSACTION).min(batches) - 1;
                fill(&mut connection, [first, last, batches, shard]).await?;
                progress.add((last + 1 - first) as u64);
            }
        });
    }
    while let Some(ended) = running.join_next().await {
        ended.map_err(|error| error.to_string())?.map_err(|error: sqlx::Error| database_error(error))?;
    }
    drop(progress);
    let _tidying = Progress::start("vacuum and checkpoint", 1);
    // Otherwise PostgreSQL would write and vacuum these pages during a measurement.
    for table in ["task", "task_spec", "attempt", "event", "batch", "batch_count", "status_count"] {
        database.execute(&format!("vacuum (analyze) {table}")).await?;
    }
    // Without the privilege, PostgreSQL does the checkpoint at its own time.
    let _ = database.execute("checkpoint").await;
    Ok(batches * PER_BATCH)
}

async fn fill(connection: &mut PgConnection, numbers: [usize; 4]) -> Result<(), sqlx::Error> {
    let mut query = sqlx::query(FINISHED);
    for number in numbers {
        query = query.bind(i64::try_from(number).unwrap_or(i64::MAX));
    }
    query.execute(connection).await?;
    Ok(())
}

/// Inserts the Running tasks `$1` with the name, kind and policy of task `$2`. They time out in `$3` seconds; after a
/// retry they have a day.
const RUNNING: &str = "
with made as materialized (
    select u.id, (u.n - 1) / 1000 as part, now() as at, now() + $3 * interval '1 second' as deadline
    from unnest($1::uuid[]) with ordinality u(id, n)
), batches as (
    select part, (array_agg(id order by id))[1] as batch_id, count(*)::int as n, min(at) as at from made group by 1
), t as (
    insert into task (id, batch_id, status, priority, flags, timeout_secs, claimed_by, claimed_run, timeout_at, created_at,
                      started_at, last_updated)
    select id, batch_id, 'running', 0, 0, 86400, batch_id, 0, deadline, m.at, m.at, deadline - interval '86400 seconds'
    from made m join batches using (part) order by id
), s as (
    insert into task_spec (id, batch_id, timeout_secs, name, kind, retry, retry_source, created_at)
    select m.id, b.batch_id, 86400, x.name, x.kind, x.retry, x.retry_source, m.at
    from made m join batches b using (part) cross join task_spec x where x.id = $2 order by 1
), b as (
    insert into batch (id, kinds, total, created_at)
    select batch_id, array[(select kind from task_spec where id = $2)], n, at from batches
), c as (
    insert into batch_count (batch_id, running, updated_at) select batch_id, n, at from batches
), k as (
    insert into status_count as s (shard, running) select 0, count(*) from made
    on conflict (shard) do update set running = s.running + excluded.running
)
select extract(epoch from min(deadline) - clock_timestamp())::float8 from made";

/// Inserts Running tasks that all time out at the same moment. Returns their ids and that moment.
pub async fn running(
    database: &RawDatabase,
    count: usize,
    like: Uuid,
    timeout: Duration,
) -> Result<(Vec<Uuid>, Instant), String> {
    let _progress = Progress::start(&format!("insert {count} running tasks"), 1);
    let ids: Vec<Uuid> = (0..count).map(|_| Uuid::now_v7()).collect();
    let mut connection = database.connect().await?;
    let left: f64 = sqlx::query_scalar(RUNNING)
        .bind(&ids[..])
        .bind(like)
        .bind(timeout.as_secs_f64())
        .fetch_one(&mut connection)
        .await
        .map_err(database_error)?;
    let left =
        Duration::try_from_secs_f64(left).map_err(|_| "the tasks timed out before all were inserted".to_owned())?;
    Ok((ids, Instant::now() + left))
}
