//! The statements of the service read little more than they need, at a size where a whole table would be felt.
//!
//! No test here repeats a statement: each calls the functions of the store, or the API, and then asks PostgreSQL which
//! indexes were scanned and how many rows were read.

use std::time::Duration;

use reprise::clock::Clock;
use reprise::domain::task::status::Status;
use reprise::store::batches::list::BatchFilter;
use reprise::store::ledger::status_counts;
use reprise::store::page::Page;
use reprise::store::tasks::list::{self, TaskFilter};
use reprise::store::tasks::{lock, transitions};
use reprise::store::{Actor, Patience, Result, Store, Tx, batches, outbox};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use uuid::Uuid;

use crate::support::{Database, Fixture, eventually};

/// 200,000 tasks, most of them finished, and statistics from before most of them changed.
async fn large() -> Database {
    let db = Database::new().await;
    // Over a connection that is closed at once: only then are its own reads counted, before the test counts.
    let mut connection = PgConnection::connect(&db.url).await.unwrap();
    // Vacuum reads tables whole, which is counted too.
    let load = sqlx::raw_sql(
        "alter table task set (autovacuum_enabled = off);
         alter table task_spec set (autovacuum_enabled = off);
         alter table outbox set (autovacuum_enabled = off);
         insert into task (id, batch_id, status, priority, flags, timeout_secs, created_at, last_updated, ended_at,
                           next_retry_at, timeout_at, claimed_by, not_before)
         select gen_random_uuid(), gen_random_uuid(), s::task_status, 0, 0, 60, now(), now(),
                case when s = 'success' then now() end, case when s = 'retry_pending' then now() + '7 days' end,
                case when s = 'running' then now() + '1 hour' end,
                case when s = 'running' then gen_random_uuid() end,
                case when s = 'pending' and n % 2 = 0 then now() + '7 days' end
         from (select n, case when n % 100 < 80 then 'success' when n % 100 < 90 then 'retry_pending'
                              when n % 100 < 95 then 'running' when n % 100 < 99 then 'pending' else 'waiting' end s
               from generate_series(1, 200000) n) x;
         insert into task_spec (id, batch_id, name, kind, created_at) select id, batch_id, 'n', 'k', now() from task;
         insert into outbox (batch_id, trigger, condition, run, action, state, status, next_attempt_at, created_at, updated_at)
         select gen_random_uuid(), 'end', 'success', 0, '{}', '{}',
                (case when n % 10 = 0 then 'pending' else 'success' end)::delivery_status, now() + '1 hour', now(), now()
         from generate_series(1, 50000) n;
         analyze;",
    );
    load.execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    db
}

/// Rows of these tables that were read without an index.
async fn read_without_index(db: &Database, tables: &str) -> i64 {
    let read = "select coalesce(sum(seq_tup_read), 0)::bigint from pg_stat_user_tables where relname = any";
    db.number(&format!("{read}(string_to_array('{tables}', ' '))")).await
}

/// How often an index was scanned, and how many of its entries were read.
async fn index_reads(db: &Database, index: &str) -> (i64, i64) {
    let of = |column: &str| format!("select {column} from pg_stat_user_indexes where indexrelname = '{index}'");
    (db.number(&of("idx_scan")).await, db.number(&of("idx_tup_read")).await)
}

/// Runs statements more often than the server plans for single values. They must scan each of these indexes, read
/// fewer than `most` of its entries and read no table whole.
async fn assert_walks(db: &Database, indexes: &[&str], most: i64, statements: impl AsyncFn(&Store)) {
    let tables = "task task_spec outbox link";
    let whole = read_without_index(db, tables).await;
    let mut before = Vec::new();
    for index in indexes {
        before.push(index_reads(db, index).await);
    }
    let store = db.store(Clock::Database);
    for _ in 0..10 {
        statements(&store).await;
    }
    db.close(&store).await;
    for (index, (scans, entries)) in indexes.iter().zip(before) {
        let after = index_reads(db, index).await;
        assert!(after.0 > scans, "{index} was not used");
        assert!(after.1 - entries < most, "{} entries of {index} were read", after.1 - entries);
    }
    assert_eq!(read_without_index(db, tables).await, whole, "a table was read whole instead of {indexes:?}");
}

