-- What happened beside the move itself, where there is something to say.
alter table event add column reason text;
