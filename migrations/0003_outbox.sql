-- Notifications that will be sent at least once. Written in the transaction of the transition they tell of.

create type delivery_status as enum ('pending', 'success', 'exhausted');

create table outbox (
    id              bigint generated always as identity primary key,
    task_id         uuid,                   -- null for a batch's own notifications
    batch_id        uuid not null,
    trigger         text not null,
    condition       text not null,
    run             int not null,           -- of the task; for a batch, which completion this is
    action          text not null,          -- JSON
    state           text not null,          -- JSON: the task as the notification tells it
    status          delivery_status not null default 'pending',
    attempts        int not null default 0,
    next_attempt_at timestamptz not null,   -- while it is being sent: end of the lease
    last_status     int,
    last_error      text,
    created_at      timestamptz not null,
    updated_at      timestamptz not null
) with (fillfactor = 85);

create index outbox_deliver_idx on outbox (next_attempt_at, id) where status = 'pending';
create index outbox_task_idx    on outbox (task_id) where task_id is not null;
create index outbox_batch_idx   on outbox (batch_id);
