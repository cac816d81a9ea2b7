-- The statements of the version before the newest migrations, which must work beside them.
-- Written by tests/previous_statements; not to be edited.

---- statement
delete from fair_turn f where (f.priority, f.key) in (
             select i.priority, i.key from fair_turn i join fair_clock c on c.priority = i.priority
             where i.next <= c.turn limit $1 for update of i skip locked
         ) and f.next <= (select turn from fair_clock c where c.priority = f.priority)

---- statement
delete from idempotency where key in (
             select key from idempotency where created_at < coalesce($1, now()) - make_interval(secs => $2)
             order by created_at limit $3 for update skip locked
         )

---- statement
delete from parking p where id = any($1)
           and not exists (select from task t where t.parked_on = p.id and t.status = 'pending')

---- statement
delete from retry_policy where kind = $1

---- statement
delete from retry_stat where bucket < coalesce($1, now()) - make_interval(days => $2)

---- statement
delete from slot s where id = any($1) and used = 0 and load = 0
           and not exists (select from gate g where g.slot_id = s.id)

---- statement
insert into attempt (task_id, run, attempt, instance, started_at, ended_at, outcome, cause, failure_type,
                              error, http_status, delay_ms, jitter_ms, next_retry_at, reason, retry_type)
         select * from unnest($1::uuid[], $2::int[], $3::smallint[], $4::uuid[], $5::timestamptz[], $6::timestamptz[],
                              $7::text[], $8::text[], $9::text[], $10::text[], $11::smallint[], $12::bigint[],
                              $13::bigint[], $14::timestamptz[], $15::text[], $16::text[])

---- statement
insert into cancel_action (task_id, run, action) select * from unnest($1::uuid[], $2::int[], $3::text[])
         on conflict (task_id) do update set run = excluded.run, action = excluded.action
             where excluded.run >= cancel_action.run

---- statement
insert into fair_clock as c (priority, turn) select * from unnest($1::smallint[], $2::bigint[]) order by 1
         on conflict (priority) do update set turn = excluded.turn where c.turn < excluded.turn

---- statement
insert into fair_turn as f (priority, key, next)
           select u.priority, u.key, coalesce(c.turn, 1) + u.n
           from unnest($1::smallint[], $2::text[], $3::bigint[]) u(priority, key, n)
           cross join (select set_config('synchronous_commit', 'off', true) as relaxed) s
           left join fair_clock c on c.priority = u.priority
           where s.relaxed is not null
           order by u.priority, u.key
           on conflict (priority, key) do update set next = excluded.next + greatest(
               f.next - coalesce((select turn from fair_clock where priority = excluded.priority), 1), 0)
           returning priority, key, next

---- statement
insert into gate (parking_id, slot_id, max_tasks, max_load)
             select * from unnest($1::bigint[], $2::bigint[], $3::int[], $4::bigint[])

---- statement
insert into idempotency as i (key, body_hash, batch_id, task_ids, created_at)
         values ($1, $2, $3, '{}', coalesce($4, now()))
         on conflict (key) do update set body_hash = excluded.body_hash, batch_id = excluded.batch_id, task_ids = '{}',
             statuses = null, created_at = excluded.created_at
         where i.created_at < coalesce($4, now()) - make_interval(secs => $5)
         returning key

---- statement
insert into link (parent_id, child_id, requires_success)
         select * from unnest($1::uuid[], $2::uuid[], $3::boolean[])

---- statement
insert into matcher (kind, fields) values ($1, $2) returning id

---- statement
insert into outbox (task_id, batch_id, trigger, condition, run, action, state, next_attempt_at,
                             created_at, updated_at)
         select t.id, t.batch_id, 'cancel', 'success', t.run, u.action,
                json_build_object('task_id', t.id, 'batch_id', t.batch_id, 'status', 'Canceled', 'trigger', 'cancel',
                                  'attempt', t.attempt, 'run', t.run, 'max_retries', s.retry::json -> 'max_retries',
                                  'will_retry', false, 'next_retry_at', null, 'failure_type', t.failure_type,
                                  'failure_reason', t.failure_reason, 'ended_at',
                                  to_char(t.ended_at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))::text,
                coalesce($4, now()), coalesce($4, now()), coalesce($4, now())
         from unnest($1::uuid[], $2::int[], $3::text[]) u(id, run, action)
         join task t on t.id = u.id and t.run = u.run and t.status = 'canceled'
         join task_spec s on s.id = t.id
         where not exists (select from outbox o where o.task_id = t.id and o.trigger = 'cancel' and o.run = t.run)

---- statement
insert into outbox (task_id, batch_id, trigger, condition, run, action, state, next_attempt_at,
                                 created_at, updated_at)
             select u.id, u.batch_id, 'cancel', 'success', u.run, c.action, u.state, $5, $5, $5
             from unnest($1::uuid[], $2::uuid[], $3::int[], $4::text[]) u(id, batch_id, run, state)
             join cancel_action c on c.task_id = u.id and c.run = u.run

---- statement
insert into outbox (task_id, batch_id, trigger, condition, run, action, state, next_attempt_at,
                                 created_at, updated_at)
             select u.id, u.batch_id, u.trigger, u.condition, u.run, a.action::text, u.state, $8, $8, $8
             from unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::int[], $6::text[], $7::text[])
                      u(id, batch_id, trigger, condition, run, list, state)
             join task_spec s on s.id = u.id
             cross join lateral json_array_elements(s.actions::json -> u.list) a(action)

---- statement
insert into parking as p (key, state) select key, 1 from unnest($1::text[]) key order by key
           on conflict (key) do update set state = greatest(p.state, 1)
           returning id, key, xmax = 0 as "new!"

