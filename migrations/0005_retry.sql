-- Default retry policies per kind, for tasks that are created without one of their own.
create table retry_policy (
    kind       text primary key,
    policy     text not null,               -- JSON with all defaults filled in
    updated_at timestamptz not null
);

-- How executions of tasks with a policy ended, by hour. Spread over shards like the counts per status.
create table retry_stat (
    bucket       timestamptz not null,
    kind         text not null,
    attempt      smallint not null,         -- the attempt that ended
    failure_type text not null,             -- empty for a success
    shard        smallint not null,
    succeeded    bigint not null default 0,
    scheduled    bigint not null default 0,
    deferred     bigint not null default 0,
    exhausted    bigint not null default 0,
    final        bigint not null default 0,
    primary key (bucket, kind, attempt, failure_type, shard)
) with (fillfactor = 70);
