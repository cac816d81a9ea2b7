-- "What failed of this kind" would go through all that failed. The kind itself is in the specification, with which no index
-- can be shared: a number that stands for it is enough, since the kind is compared, too.
alter table task add column kind_hash int not null default 0;
update task t set kind_hash = hashtext(s.kind) from task_spec s where s.id = t.id;
create index task_failure_kind_idx  on task (kind_hash, id) where status = 'failure';
create index task_canceled_kind_idx on task (kind_hash, id) where status = 'canceled';