/// Runs a statement in a transaction that is rolled back.
async fn rolled_back<T>(store: &Store, statement: impl AsyncFn(&mut Tx) -> Result<T>) {
    let statement = &statement;
    let once = |session: reprise::store::Session| async move {
        let mut tx = session.begin(Actor::Api).await?;
        statement(&mut tx).await?;
        tx.rollback().await
    };
    store.retrying(Patience::Brief, once).await.unwrap();
}

#[tokio::test]
async fn each_loop_statement_walks_its_own_index() {
    let db = large().await;
    let lease = Duration::from_secs(30);
    // The smallest of these indexes has 4,000 entries, so ten scans of a whole index would read 40,000.
    let most = 2000;
    let claim = async |tx: &mut Tx| transitions::claim(tx, 50, 50, lease).await;
    assert_walks(&db, &["task_start_idx"], most, async |store| rolled_back(store, claim).await).await;
    let timed_out = async |tx: &mut Tx| lock::timed_out(tx, 500, &[]).await;
    assert_walks(&db, &["task_timeout_idx"], most, async |store| rolled_back(store, timed_out).await).await;
    let overdue = async |tx: &mut Tx| lock::overdue(tx, 500, &[]).await;
    assert_walks(&db, &["task_timeout_idx"], most, async |store| rolled_back(store, overdue).await).await;
    let next_timeout = async |tx: &mut Tx| lock::next_timeout(tx).await;
    assert_walks(&db, &["task_timeout_idx"], most, async |store| rolled_back(store, next_timeout).await).await;
    let release = ["task_retry_idx", "task_due_idx"];
    let release_due = async |tx: &mut Tx| transitions::release_due(tx, 1000).await;
    assert_walks(&db, &release, most, async |store| rolled_back(store, release_due).await).await;
    let next_release = async |tx: &mut Tx| transitions::next_release(tx).await;
    assert_walks(&db, &release, most, async |store| rolled_back(store, next_release).await).await;
    let lease_due = async |tx: &mut Tx| outbox::delivery::lease(tx, 200, lease).await;
    assert_walks(&db, &["outbox_deliver_idx"], most, async |store| rolled_back(store, lease_due).await).await;
    let next_due = async |tx: &mut Tx| outbox::delivery::next_due(tx).await;
    assert_walks(&db, &["outbox_deliver_idx"], most, async |store| rolled_back(store, next_due).await).await;

    let list = async |store: &Store, kind: Option<&str>| {
        let filter = TaskFilter { kind: kind.map(str::to_owned), ..TaskFilter::default() };
        list::tasks(store, &filter, Page::Offset(0), 50).await.unwrap()
    };
    let of_kind = async |store: &Store| assert_eq!(list(store, Some("x")).await.len(), 0);
    assert_walks(&db, &["task_spec_kind_idx"], most, of_kind).await;
    let newest = async |store: &Store| assert_eq!(list(store, None).await.len(), 50);
    assert_walks(&db, &["task_spec_pkey"], most, newest).await;
}

#[tokio::test]
async fn a_recheck_of_a_blocked_group_walks_its_own_index() {
    let db = Database::new().await;
    let rule = json!([{"type": "Concurrency", "max_concurrency": 1, "matcher": {"kind": "k"}}]);
    let task = json!({"name": "n", "kind": "k", "timeout": 86_400, "rules": rule});
    let f = Fixture::on(db.clone(), &[]).await;
    f.api.create(&json!(vec![task; 3000])).await;
    let unblocked = "select count(*) from task where status = 'pending' and parked_on is null";
    while db.number(unblocked).await > 0 {
        f.claim().await;
    }
    db.execute("analyze").await;
    db.close(&f.store).await;
    let before = index_reads(&db, "task_parked_idx").await;
    let f = Fixture::on(db.clone(), &[]).await;
    for _ in 0..10 {
        let running = f.api.get("/task?status=Running").await.body;
        assert_eq!(f.api.succeed(running[0]["id"].as_str().unwrap()).await.status, 200);
        assert_eq!(f.claim().await, 1);
    }
    db.close(&f.store).await;
    let after = index_reads(&db, "task_parked_idx").await;
    let entries = after.1 - before.1;
    assert!(after.0 > before.0 && entries < 10_000, "{entries} entries were read, of 3,000 blocked tasks, ten times");
}

