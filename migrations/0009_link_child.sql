-- From a task to what it depends on: for whatever looks upward, and for parents in other batches.

create index link_child_idx on link (child_id);