---- statement
insert into retry_policy (kind, policy, updated_at) values ($1, $2, coalesce($3, now()))
         on conflict (kind) do update set policy = excluded.policy, updated_at = excluded.updated_at
         returning updated_at

---- statement
insert into retry_stat as s (bucket, shard, kind, attempt, failure_type, succeeded, scheduled, deferred,
                                      exhausted, final)
         select date_trunc('hour', coalesce($1, now()), 'utc'), pg_backend_pid() % 16, u.*
         from unnest($2::text[], $3::smallint[], $4::text[], $5::bigint[], $6::bigint[], $7::bigint[], $8::bigint[],
                     $9::bigint[]) u
         on conflict (bucket, kind, attempt, failure_type, shard) do update set
             succeeded = s.succeeded + excluded.succeeded, scheduled = s.scheduled + excluded.scheduled,
             deferred = s.deferred + excluded.deferred, exhausted = s.exhausted + excluded.exhausted,
             final = s.final + excluded.final

---- statement
insert into secret (handle) values ($1) on conflict do nothing

---- statement
insert into slot as s (matcher_id, key) select * from unnest($1::int[], $2::text[])
         on conflict (matcher_id, key) do update set used = s.used
         returning id, matcher_id, key, used, load

---- statement
select a.id as "id!", c.alive as "alive!" from unnest($1::uuid[], $2::bigint[]) a(id, most)
           cross join lateral (
               select count(*) as alive from (
                   select from link l
                   cross join lateral (select from task where id = l.child_id and ended_at is null offset 0) t
                   where l.parent_id = a.id order by l.child_id desc limit a.most
               ) c
           ) c

---- statement
select b.id, b.completed_at is not null as "complete!",
                   array[c.waiting, c.pending, c.claimed, c.running, c.retry_pending, c.paused, c.success, c.failure,
                         c.canceled, c.total_success, c.total_failures, c.total_expected] as "says!", t.counts as "is!"
               from batch b join batch_count c on c.batch_id = b.id cross join lateral (
                   select array[
                       count(*) filter (where t.status = 'waiting'), count(*) filter (where t.status = 'pending'),
                       count(*) filter (where t.status = 'claimed'), count(*) filter (where t.status = 'running'),
                       count(*) filter (where t.status = 'retry_pending'), count(*) filter (where t.status = 'paused'),
                       count(*) filter (where t.status = 'success'), count(*) filter (where t.status = 'failure'),
                       count(*) filter (where t.status = 'canceled'), coalesce(sum(t.success), 0),
                       coalesce(sum(t.failures), 0), coalesce(sum(t.expected_count), 0)]::bigint[] as counts
                   from task_spec s join task t on t.id = s.id where s.batch_id = b.id
               ) t where ($1 or b.completed_at is null)
           and (array[c.waiting, c.pending, c.claimed, c.running, c.retry_pending, c.paused, c.success, c.failure,
                      c.canceled, c.total_success, c.total_failures, c.total_expected] <> t.counts
                or (b.completed_at is null) = (0 = all(t.counts[1:6])))
         order by 1 limit 1000

---- statement
select b.id, b.completed_at is not null as "complete!",
                   array[c.waiting, c.pending, c.claimed, c.running, c.retry_pending, c.paused, c.success, c.failure,
                         c.canceled, c.total_success, c.total_failures, c.total_expected] as "says!", t.counts as "is!"
               from batch b join batch_count c on c.batch_id = b.id cross join lateral (
                   select array[
                       count(*) filter (where t.status = 'waiting'), count(*) filter (where t.status = 'pending'),
                       count(*) filter (where t.status = 'claimed'), count(*) filter (where t.status = 'running'),
                       count(*) filter (where t.status = 'retry_pending'), count(*) filter (where t.status = 'paused'),
                       count(*) filter (where t.status = 'success'), count(*) filter (where t.status = 'failure'),
                       count(*) filter (where t.status = 'canceled'), coalesce(sum(t.success), 0),
                       coalesce(sum(t.failures), 0), coalesce(sum(t.expected_count), 0)]::bigint[] as counts
                   from task_spec s join task t on t.id = s.id where s.batch_id = b.id
               ) t where b.id = $1

---- statement
select b.id, b.total, b.created_at, b.completed_at, b.scope, b.metadata, c.waiting, c.pending, c.claimed,
                  c.running, c.retry_pending, c.paused, c.success, c.failure, c.canceled,
                  c.total_success, c.total_failures, c.total_expected
           from batch b join batch_count c on c.batch_id = b.id
           where b.id = $1

---- statement
select batch_id from batch_count where batch_id = $1 for update

---- statement
select batch_id, kind from task_spec where id = $1

---- statement
select body_hash, batch_id, task_ids, statuses as "statuses?: Vec<Option<String>>", created_at
           from idempotency where key = $1

---- statement
select coalesce((
               select array[sum(waiting), sum(pending), sum(claimed), sum(running), sum(retry_pending), sum(paused),
                            sum(success), sum(failure), sum(canceled)]::bigint[] from status_count having count(*) > 0
           ), array_fill(0::bigint, array[9])) as "says!", (
               select array_agg(coalesce(t.n, 0) order by s.status) from unnest(enum_range(null::task_status)) s(status)
               left join (select status, count(*) as n from task group by 1) t on t.status = s.status
           ) as "is!"

---- statement
select coalesce(sum(waiting), 0)::bigint as "waiting!", coalesce(sum(pending), 0)::bigint as "pending!",
                  coalesce(sum(claimed), 0)::bigint as "claimed!", coalesce(sum(running), 0)::bigint as "running!",
                  coalesce(sum(retry_pending), 0)::bigint as "retry_pending!",
                  coalesce(sum(paused), 0)::bigint as "paused!", coalesce(sum(success), 0)::bigint as "success!",
                  coalesce(sum(failure), 0)::bigint as "failure!", coalesce(sum(canceled), 0)::bigint as "canceled!"
           from status_count

