-- Concurrency and capacity rules, and turns between keys. Without rules nothing here is read or written but one look at
-- `matcher`, which is empty then.

-- What is counted: executing tasks of a kind, apart by the values of these metadata fields. Few rows, never deleted.
create table matcher (
    id     int generated always as identity primary key,
    kind   text not null,
    fields text[] not null,                 -- sorted
    unique (kind, fields)
);

-- How much is executing of one matcher with one set of values: every change is made under the row's lock, in the
-- transaction that moves the tasks.
create table slot (
    id         bigint generated always as identity primary key,
    matcher_id int not null,
    key        text not null,               -- the values, in JSON; hashed when long
    used       int not null default 0 check (used >= 0),       -- tasks that are Claimed or Running
    load       bigint not null default 0 check (load >= 0),    -- what those still have to do
    unique (matcher_id, key)
) with (fillfactor = 50);

-- Tasks with the same limits on the same slots are blocked and free together: they wait in one place, in the order of
-- the queue, and only the first of them has to be looked at.
create table parking (
    id    bigint generated always as identity primary key,
    key   text not null unique,             -- its gates, in writing
    state smallint not null                 -- 0 empty, 1 blocked, 2 stirred: something has become free since it was looked at
) with (fillfactor = 50);

create index parking_stirred_idx on parking (id) where state = 2;

create table gate (
    parking_id bigint not null references parking (id) on delete cascade,
    slot_id    bigint not null,
    max_tasks  int,                         -- open while fewer are executing
    max_load   bigint,                      -- open while they have less to do
    primary key (parking_id, slot_id)
);

create index gate_slot_idx on gate (slot_id);

alter table task
    add column turn      bigint not null default 0,            -- place among equal priorities; 0 unless keys take turns
    add column parked_on bigint,                               -- blocked by rules: not in the queue but in this parking
    add column slots     bigint[],                             -- what it occupies while it is Claimed or Running
    add constraint task_parked check (parked_on is null or status = 'pending'),
    add constraint task_slots check (slots is null or status in ('claimed', 'running'));

drop index task_start_idx;
create index task_start_idx on task (priority desc, turn, id)
    where status = 'pending' and not_before is null and parked_on is null;
create index task_parked_idx on task (parked_on, priority desc, turn, id)
    where status = 'pending' and parked_on is not null;

alter table task_spec
    add column rules    text,               -- JSON array; null when there are none
    add column fair_key text;

-- Turns between keys: each key's next turn among tasks of a priority, and the turn that was last taken.
create table fair_turn (
    priority smallint not null,
    key      text not null,                 -- empty for tasks without one
    next     bigint not null,
    primary key (priority, key)
) with (fillfactor = 50);

create table fair_clock (
    priority smallint primary key,
    turn     bigint not null
) with (fillfactor = 50);
