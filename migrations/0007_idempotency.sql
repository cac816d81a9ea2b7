-- Requests that may be repeated: the key they came with, what they asked for, and which batch came of it.
-- The ids and the request itself are enough to give the same answer again.

create table idempotency (
    key        text primary key,
    body_hash  bytea not null,
    batch_id   uuid not null,
    task_ids   uuid[] not null,
    created_at timestamptz not null
);

create index idempotency_retention_idx on idempotency (created_at);