---- statement
select count(*) as "depth!",
                  coalesce(extract(epoch from coalesce($1, now()) - min(created_at)), 0)::double precision as "age!"
           from outbox where status = 'pending'

---- statement
select count(*) as "n!" from parking where state > 0

---- statement
select count(*) filter (where p.ended_at is null)::int as "open!",
               count(*) filter (where l.requires_success and p.status in ('failure', 'canceled')) as "lost!"
           from link l join task p on p.id = l.parent_id where l.child_id = $1

---- statement
select count(*)::int as "used!",
               coalesce(sum(greatest(0, coalesce(expected_count - success - failures, 0))), 0)::bigint as "load!"
           from task where status in ('claimed', 'running') and slots @> array[$1::bigint]

---- statement
select exists (select from pg_prepared_statements where starts_with(name, 'sqlx_s_')) as "own_name!"

---- statement
select extract(epoch from
             (select next_attempt_at from outbox where status = 'pending' order by next_attempt_at limit 1)
             - coalesce($1, now()))::double precision

---- statement
select extract(epoch from
             (select timeout_at from task where status in ('claimed', 'running') order by timeout_at limit 1)
             - coalesce($1, now()))::double precision

---- statement
select extract(epoch from coalesce($1, now()) - last_updated)::double precision as "age!" from task
           where status = 'pending' and not_before is null and parked_on is null
           order by priority desc, turn, id limit 1

---- statement
select extract(epoch from least(
             (select next_retry_at from task where status = 'retry_pending' order by next_retry_at limit 1),
             (select not_before from task where status = 'pending' and not_before is not null
              order by not_before limit 1)
         ) - coalesce($1, now()))::double precision

---- statement
select gin_clean_pending_list(c.oid) from pg_class c
         where c.oid = 'task_spec_metadata_idx'::regclass and pg_has_role(c.relowner, 'usage')

---- statement
select handle from secret

---- statement
select id from (
               select b.id, sum(b.total) over (order by b.completed_at, b.id) - b.total as before
               from (
                   select b.id, b.total, b.completed_at from batch b
                   where b.completed_at < coalesce($1, now()) - make_interval(days => $2)
                     and not exists (select from outbox o where o.batch_id = b.id and o.status = 'pending')
                   order by b.completed_at limit 1000 for update skip locked
               ) b
           ) b where b.before < $3

---- statement
select id from batch where id = $1

---- statement
select id from outbox where id = $1

---- statement
select id from parking p where not exists (select from task t where t.parked_on = p.id and t.status = 'pending')
         order by id limit $1 for update skip locked

---- statement
select id from slot where used = 0 and load = 0 and not exists (select from gate g where g.slot_id = slot.id)
         order by id limit $1 for update skip locked

---- statement
select id from task where id = $1

---- statement
select id from task where id = any($1) order by id for update skip locked

---- statement
select id, greatest(0, coalesce(expected_count - success - failures, 0)) as "remaining!"
           from task where id = any($1)

---- statement
select id, kind, fields from matcher where id > $1 order by id

---- statement
select id, kind, metadata, rules from task_spec
         where id = any($1) and (rules is not null or kind = any($2))

---- statement
select id, priority, turn, parked_on,
               greatest(0, coalesce(expected_count - success - failures, 0)) as "remaining!"
           from task where status = 'pending' and not_before is null and parked_on is null
           order by priority desc, turn, id limit $1 for update skip locked

---- statement
select id, run from task where id = any($1) and claimed_by = $2 and started_at is null
           and timeout_at > coalesce($3, now()) + make_interval(secs => $4)

---- statement
select k.number as "number!", m.id as "id!", m.status as "status!"
               from unnest($1::text[], $2::text[], $3::jsonb[]) with ordinality k(kind, status, fields, number)
               cross join lateral (
                   (select t.id, t.status::text as status
                    from (select id, kind, metadata from task_spec where metadata @> k.fields offset 0) s
                    cross join lateral (select id, status, ended_at from task where id = s.id offset 0) t
                    where k.fields <> '{}' and s.kind = k.kind
                      and not exists (
                          select from jsonb_each(k.fields) f where s.metadata -> f.key is distinct from f.value
                      )
                      and (t.status = k.status::task_status or k.status is null and t.ended_at is null)
                    order by t.id desc limit 1)
                   union all
                   (select t.id, t.status::text
                    from task_spec s
                    cross join lateral (select id, status, ended_at from task where id = s.id offset 0) t
                    where k.fields = '{}' and s.kind = k.kind
                      and (t.status = k.status::task_status or k.status is null and t.ended_at is null)
                    order by s.id desc limit 1)
               ) m

---- statement
select key from fair_turn limit 1

---- statement
select kind, attempt, failure_type, sum(succeeded)::bigint as "succeeded!",
                  sum(scheduled)::bigint as "scheduled!", sum(deferred)::bigint as "deferred!",
                  sum(exhausted)::bigint as "exhausted!", sum(final)::bigint as "final!"
           from retry_stat
           where ($1::text is null or kind = $1) and ($2::timestamptz is null or bucket >= date_trunc('hour', $2, 'utc'))
           group by kind, attempt, failure_type order by kind, attempt, failure_type

---- statement
select kind, policy, updated_at from retry_policy order by kind

---- statement
select l.parent_id as "parent_id!", l.child_id as "child_id!", l.requires_success as "requires_success!"
           from task_spec s join link l on l.parent_id = s.id where s.batch_id = $1
           union
           select l.parent_id, l.child_id, l.requires_success
           from task_spec s join link l on l.child_id = s.id where s.batch_id = $1
           order by 2, 1

---- statement
select outcome, cause from attempt where task_id = $1 and run = $2

