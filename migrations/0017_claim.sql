-- How often a task was claimed. An instance that was stopped past its lease may claim its own task again for the same run:
-- the holder and the run are equal then, and only this number tells the answer of the first call from that of the second.
alter table task add column claim int not null default 0;
