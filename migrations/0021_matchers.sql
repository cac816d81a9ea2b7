-- Matchers that no task alive carries are forgotten: first they are retired, which keeps them from counting any further, and
-- deleted once nobody occupies their slots. Instances keep a copy; the version says whether it is still right.
create table matcher_version (
    only_row boolean primary key default true check (only_row),
    version  bigint not null
);
insert into matcher_version (version) values (0);

alter table matcher
    add column created_at timestamptz not null default now(),
    add column retired_at timestamptz,
    drop constraint matcher_kind_fields_key;
create unique index matcher_active_idx on matcher (kind, fields) where retired_at is null;

-- The tasks alive that carry rules. Entered by no others. Tasks that have ended may come back.
update task t set flags = t.flags | 256 from task_spec s where s.id = t.id and s.rules is not null;
create index task_ruled_idx on task (id) where ended_at is null and flags & 256 <> 0;