---- statement
select p.id, g.slot_id, g.max_tasks, g.max_load
         from (select id from parking where state = 2 order by id limit $1) p join gate g on g.parking_id = p.id

---- statement
select pg_advisory_xact_lock($1)

---- statement
select pg_advisory_xact_lock($1, place), set_config('jit', 'off', true) from unnest($2::int[]) place

---- statement
select pg_notify($1, $2)

---- statement
select run, attempt, retry_type, instance, started_at, ended_at, outcome, failure_type, error, http_status,
                delay_ms, jitter_ms, next_retry_at, reason
         from attempt where task_id = $1 and run > $2 order by run limit $3 offset $4

---- statement
select s.id from task_spec s join task t on t.id = s.id
         where s.batch_id = $1 and t.status = 'failure' and t.failure_type is distinct from 'dependency' order by s.id

---- statement
select s.id, s.matcher_id, s.key, s.used, s.load from slot s
         where s.id = any($3) or s.id in (
             select k.id from unnest($1::int[], $2::text[]) u(matcher_id, key)
             join slot k on k.matcher_id = u.matcher_id and k.key = u.key
         )
         order by s.id for update of s

---- statement
select s.id, s.metadata, t.expected_count from task_spec s join task t on t.id = s.id
         where s.batch_id = $1 and s.kind = $2 and t.ended_at is null
           and (not coalesce(s.metadata, '{}') ?& $3 or $4 and t.expected_count is null)
         order by s.id limit 10

---- statement
select s.id, t.alive as "alive!" from (
               select id from task_spec where batch_id = $1 and id < $2 order by id desc limit $3
           ) s
           cross join lateral (select ended_at is null as alive from task where id = s.id offset 0) t

---- statement
select seq, at, from_status::text as "from_status?", to_status::text as "to_status!", cause, actor, instance,
                  run, attempt, array_position(task_ids, $2) as "place!"
           from event where batch_id = $1 and seq > $3 and $2 = any(task_ids) order by seq limit $4 offset $5

---- statement
select shard from status_count order by shard for update

---- statement
select status::text as "status!", run from task where id = $1

---- statement
select t.id, s.metadata,
               greatest(0, coalesce(t.expected_count - t.success - t.failures, 0)) as "remaining!"
           from task t join task_spec s on s.id = t.id
           where t.status in ('claimed', 'running') and s.kind = $1 order by t.id for update of t

---- statement
select t.id, s.name, s.kind, t.status::text as "status!", t.batch_id, t.priority, t.attempt, t.run,
                   t.next_retry_at, t.success, t.failures, t.expected_count, t.created_at, t.started_at, t.ended_at,
                   s.dead_end_barrier, t.timeout_secs, s.metadata, s.actions, c.action as "cancel?", t.last_updated,
                   t.failure_reason, t.failure_type, s.retry, s.retry_source, t.deferrals, s.run_at, s.rules, s.fair_key,
                   t.flags, t.wait_count, t.claimed_by, t.claimed_run, t.manual_run, t.slots, t.timeout_at,
                   coalesce($1, now()) as "now!"
               from task t join task_spec s on s.id = t.id
               left join cancel_action c on c.task_id = t.id and c.run = t.run
               where t.id = any($2)

---- statement
select t.id, s.name, s.kind, t.status::text as "status!", t.batch_id, t.priority, t.attempt, t.run,
                   t.next_retry_at, t.success, t.failures, t.expected_count, t.created_at, t.started_at, t.ended_at,
                   s.dead_end_barrier, t.timeout_secs, s.metadata, s.actions, c.action as "cancel?", t.last_updated,
                   t.failure_reason, t.failure_type, s.retry, s.retry_source, t.deferrals, s.run_at, s.rules, s.fair_key,
                   t.flags, t.wait_count, t.claimed_by, t.claimed_run, t.manual_run, t.slots, t.timeout_at,
                   coalesce($1, now()) as "now!"
               from task t join task_spec s on s.id = t.id
               left join cancel_action c on c.task_id = t.id and c.run = t.run
               where t.id = any($2) order by t.id for update of t skip locked

---- statement
select t.id, t.batch_id, s.kind, t.status::text as "status!", t.flags, t.attempt, t.run, t.deferrals,
                   t.wait_count, t.timeout_secs, t.claimed_by, t.claimed_run, t.manual_run, t.slots, t.timeout_at,
                   t.next_retry_at, t.created_at, t.last_updated, t.started_at, t.ended_at, t.failure_type, t.failure_reason, s.retry,
                   coalesce($1, now()) as "now!"
               from task t join task_spec s on s.id = t.id where t.id = any($2) order by t.id for update of t

---- statement
select t.id, t.batch_id, s.kind, t.status::text as "status!", t.flags, t.attempt, t.run, t.deferrals,
                   t.wait_count, t.timeout_secs, t.claimed_by, t.claimed_run, t.manual_run, t.slots, t.timeout_at,
                   t.next_retry_at, t.created_at, t.last_updated, t.started_at, t.ended_at, t.failure_type, t.failure_reason, s.retry,
                   coalesce($1, now()) as "now!"
               from task t join task_spec s on s.id = t.id where t.id in (
             select id from task
             where status in ('claimed', 'running') and timeout_at <= coalesce($1, now())
             order by timeout_at limit $2 for update skip locked
         ) order by t.id for update of t

---- statement
select t.id, t.wait_count, p.open as "open!"
           from batch b join task_spec s on s.batch_id = b.id join task t on t.id = s.id cross join lateral (
               select count(*) filter (where p.ended_at is null) as open
               from link l join task p on p.id = l.parent_id where l.child_id = t.id
           ) p
           where b.completed_at is null and t.status in ('waiting', 'pending', 'paused') and t.wait_count <> p.open
             and coalesce(t.claimed_run < coalesce(t.manual_run, 0), true)
           order by 1 limit 1000

