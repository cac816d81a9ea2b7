-- The hot row of a task (`task`) and what is written once and rarely read (`task_spec`).
-- Every index on `task` is paid on every transition, so it has its key and one partial index per loop;
-- whatever lists and filters need is indexed on `task_spec`.

create type task_status as enum (
    'waiting', 'pending', 'claimed', 'running', 'retry_pending', 'paused', 'success', 'failure', 'canceled'
);

create table task (
    id             uuid primary key,        -- v7, ascending in the order of the batch: children after parents
    batch_id       uuid not null,
    status         task_status not null,
    priority       smallint not null,
    flags          smallint not null,       -- which actions exist, whether it has children: see domain/task.rs
    attempt        smallint not null default 0,
    run            int not null default 0,
    deferrals      int not null default 0,
    wait_count     int not null default 0,  -- parents that are not terminal yet; in no index, so counting down is HOT
    timeout_secs   int not null,
    success        bigint not null default 0,
    failures       bigint not null default 0,
    expected_count int,
    claimed_by     uuid,
    claimed_run    int,                     -- the last run that was ever claimed
    manual_run     int,                     -- the last run that somebody asked for by hand
    timeout_at     timestamptz,             -- claimed: end of the lease; running: deadline
    next_retry_at  timestamptz,
    not_before     timestamptz,             -- run_at while it is still ahead
    created_at     timestamptz not null,
    started_at     timestamptz,
    ended_at       timestamptz,
    last_updated   timestamptz not null,
    failure_type   text,
    failure_reason text,
    constraint task_ended check ((ended_at is not null) = (status in ('success', 'failure', 'canceled'))),
    constraint task_retry_has_date check (status <> 'retry_pending' or next_retry_at is not null),
    constraint task_date_is_retry check (next_retry_at is null or status in ('retry_pending', 'paused')),
    constraint task_held check ((timeout_at is not null) = (status in ('claimed', 'running'))),
    constraint task_holder check ((claimed_by is not null) = (status in ('claimed', 'running'))),
    constraint task_counters check (
        wait_count >= 0 and attempt >= 0 and run >= 0 and deferrals >= 0 and success >= 0 and failures >= 0
    )
) with (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02);

-- Statistics on a column that changes in masses mislead more than they help: with stale ones a literal
-- status made the planner walk a whole partial index instead of 200 key look-ups (481/s against 104,000/s).
alter table task alter column status set statistics 0;

create index task_start_idx   on task (priority desc, id) where status = 'pending' and not_before is null;
create index task_timeout_idx on task (timeout_at)        where status in ('claimed', 'running');
create index task_retry_idx   on task (next_retry_at)     where status = 'retry_pending';
create index task_due_idx     on task (not_before)        where status = 'pending' and not_before is not null;

create table task_spec (
    id               uuid primary key,
    batch_id         uuid not null,
    name             text not null,
    kind             text not null,
    metadata         jsonb,                 -- null when empty
    actions          text,                  -- JSON object by list name; text, because it is only handed through
    retry            text,                  -- JSON policy with all defaults filled in
    retry_source     text,                  -- 'task' or 'kind'; null without a policy
    run_at           timestamptz,
    dead_end_barrier boolean not null default false,
    created_at       timestamptz not null
);

create index task_spec_batch_idx    on task_spec (batch_id, id);
create index task_spec_kind_idx     on task_spec (kind, id);
create index task_spec_name_idx     on task_spec (name, id);
create index task_spec_created_idx  on task_spec using brin (created_at);
create index task_spec_metadata_idx on task_spec using gin (metadata jsonb_path_ops) where metadata is not null;

create table link (
    parent_id        uuid not null,
    child_id         uuid not null,
    requires_success boolean not null,
    primary key (parent_id, child_id)
);

-- What an on_start answer said to call if the task is canceled.
create table cancel_action (
    task_id uuid primary key,
    run     int not null,
    action  text not null
);

-- One row per execution, inserted when it ends.
create table attempt (
    task_id       uuid not null,
    run           int not null,
    attempt       smallint not null,
    retry_type    text,                     -- null for an execution that nobody retried
    instance      uuid,
    started_at    timestamptz,
    ended_at      timestamptz not null,
    outcome       text not null,
    cause         text not null,
    failure_type  text,
    error         text,
    http_status   smallint,
    delay_ms      bigint,
    jitter_ms     bigint,
    next_retry_at timestamptz,
    reason        text not null,
    primary key (task_id, run)
);
