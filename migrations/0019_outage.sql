-- When an instance was last able to work, and the times when none was: nobody could report then, and no timeout counts them.
create table pulse (
    only_row boolean primary key default true check (only_row),
    at       timestamptz not null
);

create table outage (
    began_at timestamptz primary key,
    ended_at timestamptz not null
);