---- statement
select t.parked_on as "id!", count(*) as "tasks!", min(p.state) as state
           from task t left join parking p on p.id = t.parked_on
           where t.status = 'pending' and t.parked_on is not null and coalesce(p.state, 0) < 2
             and (coalesce(p.state, 0) = 0 or not exists (
                 select from gate g join slot s on s.id = g.slot_id
                 where g.parking_id = p.id and (s.used >= g.max_tasks or s.load >= g.max_load)
             ))
           group by 1 order by 1 limit 1000

---- statement
select used, load from slot where id = $1 for update

---- statement
update batch set completed_at = null where id = any($1) and completed_at is not null

---- statement
update idempotency set task_ids = $2, statuses = $3, created_at = $4 where key = $1

---- statement
update outbox o set attempts = o.attempts - 1, updated_at = coalesce($4, now()),
             next_attempt_at = coalesce($4, now()) + make_interval(secs => u.again)
         from unnest($1::bigint[], $2::int[], $3::double precision[]) u(id, attempts, again)
         where o.id = u.id and o.status = 'pending' and o.attempts = u.attempts

---- statement
update outbox o set status = u.status, last_status = u.last_status, last_error = u.last_error,
             next_attempt_at = coalesce($7, now()) + make_interval(secs => u.again), updated_at = coalesce($7, now())
         from unnest($1::bigint[], $2::int[], $3::text[]::delivery_status[], $4::int[], $5::text[],
                     $6::double precision[])
             u(id, attempts, status, last_status, last_error, again)
         where o.id = u.id and o.status = 'pending' and (o.attempts = u.attempts or u.status = 'success')

---- statement
update outbox set status = 'pending', attempts = 0, next_attempt_at = coalesce($2, now()),
             updated_at = coalesce($2, now())
         where id = $1 and status <> 'pending' returning id

---- statement
update parking set state = 2 where id = $1

---- statement
update task set flags = flags | $2 where id = any($1) and flags & $2 <> $2

---- statement
update task set parked_on = null where id = $1 and parked_on is not null

---- statement
update task set parked_on = null where parked_on = $1 and status = 'pending'

---- statement
update task set timeout_at = last_updated + make_interval(secs => timeout_secs)
         where id = any($1) and status = 'running'

---- statement
update task t set parked_on = u.parking from unnest($1::uuid[], $2::bigint[]) u(id, parking)
         where t.id = u.id and t.parked_on is distinct from u.parking

---- statement
update task t set slots = coalesce(t.slots, '{}') || u.slot
         from unnest($1::uuid[], $2::bigint[]) u(id, slot) where t.id = u.id

---- statement
update task t set status = 'claimed', claimed_by = $3, claimed_run = t.run, wait_count = 0, parked_on = null,
               slots = u.slots::bigint[], timeout_at = coalesce($4, now()) + make_interval(secs => $5),
               last_updated = coalesce($4, now())
           from unnest($1::uuid[], $2::text[], $6::text[]::task_status[]) u(id, slots, from_status)
           join task_spec s on s.id = u.id
           where t.id = u.id and t.status = u.from_status
           returning t.id, t.batch_id, t.run, t.attempt, t.priority, t.turn, t.last_updated,
               case when t.flags & $7 <> 0 then s.actions end as actions

---- statement
update task t set
             status = u.status, attempt = u.attempt, run = u.run, deferrals = u.deferrals, wait_count = u.wait_count,
             claimed_by = u.claimed_by, claimed_run = u.claimed_run, timeout_at = u.timeout_at,
             next_retry_at = u.next_retry_at, started_at = u.started_at, ended_at = u.ended_at,
             failure_type = u.failure_type, failure_reason = u.failure_reason, manual_run = u.manual_run,
             slots = case when u.claimed_by is not null then t.slots end, parked_on = null, last_updated = $18
         from unnest($1::uuid[], $2::text[]::task_status[], $3::int[], $4::text[]::task_status[], $5::smallint[],
                     $6::int[], $7::int[], $8::int[], $9::uuid[], $10::int[], $11::timestamptz[], $12::timestamptz[],
                     $13::timestamptz[], $14::timestamptz[], $15::text[], $16::text[], $17::int[])
             u(id, from_status, from_run, status, attempt, run, deferrals, wait_count, claimed_by, claimed_run,
               timeout_at, next_retry_at, started_at, ended_at, failure_type, failure_reason, manual_run)
         where t.id = u.id and t.status = u.from_status and t.run = u.from_run

---- statement
update task t set turn = coalesce((select turn from fair_clock c where c.priority = t.priority), 0) where id = $1

---- statement
update task_spec set metadata = coalesce(metadata, '{}') || $2 where id = $1 returning metadata as "metadata!"

---- statement
with chosen as materialized (
             select t.id from task_spec s join task t on t.id = s.id
             where s.batch_id = $1 and s.kind = $2 and ($3::uuid is null or s.id > $3) and t.ended_at is null
             order by t.id limit $4 for update of t
         ), given as (
             update task_spec s set rules = $5 from chosen c where s.id = c.id
         ), back as (
             update task t set parked_on = null from chosen c where t.id = c.id and t.parked_on is not null
         )
         select id from chosen order by id

---- statement
with done as (
             update batch b set completed_at = coalesce($2, now()), completions = b.completions + 1
             where b.id = any($1) and b.completed_at is null
             returning b.id, b.completions - 1 as completion, b.on_complete, b.total
         )
         insert into outbox (batch_id, trigger, condition, run, action, state, next_attempt_at, created_at, updated_at)
         select d.id, 'batch', 'complete', d.completion, a.action::text,
                json_build_object('batch_id', d.id, 'trigger', 'batch', 'completion', d.completion,
                                  'total_tasks', d.total, 'success', c.success, 'failure', c.failure,
                                  'canceled', c.canceled)::text,
                coalesce($2, now()), coalesce($2, now()), coalesce($2, now())
         from done d join batch_count c on c.batch_id = d.id
         cross join lateral json_array_elements(d.on_complete::json) a(action)

