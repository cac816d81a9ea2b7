-- The audit trail. One row tells of up to 100 tasks of a batch that made the same move in the same transaction:
-- history is paid by the row, and most moves are made by many tasks at once. A task's own trail is found over its
-- batch, so there is one index and no row per task.

create table event (
    seq         bigint generated always as identity primary key,
    at          timestamptz not null,
    batch_id    uuid not null,
    from_status task_status,                -- null: created
    to_status   task_status not null,
    cause       text not null,
    actor       text not null,
    instance    uuid not null,
    run         int not null,               -- as it was after the move
    attempt     smallint not null,
    task_ids    uuid[] not null             -- at most 100, which keeps the row below the size that is compressed
);

create index event_batch_idx on event (batch_id, seq);