#[tokio::test]
async fn loop_statements_read_no_table_whole() {
    let db = large().await;
    let store = db.store(Clock::Database);
    let tables = "task outbox task_spec";
    let before = read_without_index(&db, tables).await;
    let statements = store.retrying(Patience::Brief, |session| async move {
        let mut tx = session.begin(Actor::Api).await?;
        let half_a_minute = Duration::from_secs(30);
        let claims = transitions::claim(&mut tx, 50, 50, half_a_minute).await?;
        assert_eq!(claims.tasks.len(), 50);
        transitions::release_due(&mut tx, 1000).await?;
        lock::timed_out(&mut tx, 500, &[]).await?;
        lock::overdue(&mut tx, 500, &[]).await?;
        outbox::delivery::lease(&mut tx, 100, half_a_minute).await?;
        outbox::delivery::next_due(&mut tx).await?;
        lock::next_timeout(&mut tx).await?;
        transitions::next_release(&mut tx).await?;
        tx.rollback().await
    });
    statements.await.unwrap();
    status_counts::by_status(&store).await.unwrap();
    db.close(&store).await;
    assert_eq!(read_without_index(&db, tables).await, before, "a table was read whole");
}

/// A service that starts on an empty database makes its plans when reading a table whole is the quickest way, and keeps
/// them for as long as nothing is analyzed, which may be a minute after the first million tasks.
#[tokio::test]
async fn plans_made_on_empty_tables_stay_good_as_the_tables_grow() {
    let db = Database::new().await;
    // One connection, so that all statements have been prepared on it.
    let limits = reprise::domain::retry::RetryLimits::default();
    let store = Store::new(&db.url, 1, Clock::Database, limits).unwrap();
    let mut connection = PgConnection::connect(&db.url).await.unwrap();
    let off = "alter table task set (autovacuum_enabled = off); alter table task_spec set (autovacuum_enabled = off);
               alter table outbox set (autovacuum_enabled = off)";
    sqlx::raw_sql(off).execute(&mut connection).await.unwrap();
    let id = Uuid::now_v7();
    let one = format!(
        "insert into batch (id, kinds, total, created_at) values ('{id}', '{{k}}', 1, now());
         insert into batch_count (batch_id, pending, updated_at) values ('{id}', 1, now());
         insert into task (id, batch_id, status, priority, flags, timeout_secs, created_at, last_updated, not_before)
         values ('{id}', '{id}', 'pending', 0, 0, 60, now(), now(), now() + '7 days');
         insert into task_spec (id, batch_id, name, kind, created_at) values ('{id}', '{id}', 'n', 'k', now())"
    );
    sqlx::raw_sql(AssertSqlSafe(one)).execute(&mut connection).await.unwrap();
    for _ in 0..10 {
        every_tick(&store, id).await;
    }
    let load = sqlx::raw_sql(
        "insert into task (id, batch_id, status, priority, flags, timeout_secs, created_at, last_updated, not_before)
         select gen_random_uuid(), gen_random_uuid(), 'pending', 0, 0, 60, now(), now(), now() + '7 days'
         from generate_series(1, 20000);
         insert into task_spec (id, batch_id, name, kind, created_at) select id, batch_id, 'n', 'k', now() from task
         on conflict do nothing",
    );
    load.execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    let rows = "select sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint from pg_stat_user_tables
                where relname in ('task', 'task_spec')";
    let entries = "select sum(idx_tup_read)::bigint from pg_stat_user_indexes where relname in ('task', 'task_spec')";
    let before = (db.number(rows).await, db.number(entries).await);
    every_tick(&store, id).await;
    db.close(&store).await;
    let read = (db.number(rows).await - before.0, db.number(entries).await - before.1);
    assert!(read.0 < 1000 && read.1 < 1000, "read {read:?} rows and entries of indexes");
}