---- statement
with free as materialized (
               select g.parking_id, min(least(greatest(coalesce(g.max_tasks - coalesce(s.used, 0), $2), 0), $2)) as n
               from gate g left join slot s on s.id = g.slot_id where g.parking_id = any($1) group by 1
           ), first as materialized (
               select t.id, f.parking_id from free f cross join lateral (
                   select id, priority, turn from task where parked_on = f.parking_id and status = 'pending'
                   order by priority desc, turn, id limit f.n
               ) t order by t.priority desc, t.turn, t.id limit $2
           )
           select t.id, t.priority, t.turn, t.parked_on,
               greatest(0, coalesce(t.expected_count - t.success - t.failures, 0)) as "remaining!"
           from first f join task t on t.id = f.id
           where t.status = 'pending' and t.parked_on = f.parking_id
           for update of t skip locked

---- statement
with held as (
               select u.slot, count(*) as used,
                      sum(greatest(0, coalesce(t.expected_count - t.success - t.failures, 0)))::bigint as load
               from task t cross join lateral unnest(t.slots) u(slot)
               where t.status in ('claimed', 'running') group by 1
           )
           select s.id, s.used, s.load, coalesce(h.used, 0) as "is_used!", coalesce(h.load, 0) as "is_load!"
           from slot s left join held h on h.slot = s.id
           where (s.used, s.load) is distinct from (coalesce(h.used, 0), coalesce(h.load, 0)) order by 1 limit 1000

---- statement
with held as materialized (
             select id, success, failures, expected_count, priority from task where id = any($1) order by id for update
         )
         update task t set success = t.success + u.success, failures = t.failures + u.failures,
             expected_count = coalesce(u.expected_count, t.expected_count), priority = coalesce(u.priority, t.priority),
             last_updated = coalesce($7, now())
         from unnest($1::uuid[], $2::int[], $3::bigint[], $4::bigint[], $5::int[], $6::smallint[])
             u(id, run, success, failures, expected_count, priority)
         join held h on h.id = u.id
         where t.id = u.id and t.ended_at is null and (u.run is null or u.run = t.run)
         returning t.id, t.batch_id, t.slots, t.priority <> h.priority as "reordered!", u.success as "success!",
             u.failures as "failures!", coalesce(u.expected_count - coalesce(h.expected_count, 0), 0)::bigint as "expected!",
             greatest(0, coalesce(t.expected_count - t.success - t.failures, 0))
             - greatest(0, coalesce(h.expected_count - h.success - h.failures, 0)) as "more_to_do!"

---- statement
with held as materialized (
             select t.id from task t join unnest($1::uuid[], $2::int[]) u(id, run) on t.id = u.id and t.run = u.run
             where t.claimed_by = $3 and t.started_at is null order by t.id for update of t
         )
         update task t set timeout_at = coalesce($4, now()) + make_interval(secs => $5)
         from held h where t.id = h.id and t.claimed_by = $3 and t.started_at is null
         returning t.id

---- statement
with held as materialized (
               select u.* from unnest($1::uuid[], $2::int[], $3::text[]::task_status[]) u(id, run, from_status)
               cross join lateral (select from task where id = u.id for update skip locked) t
           ), moved as (
               update task t set status = 'running', started_at = coalesce($5, now()), last_updated = coalesce($5, now()),
                   timeout_at = coalesce($5, now()) + make_interval(secs => t.timeout_secs)
               from held h
               where t.id = h.id and t.run = h.run and t.status = h.from_status and t.claimed_by = $4
               returning t.id, t.batch_id, t.run, t.attempt, t.last_updated
           )
           select id as "id!", batch_id, run, attempt, last_updated from moved
           union all
           select id, null, null, null, null from held

---- statement
with held as materialized (
               select u.id, u.success, u.failures
               from unnest($1::uuid[], $2::int[], $3::bigint[], $4::bigint[]) u(id, run, success, failures)
               cross join lateral (
                   select from task where id = u.id and ended_at is null and slots is null
                       and (u.run is null or u.run = run)
                   for update skip locked
               ) t
           ), counted as (
               update task t set success = t.success + h.success, failures = t.failures + h.failures,
                   last_updated = coalesce($5, now())
               from held h where t.id = h.id
               returning t.id, t.batch_id, h.success, h.failures
           ), sums as materialized (
               select batch_id, sum(success)::bigint as success, sum(failures)::bigint as failures from counted
               group by batch_id having sum(success) <> 0 or sum(failures) <> 0
           ), batches as materialized (
               select batch_id from batch_count where batch_id = any(array(select batch_id from sums))
               order by batch_id for update
           ), summed as (
               update batch_count c set total_success = c.total_success + s.success,
                   total_failures = c.total_failures + s.failures, updated_at = coalesce($5, now())
               from sums s where c.batch_id = s.batch_id and (select count(*) from batches) >= 0
           )
           select id as "id!" from counted

---- statement
with held as materialized (select id, slots from task where id = any($1) order by id for update)
           update task t set status = 'pending', claimed_by = null, timeout_at = null, slots = null,
               last_updated = coalesce($5, now())
           from unnest($1::uuid[], $2::int[], $3::text[]::task_status[]) u(id, run, from_status)
           join held h on h.id = u.id
           where t.id = u.id and t.run = u.run and t.status = u.from_status and t.claimed_by = $4
           returning t.id, t.batch_id, t.run, t.attempt, t.last_updated, h.slots as "slots?",
               greatest(0, coalesce(t.expected_count - t.success - t.failures, 0)) as "remaining!"

