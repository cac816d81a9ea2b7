-- What all instances have to agree on and nobody else may know. One row, made by the first instance that starts.
create table secret (
    only_row boolean primary key default true check (only_row),
    handle   bytea not null check (octet_length(handle) = 32)   -- signs the handles of tasks
);
