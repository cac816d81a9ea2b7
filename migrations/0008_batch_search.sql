-- Finding batches by what their creator said about them.

create index batch_scope_idx    on batch (scope, id) where scope is not null;
create index batch_metadata_idx on batch using gin (metadata jsonb_path_ops) where metadata is not null;
