-- What the counters of a batch are still to be changed by. Mostly empty: a transaction changes `batch_count` itself, and
-- leaves a row here only if somebody else holds that and it has waited long enough. A loop brings them together.
create table batch_delta (
    id       bigint generated always as identity primary key,
    batch_id uuid not null,
    deltas   bigint[] not null              -- nine by status, then success, failures and expected
);

create index batch_delta_batch_idx on batch_delta (batch_id);

-- Whatever is left here may belong before what is counted already: single columns may be negative in between. The
-- audit compares them with the rows.
alter table batch_count
    drop constraint batch_count_waiting_check,
    drop constraint batch_count_pending_check,
    drop constraint batch_count_claimed_check,
    drop constraint batch_count_running_check,
    drop constraint batch_count_retry_pending_check,
    drop constraint batch_count_paused_check,
    drop constraint batch_count_success_check,
    drop constraint batch_count_failure_check,
    drop constraint batch_count_canceled_check,
    drop constraint batch_count_total_success_check,
    drop constraint batch_count_total_failures_check,
    drop constraint batch_count_total_expected_check;

-- The counters as everybody who reads them wants them.
create view batch_counts as
select c.batch_id, c.updated_at,
       (c.waiting + coalesce(d.n[1], 0))::int as waiting,
       (c.pending + coalesce(d.n[2], 0))::int as pending,
       (c.claimed + coalesce(d.n[3], 0))::int as claimed,
       (c.running + coalesce(d.n[4], 0))::int as running,
       (c.retry_pending + coalesce(d.n[5], 0))::int as retry_pending,
       (c.paused + coalesce(d.n[6], 0))::int as paused,
       (c.success + coalesce(d.n[7], 0))::int as success,
       (c.failure + coalesce(d.n[8], 0))::int as failure,
       (c.canceled + coalesce(d.n[9], 0))::int as canceled,
       (c.total_success + coalesce(d.n[10], 0))::bigint as total_success,
       (c.total_failures + coalesce(d.n[11], 0))::bigint as total_failures,
       (c.total_expected + coalesce(d.n[12], 0))::bigint as total_expected
from batch_count c left join lateral (
    select array[sum(deltas[1]), sum(deltas[2]), sum(deltas[3]), sum(deltas[4]), sum(deltas[5]), sum(deltas[6]),
                 sum(deltas[7]), sum(deltas[8]), sum(deltas[9]), sum(deltas[10]), sum(deltas[11]), sum(deltas[12])] as n
    from batch_delta where batch_id = c.batch_id having count(*) > 0
) d on true;
