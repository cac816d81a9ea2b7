-- A batch is the tasks of one POST. Its counters are kept by the statements that move tasks,
-- so that lists, statistics and the completion of a batch never count rows of `task`.

create table batch (
    id           uuid primary key,          -- v7, made by the application
    scope        text,
    metadata     jsonb,
    kinds        text[] not null,
    total        int not null,
    on_complete  text,                      -- JSON array of actions; null when there are none
    completions  int not null default 0,    -- how often it has completed: part of the idempotency key
    created_at   timestamptz not null,
    completed_at timestamptz                -- set while nothing in it is alive
);

create index batch_retention_idx on batch (completed_at) where completed_at is not null;

-- One narrow row per batch, updated once per transaction: room on the page keeps those updates HOT.
create table batch_count (
    batch_id      uuid primary key,
    waiting       int not null default 0 check (waiting >= 0),
    pending       int not null default 0 check (pending >= 0),
    claimed       int not null default 0 check (claimed >= 0),
    running       int not null default 0 check (running >= 0),
    retry_pending int not null default 0 check (retry_pending >= 0),
    paused        int not null default 0 check (paused >= 0),
    success       int not null default 0 check (success >= 0),
    failure       int not null default 0 check (failure >= 0),
    canceled      int not null default 0 check (canceled >= 0),
    updated_at    timestamptz not null
) with (fillfactor = 50);

-- All tasks by status, spread over a few rows so that concurrent transactions rarely meet on one.
-- Single rows may be negative; only the sum means something.
create table status_count (
    shard         smallint primary key,
    waiting       bigint not null default 0,
    pending       bigint not null default 0,
    claimed       bigint not null default 0,
    running       bigint not null default 0,
    retry_pending bigint not null default 0,
    paused        bigint not null default 0,
    success       bigint not null default 0,
    failure       bigint not null default 0,
    canceled      bigint not null default 0
) with (fillfactor = 50);
