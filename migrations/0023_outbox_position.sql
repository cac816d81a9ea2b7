-- The place of the action in its list. The idempotency keys of the second and later actions end with it. Rows from before
-- have 0, so their keys stay what receivers may have seen already.
alter table outbox add column position int not null default 0;
