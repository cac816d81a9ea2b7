-- What the counters of a batch's tasks add up to, kept like the counts per status, so that reading a batch never
-- reads its tasks.
alter table batch_count
    add column total_success  bigint not null default 0 check (total_success >= 0),
    add column total_failures bigint not null default 0 check (total_failures >= 0),
    add column total_expected bigint not null default 0 check (total_expected >= 0);

update batch_count c
set total_success = t.success, total_failures = t.failures, total_expected = t.expected
from (
    select batch_id, sum(success) as success, sum(failures) as failures, coalesce(sum(expected_count), 0) as expected
    from task group by batch_id
) t
where c.batch_id = t.batch_id and (t.success > 0 or t.failures > 0 or t.expected > 0);
