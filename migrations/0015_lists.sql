-- What people look for in lists: what went wrong, and what stands still. An entry is paid when a task comes to such a
-- status; those that simply succeed never pay.
create index task_failure_idx  on task (id) where status = 'failure';
create index task_canceled_idx on task (id) where status = 'canceled';
create index task_waiting_idx  on task (id) where status = 'waiting';
create index task_paused_idx   on task (id) where status = 'paused';

-- The timeout once more, where an index on it is paid once per task.
alter table task_spec add column timeout_secs int not null default 60;
update task_spec s set timeout_secs = t.timeout_secs from task t where t.id = s.id and t.timeout_secs <> 60;
create index task_spec_timeout_idx on task_spec (timeout_secs, id);

-- Ids are made from the time of creation: they are the index for it.
drop index task_spec_created_idx;