/// The statements of the loops and of reports.
async fn every_tick(store: &Store, id: Uuid) {
    use reprise::domain::task::lifecycle::{Event, decide};
    use reprise::store::tasks::{details, heartbeat};
    let second = Duration::from_secs(1);
    let statements = store.retrying(Patience::Brief, |session| async move {
        let mut tx = session.begin(Actor::Api).await.unwrap();
        transitions::claim(&mut tx, 50, 50, second).await.unwrap();
        let start = transitions::StartedClaim { claim: (id, 7), ignored: None };
        transitions::started(&mut tx, &[start]).await.unwrap();
        transitions::release_due(&mut tx, 1000).await.unwrap();
        lock::timed_out(&mut tx, 500, &[]).await.unwrap();
        lock::unlocked_tasks(&mut tx, &[id]).await.unwrap();
        lock::by_ids(&mut tx, &[id]).await.unwrap();
        details::lock_unlocked(&mut tx, &[id]).await.unwrap();
        details::small_tasks_in(&mut tx, &[id]).await.unwrap();
        let beat =
            heartbeat::Heartbeat { id, run: None, success: 1, failures: 0, expected_count: None, priority: None };
        heartbeat::add_without_slots(&mut tx, std::slice::from_ref(&beat)).await.unwrap();
        heartbeat::record(&mut tx, &[beat]).await.unwrap();
        let locked = lock::by_ids(&mut tx, &[id]).await.unwrap();
        let cancel = Event::Canceled { reason: "canceled by ada".into() };
        let canceled = decide(&locked.tasks[0], &cancel, locked.moment).unwrap().unwrap();
        transitions::apply(&mut tx, &[canceled], locked.moment).await.unwrap();
        outbox::delivery::lease(&mut tx, 100, second).await.unwrap();
        outbox::delivery::next_due(&mut tx).await.unwrap();
        lock::next_timeout(&mut tx).await.unwrap();
        transitions::next_release(&mut tx).await.unwrap();
        tx.rollback().await.unwrap();
        reprise::store::tasks::lease::confirm(&session, &[(id, 7)], second).await.unwrap();
        reprise::store::tasks::lease::renew(&session, &[(id, 7)], second).await
    });
    statements.await.unwrap();
}

