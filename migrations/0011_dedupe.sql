-- How each task of a repeatable request was answered, where the request alone does not say it: the status it was
-- created in, null if it was not created because there was one like it. Null as a whole: all were created as asked for.

alter table idempotency add column statuses text[];