---- statement
with locked as materialized (
               select id from parking where id = any($1) or id = any($2) order by id for update
           )
           update parking p set state = case
               when p.id = any($1) then 1
               when exists (select from task t where t.parked_on = p.id and t.status = 'pending') then 2
               else 0 end
           from locked l where l.id = p.id returning p.state

---- statement
with locked as materialized (
             select p.id from parking p where p.state = 1 and p.id in (
                 select g.parking_id from gate g join slot s on s.id = g.slot_id
                 where g.slot_id = any($1) and (g.max_tasks is null or s.used < g.max_tasks)
                   and (g.max_load is null or s.load < g.max_load)
             ) order by p.id for update
         )
         update parking p set state = 2 from locked l where p.id = l.id

---- statement
with locked as materialized (select id from slot where id = any($1) order by id for update)
         update slot s set used = s.used + u.used, load = s.load + u.load
         from unnest($1::bigint[], $2::int[], $3::bigint[]) u(id, used, load)
         where s.id = u.id and (select count(*) from locked) >= 0

---- statement
with picked as materialized (
             select id from outbox where status = 'pending' and next_attempt_at <= coalesce($1, now())
             order by next_attempt_at, id limit $2 for update skip locked
         )
         update outbox o set attempts = o.attempts + 1, updated_at = coalesce($1, now()),
             next_attempt_at = coalesce($1, now()) + make_interval(secs => $3)
         from picked p where o.id = p.id
         returning o.id, o.task_id, o.batch_id, o.trigger, o.condition, o.run, o.action, o.state, o.attempts

---- statement
with picked as materialized (
               select id from task where status = 'pending' and not_before is null and parked_on is null
               order by priority desc, turn, id limit $1 for update skip locked
           )
           update task t set status = 'claimed', claimed_by = $2, claimed_run = t.run, wait_count = 0,
               timeout_at = coalesce($3, now()) + make_interval(secs => $4), last_updated = coalesce($3, now())
           from picked p join task_spec s on s.id = p.id
           where t.id = p.id and t.status = 'pending'
           returning t.id, t.batch_id, t.run, t.attempt, t.priority, t.turn, t.last_updated,
               case when t.flags & $5 <> 0 then s.actions end as actions

---- statement
with recursive down(id) as (
               select unnest($1::uuid[])
               union
               select l.child_id from down d cross join lateral (
                   select child_id from link where parent_id = d.id and requires_success offset 0
               ) l
           ), up(id, tells, above) as (
               select t.id, t.flags & $3 <> 0, false from down d cross join lateral (
                   select id, flags from task where id = d.id offset 0
               ) t
               union
               select p.id, p.flags & $3 <> 0, true from up u
               cross join lateral (select parent_id from link where child_id = u.id offset 0) l
               cross join lateral (
                   select id, flags from task
                   where id = l.parent_id and ended_at is null and flags & $2 <> 0 offset 0
               ) p
               where u.tells
           )
           select id as "id!", above as "above!" from up
           union all
           select l.child_id, false
           from down d cross join lateral (select child_id from link where parent_id = d.id offset 0) l

---- statement
with recursive falling(id) as (
                   select unnest($2::uuid[])
                   union
                   select l.child_id from falling f
                   cross join lateral (select child_id from link where parent_id = f.id and requires_success offset 0) l
                   cross join lateral (select from task where id = l.child_id and ended_at is null offset 0) t
               )
               select l.parent_id as "parent_id!", l.child_id as "child_id!", l.requires_success as "requires_success!"
               from link l where l.parent_id = any($1)
               union all
               select l.parent_id, l.child_id, l.requires_success
               from falling f cross join lateral (select * from link where parent_id = f.id offset 0) l

---- statement
with recursive reached(id) as (
               select unnest($1::uuid[])
               union
               select l.child_id from reached r cross join lateral (
                   select child_id from link where parent_id = r.id and requires_success offset 0
               ) l
           )
           select l.parent_id as "parent_id!", l.child_id as "child_id!", l.requires_success as "requires_success!"
           from reached r cross join lateral (select * from link where parent_id = r.id offset 0) l
           union
           select l.parent_id, l.child_id, l.requires_success
           from reached r cross join lateral (select * from link where child_id = r.id offset 0) l

---- statement
with recursive up(id, tells) as (
               select unnest($1::uuid[]), true
               union
               select p.id, p.flags & $3 <> 0 from up u
               cross join lateral (select parent_id from link where child_id = u.id offset 0) l
               cross join lateral (
                   select id, flags from task
                   where id = l.parent_id and ended_at is null and flags & $2 <> 0 and batch_id is distinct from $4
                   offset 0
               ) p
               where u.tells
           )
           select u.id as "child!", p.id as "parent!", u.tells as "tells!" from up u
           cross join lateral (select parent_id from link where child_id = u.id offset 0) l
           cross join lateral (
               select id from task
               where id = l.parent_id and ended_at is null and flags & $2 <> 0 and batch_id is distinct from $4
               offset 0
           ) p

---- statement
with retry as materialized (
               select id, status from task where status = 'retry_pending' and next_retry_at <= coalesce($1, now())
               order by next_retry_at limit $2 for update skip locked
           ), early as materialized (
               select id, status from task where status = 'pending' and not_before <= coalesce($1, now())
               order by not_before limit $2 for update skip locked
           ), due as (select * from retry union all select * from early)
           update task t set status = 'pending', not_before = null, next_retry_at = null, started_at = null,
               ended_at = null, failure_type = null, failure_reason = null, last_updated = coalesce($1, now())
           from due d where t.id = d.id
           returning t.id, t.batch_id, t.run, t.attempt, t.last_updated, d.status::text as "from!"