/// A page of a list costs as much as its rows, however deep the page and however rare the rows. Each list is read more
/// often than the server plans for single values.
#[tokio::test]
async fn a_list_page_reads_little_more_than_its_rows() {
    let db = Database::new().await;
    let mut connection = PgConnection::connect(&db.url).await.unwrap();
    let load = sqlx::raw_sql(
        "alter table task set (autovacuum_enabled = off);
         alter table task_spec set (autovacuum_enabled = off);
         alter table batch set (autovacuum_enabled = off);
         alter table batch_count set (autovacuum_enabled = off);
         create temp table made as
         select n, to_timestamp(1767225600 + n) as at,
                (lpad(to_hex((1767225600 + n) * 1000), 12, '0') || '70008000000000000000')::uuid as id
         from generate_series(1::bigint, 20000) n;
         insert into batch (id, metadata, kinds, total, created_at)
         select id, jsonb_build_object('n', n), '{k}', 1, now() from made;
         insert into batch_count (batch_id, success, updated_at) select id, 1, now() from made;
         insert into task (id, batch_id, status, priority, flags, timeout_secs, created_at, last_updated, ended_at)
         select id, id, 'success', 0, 0, 60, at, at, at from made;
         insert into task_spec (id, batch_id, name, kind, metadata, created_at)
         select id, id, 'n', 'k', jsonb_build_object('n', n), at from made;
         analyze;",
    );
    load.execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    let read = "select coalesce(sum(seq_tup_read + idx_tup_fetch), 0)::bigint from pg_stat_user_tables \
                where relname in ('task', 'task_spec', 'batch', 'batch_count')";
    // A connection publishes its statistics when its process has ended.
    let told = "select sum(n_tup_ins)::bigint from pg_stat_user_tables \
                where relname in ('task', 'task_spec', 'batch', 'batch_count')";
    eventually("the statistics to be told", async || (db.number(told).await >= 80_000).then_some(())).await;
    let before = db.number(read).await;
    let at = |secs| chrono::DateTime::from_timestamp(secs, 0);
    let any = TaskFilter::default;
    let mut filters = vec![
        TaskFilter { metadata: Some(json!({"n": "not a number"})), ..any() },
        TaskFilter { timeout: Some(61), ..any() },
        TaskFilter { created_after: at(1_767_300_000), ..any() },
        TaskFilter { created_before: at(1_767_225_600), ..any() },
    ];
    for status in Status::ALL.into_iter().filter(|status| *status != Status::Success) {
        let statuses = vec![status, Status::Failure];
        filters.push(TaskFilter { statuses: statuses.clone(), ..any() });
        filters.push(TaskFilter { statuses, kind: Some("none".into()), ..any() });
    }
    for filter in &filters {
        let store = db.store(Clock::Database);
        for _ in 0..10 {
            assert_eq!(list::tasks(&store, filter, Page::Offset(0), 50).await.unwrap().len(), 0, "{filter:?}");
        }
        db.close(&store).await;
    }
    let store = db.store(Clock::Database);
    for n in 0..10u128 {
        let deep = || Page::After(Uuid::from_u128((1_767_226_600_000 + n) << 80 | 0x7000_8000 << 48));
        assert_eq!(batches::list::batches(&store, &BatchFilter::default(), deep(), 50).await.unwrap().0.len(), 50);
        let of = BatchFilter { metadata: Some(json!({"n": "not a number"})), ..BatchFilter::default() };
        assert_eq!(batches::list::batches(&store, &of, Page::Offset(0), 50).await.unwrap().0.len(), 0);
        assert_eq!(list::tasks(&store, &any(), deep(), 50).await.unwrap().len(), 50);
        let of = TaskFilter { created_before: at(1_767_235_601), ..any() };
        let found = list::tasks(&store, &of, Page::Offset(0), 50).await.unwrap();
        assert_eq!((found.len(), Some(found[0].created_at.0)), (50, at(1_767_235_600)));
    }
    db.close(&store).await;
    let read = db.number(read).await - before;
    assert!(read < 10_000, "{read} rows were read");
}

#[tokio::test]
async fn the_search_for_existing_tasks_uses_indexes() {
    let db = large().await;
    let fill = "update task_spec s set metadata = jsonb_build_object('order', n, 'tenant', n % 10)
                from (select id, row_number() over () as n from task_spec) x where x.id = s.id";
    // A closed connection publishes what it has read some time later, together with what it has written.
    let written = async |column: &str, count: i64| {
        let told = format!("select {column} from pg_stat_user_tables where relname = 'task_spec'");
        eventually("the statistics to be told", async || (db.number(&told).await >= count).then_some(())).await;
    };
    // First with statistics from before there was any metadata.
    for (round, prepare) in [(1, fill), (2, "analyze task_spec")] {
        let mut connection = PgConnection::connect(&db.url).await.unwrap();
        sqlx::raw_sql(prepare).execute(&mut connection).await.unwrap();
        connection.close().await.unwrap();
        written("n_tup_upd", 200_000).await;
        let before = read_without_index(&db, "task task_spec").await;
        let f = Fixture::on(Database { url: db.url.clone(), pool: db.pool.clone() }, &[]).await;
        let task = |n: i64, strategy: &Value| json!({"name": "n", "kind": "k", "metadata": {"order": n, "tenant": n.abs() % 10}, "dedupe_strategy": strategy});
        let by_kind = task(0, &json!([{"kind": "other"}, {"status": "Success"}]));
        assert_eq!(f.api.post("/task", &json!([by_kind])).await.status, 204);
        // Nothing of it is there, so nothing is found by going through everything and stopping soon.
        let strategy = json!([{"fields": ["order"], "status": "Canceled"}, {"fields": ["tenant", "order"]}]);
        let new: Vec<Value> = (0..100).map(|n| task(n - round * 1000, &strategy)).collect();
        assert_eq!(f.api.create(&json!([new[0]])).await.len(), 1);
        assert_eq!(f.api.create(&json!(new)).await.len(), 99);
        db.close(&f.store).await;
        written("n_tup_ins", 200_000 + round * 100).await;
        let after = read_without_index(&db, "task task_spec").await;
        assert_eq!(after, before, "a table was read whole after: {prepare}");
    }
}

