-- When an instance was last able to work, and the times when none was: nobody could report then, and no timeout counts them.
-- Mostly one row of `pulse`; another one is made when somebody holds it.
create table pulse (
    shard smallint primary key,
    at    timestamptz not null
);

create table outage (
    began_at timestamptz primary key,
    ended_at timestamptz not null
);