---- statement
with spec as (delete from task_spec where batch_id = any($1) returning id),
           task as (delete from task t using spec s where t.id = s.id returning t.status),
           below as (delete from link l using spec s where l.parent_id = s.id),
           above as (
               delete from link l using spec s
               where l.child_id = s.id and not exists (select from spec p where p.id = l.parent_id)
           ),
           attempt as (delete from attempt a using spec s where a.task_id = s.id),
           cancel as (delete from cancel_action c using spec s where c.task_id = s.id),
           event as (delete from event where batch_id = any($1)),
           sent as (delete from outbox where batch_id = any($1)),
           counts as (delete from batch_count where batch_id = any($1)),
           batch as (delete from batch where id = any($1))
           select count(*) filter (where status = 'success') as "success!",
                  count(*) filter (where status = 'failure') as "failure!",
                  count(*) filter (where status = 'canceled') as "canceled!" from task

---- statement
with told as (
               insert into event (at, actor, instance, batch_id, from_status, to_status, cause, run, attempt, task_ids)
               select coalesce($14, now()), $15, $16, u.batch_id, u.from_status, u.to_status, u.cause, u.run, u.attempt,
                      ($17::uuid[])[u.first:u.last]
               from unnest($18::int[], $19::int[], $20::uuid[], $21::text[]::task_status[], $22::text[]::task_status[],
                           $23::text[], $24::int[], $25::smallint[])
                   u(first, last, batch_id, from_status, to_status, cause, run, attempt)
               returning 1
           ), counted as (
               insert into status_count as s (shard, waiting, pending, claimed, running, retry_pending, paused, success,
                                              failure, canceled)
               select pg_backend_pid() % 16, n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9]
               from (select $26::bigint[] as n) total where cardinality(n) > 0
               on conflict (shard) do update set
                   waiting = s.waiting + excluded.waiting, pending = s.pending + excluded.pending,
                   claimed = s.claimed + excluded.claimed, running = s.running + excluded.running,
                   retry_pending = s.retry_pending + excluded.retry_pending, paused = s.paused + excluded.paused,
                   success = s.success + excluded.success, failure = s.failure + excluded.failure,
                   canceled = s.canceled + excluded.canceled
               returning 1
           ), locked as materialized (
               select c.batch_id from batch_count c
               where c.batch_id = any($1) and (select count(*) from told) + (select count(*) from counted) >= 0
               order by c.batch_id for update
           ), d as (
               select * from unnest($1::uuid[], $2::int[], $3::int[], $4::int[], $5::int[], $6::int[], $7::int[],
                                    $8::int[], $9::int[], $10::int[], $11::bigint[], $12::bigint[], $13::bigint[])
                   d(batch_id, waiting, pending, claimed, running, retry_pending, paused, success, failure,
                     canceled, total_success, total_failures, total_expected)
           )
           update batch_count c set
               waiting = c.waiting + d.waiting, pending = c.pending + d.pending, claimed = c.claimed + d.claimed,
               running = c.running + d.running, retry_pending = c.retry_pending + d.retry_pending,
               paused = c.paused + d.paused, success = c.success + d.success, failure = c.failure + d.failure,
               canceled = c.canceled + d.canceled, total_success = c.total_success + d.total_success,
               total_failures = c.total_failures + d.total_failures,
               total_expected = c.total_expected + d.total_expected, updated_at = coalesce($14, now())
           from d
           where c.batch_id = d.batch_id and (select count(*) from locked) >= 0
           returning c.batch_id,
               c.waiting + c.pending + c.claimed + c.running + c.retry_pending + c.paused as "alive!"

---- statement
with u as materialized (
             select * from unnest($1::uuid[], $3::uuid[], $4::text[]::task_status[], $5::smallint[], $6::smallint[],
                                  $7::int[], $8::int[], $9::int[], $10::timestamptz[], $11::text[], $12::text[],
                                  $13::jsonb[], $14::text[], $15::text[], $16::boolean[], $17::text[], $18::bigint[],
                                  $19::text[], $20::text[])
                 u(batch_id, id, status, priority, flags, wait_count, timeout_secs, expected_count, run_at, name, kind,
                   metadata, actions, retry, dead_end_barrier, retry_source, turn, rules, fair_key)
         ), spec as (
             insert into task_spec (id, batch_id, timeout_secs, name, kind, metadata, actions, retry, retry_source,
                                    run_at, dead_end_barrier, rules, fair_key, created_at)
             select id, batch_id, timeout_secs, name, kind, metadata, actions, retry, retry_source, run_at,
                    dead_end_barrier, rules, fair_key, $2 from u
         )
         insert into task (id, batch_id, status, priority, flags, wait_count, timeout_secs, expected_count, not_before,
                           turn, kind_hash, created_at, last_updated)
         select id, batch_id, status, priority, flags, wait_count, timeout_secs, expected_count,
                case when run_at > $2 then run_at end, turn, hashtext(kind), $2, $2 from u

---- statement
with u as materialized (
             select *, array(select json_array_elements_text(kinds_json::json)) as kinds
             from unnest($1::uuid[], $2::text[], $3::jsonb[], $4::text[], $5::int[], $6::text[], $7::int[], $8::bigint[])
                 u(id, scope, metadata, kinds_json, total, on_complete, waiting, expected)
         ), b as (
             insert into batch (id, scope, metadata, kinds, total, on_complete, created_at)
             select id, scope, metadata, kinds, total, on_complete, coalesce($9, now()) from u
         ), c as (
             insert into batch_count (batch_id, waiting, pending, total_expected, updated_at)
             select id, waiting, total - waiting, expected, coalesce($9, now()) from u
         )
         select coalesce($9, now()) as "now!"