#[tokio::test]
async fn cascades_look_up_links_by_index_even_without_statistics() {
    let db = Database::new().await;
    db.execute(
        "alter table link set (autovacuum_enabled = off);
         insert into link select gen_random_uuid(), gen_random_uuid(), true from generate_series(1, 20000)",
    )
    .await;
    let args = ["--dead-end-cancel", "1", "--webhook-concurrency", "1000"];
    let family = json!([
        {"id": "top", "name": "n", "kind": "k"},
        {"id": "child", "name": "n", "kind": "k", "dependencies": [{"id": "top"}]},
        {"id": "last", "name": "n", "kind": "k", "dependencies": [{"id": "child"}]},
    ]);
    for analyzed in [false, true] {
        let f = Fixture::on(db.clone(), &args).await;
        let mut families = Vec::new();
        for _ in 0..20 {
            families.push(f.api.create(&family).await);
        }
        while f.claim().await > 0 {}
        if analyzed {
            db.execute("analyze link").await;
        }
        db.close(&f.store).await;
        let whole = read_without_index(&db, "link").await;
        let before = [index_reads(&db, "link_pkey").await, index_reads(&db, "link_child_idx").await];
        let f = Fixture::on(db.clone(), &args).await;
        for (n, ids) in families.iter().enumerate() {
            // Down from a failed parent, or up from a canceled child: to the end of the family either way.
            let (status, answer) = if n % 2 == 0 {
                ("Failure", f.api.fail(&ids[0]).await)
            } else {
                ("Canceled", f.api.delete(&format!("/task/{}", ids[2])).await)
            };
            assert_eq!(answer.status, 200, "{}", answer.body);
            for id in ids {
                assert_eq!(f.api.status(id).await, status);
            }
        }
        db.close(&f.store).await;
        let after = [index_reads(&db, "link_pkey").await, index_reads(&db, "link_child_idx").await];
        for (after, before) in after.iter().zip(before) {
            let entries = after.1 - before.1;
            assert!(after.0 > before.0, "the index was not used (analyzed: {analyzed})");
            assert!(entries < 2000, "{entries} of 20,000 entries were read (analyzed: {analyzed})");
        }
        assert_eq!(read_without_index(&db, "link").await, whole, "all links were read (analyzed: {analyzed})");
    }
}

/// A plan that counts on many rows is compiled first, for longer than it then takes.
#[tokio::test]
async fn list_queries_run_without_jit() {
    let db = Database::new().await;
    db.execute(
        "create function not_compiled() returns boolean language plpgsql as $$
         begin
             if current_setting('jit')::boolean then raise 'it may be compiled'; end if;
             return true;
         end $$;
         alter table task_spec rename to task_spec_rows;
         create view task_spec as select * from task_spec_rows where (select not_compiled());
         alter table batch rename to batch_rows;
         create view batch as select * from batch_rows where (select not_compiled())",
    )
    .await;
    let store = db.store(Clock::Database);
    list::tasks(&store, &TaskFilter::default(), Page::Offset(0), 10).await.unwrap();
    batches::list::batches(&store, &BatchFilter::default(), Page::Offset(0), 10).await.unwrap();
}
