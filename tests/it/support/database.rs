//! One PostgreSQL for the whole test run, and for each test a database of its own, copied from a migrated template.
//! `TEST_DATABASE_URL` names another server to use.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use private_postgres::{Embedded, Settings};
use reprise::clock::Clock;
use reprise::domain::retry::RetryLimits;
use reprise::store::tx::deferred;
use reprise::store::{Patience, Session, Store, migrate};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};
use tokio::sync::OnceCell;

use super::eventually;

#[derive(Clone)]
pub struct Database {
    pub url: String,
    pub pool: PgPool,
}

impl Database {
    pub async fn new() -> Database {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let template = template().await;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("test_{}_{number}", std::process::id());
        admin(&format!("create database {name} template {template}")).await;
        Database::at(&named(&name))
    }

    /// An existing database.
    pub fn at(url: &str) -> Database {
        Database { pool: PgPool::connect_lazy(url).unwrap(), url: url.to_owned() }
    }

    pub fn store(&self, clock: Clock) -> Store {
        Store::new(&self.url, 16, clock, RetryLimits::default()).unwrap()
    }

    /// Closes the connections of a store and waits until its server processes have ended: they publish their statistics
    /// then.
    pub async fn close(&self, store: &Store) {
        store.close();
        let open =
            "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'reprise'";
        eventually("the connections to be closed", async || (self.number(open).await == 0).then_some(())).await;
    }

    pub async fn number(&self, query: &str) -> i64 {
        sqlx::query_scalar(AssertSqlSafe(query.to_owned())).fetch_one(&self.pool).await.unwrap()
    }

    /// The number of statements that wait for a lock.
    pub async fn waiting_for_locks(&self) -> i64 {
        let waiting =
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
        self.number(waiting).await
    }

    pub async fn execute(&self, statement: &str) {
        sqlx::raw_sql(AssertSqlSafe(statement.to_owned())).execute(&self.pool).await.unwrap();
    }

    /// Compares all counters, and the history, with the rows of the tasks.
    pub async fn assert_counters_match(&self) {
        self.settle_counters().await;
        for status in
            ["waiting", "pending", "claimed", "running", "retry_pending", "paused", "success", "failure", "canceled"]
        {
            let rows = self.number(&format!("select count(*) from task where status = '{status}'")).await;
            let batches = self.number(&format!("select coalesce(sum({status}), 0)::bigint from batch_count")).await;
            let total = self.number(&format!("select coalesce(sum({status}), 0)::bigint from status_count")).await;
            assert_eq!((rows, rows), (batches, total), "{status}: rows against batches and total");
        }
        let sums = "select count(*) from batch_count c where (c.total_success, c.total_failures, c.total_expected) is \
                    distinct from (select (coalesce(sum(success), 0)::bigint, coalesce(sum(failures), 0)::bigint, \
                    coalesce(sum(expected_count), 0)::bigint) from task t where t.batch_id = c.batch_id)";
        assert_eq!(self.number(sums).await, 0, "batches know the sums of their tasks' counters");
        let open = "select count(*) from batch b join batch_count c on c.batch_id = b.id where (b.completed_at is null) = \
                    (c.waiting + c.pending + c.claimed + c.running + c.retry_pending + c.paused = 0)";
        assert_eq!(self.number(open).await, 0, "batches are complete exactly when nothing in them is alive");
        // Tasks that have begun keep no count.
        let waiting = "select count(*) from task t where t.status in ('waiting', 'pending', 'paused') and \
                       coalesce(t.claimed_run < coalesce(t.manual_run, 0), true) and t.wait_count <> (select count(*) from \
                       link l join task p on p.id = l.parent_id where l.child_id = t.id and p.ended_at is null)";
        assert_eq!(self.number(waiting).await, 0, "alive tasks wait for exactly their open parents");
        self.assert_slots_match().await;
        let stuck = "select count(*) from task where status = 'waiting' and wait_count = 0";
        assert_eq!(self.number(stuck).await, 0, "a task waits for no parent");
        let lost = "select count(*) from task t join link l on l.child_id = t.id and l.requires_success \
                    join task p on p.id = l.parent_id where t.status = 'waiting' and p.status in ('failure', 'canceled')";
        assert_eq!(self.number(lost).await, 0, "a task waits although a required parent ended badly");
        // A parent without the flag would move no child when it ends.
        let unknown = "select count(*) from link l join task p on p.id = l.parent_id where p.flags & 16 = 0 or \
                       p.flags & 128 = 0 and p.batch_id <> (select batch_id from task c where c.id = l.child_id)";
        assert_eq!(self.number(unknown).await, 0, "parents know that they have children, and where");
        // Runs without an execution ended by the failure of a parent, or were canceled before they were claimed.
        let runs = "select count(*) from task t where exists (select from generate_series(0, t.run - 1) r where not exists \
                    (select from attempt a where a.task_id = t.id and a.run = r) and not exists (select from event e \
                    where e.batch_id = t.batch_id and t.id = any(e.task_ids) and e.run = r and \
                    (e.to_status = 'failure' and e.cause = 'dependency' or e.to_status = 'canceled')))";
        assert_eq!(self.number(runs).await, 0, "every run before the current one is recorded");
        // The events of every task are complete: the first is its creation, each starts in the status in which the
        // one before ended, and the last ends in the present status.
        let trail = "with e as (select u.id, e.seq, e.from_status, e.to_status, \
                     lag(e.to_status) over (partition by u.id order by e.seq) as before, \
                     lead(e.seq) over (partition by u.id order by e.seq) is null as last \
                     from event e cross join lateral unnest(e.task_ids) u(id)) \
                     select count(*) from e join task t on t.id = e.id where e.from_status is distinct from e.before \
                     or e.last and e.to_status <> t.status";
        assert_eq!(self.number(trail).await, 0, "the events of every task have no gap");
        assert_eq!(
            self.number(
                "select count(*) from task t where not exists (select from event e where t.id = any(e.task_ids))"
            )
            .await,
            0,
            "every task has events"
        );
        self.assert_dates_follow_each_other().await;
    }

    /// Nothing ends before it begins, and no event of a task is dated before the one it follows.
    async fn assert_dates_follow_each_other(&self) {
        let backward = "select count(*) from attempt where ended_at < started_at";
        assert_eq!(self.number(backward).await, 0, "attempts that ended before they began");
        let tasks = "select count(*) from task where started_at < created_at or ended_at < started_at or \
                     last_updated < created_at";
        assert_eq!(self.number(tasks).await, 0, "tasks whose dates are not in order");
        let events = "with e as (select e.at, lag(e.at) over (partition by u.id order by e.seq) as before \
                      from event e cross join lateral unnest(e.task_ids) u(id)) \
                      select count(*) from e where at < before";
        assert_eq!(self.number(events).await, 0, "events that are dated before the one they follow");
    }

    /// Ends the leases of all claims, or of those of one instance, as if their time was over.
    pub async fn end_leases(&self, of: Option<uuid::Uuid>) {
        let of = of.map_or_else(String::new, |instance| format!(" and claimed_by = '{instance}'"));
        let end = "update task set timeout_at = clock_timestamp() - interval '1 hour' where status = 'claimed'";
        self.execute(&format!("{end}{of}")).await;
    }

    /// From now on the database records each time that `last_updated` of a task goes back.
    pub async fn watch_last_updated(&self) {
        self.execute(
            "create table went_back (id uuid, was timestamptz, is_now timestamptz);
             create function note_went_back() returns trigger language plpgsql as $$ begin
                 insert into went_back values (new.id, old.last_updated, new.last_updated);
                 return null;
             end $$;
             create trigger went_back after update on task for each row when (new.last_updated < old.last_updated)
                 execute function note_went_back()",
        )
        .await;
    }

    pub async fn assert_last_updated_rose(&self) {
        assert_eq!(self.number("select count(*) from went_back").await, 0, "last_updated went back");
    }

    /// Adds up deferred counters, as a loop of the service does.
    async fn settle_counters(&self) {
        let store = self.store(Clock::Database);
        eventually("the counters to be settled", async || {
            let merge = |session: Session| async move { deferred::merge(&session, uuid::Uuid::nil()).await };
            let done = store.retrying(Patience::Long, merge).await.unwrap();
            (!done.left && done.last.is_none()).then_some(())
        })
        .await;
        store.close();
    }

    /// Compares slots with executing tasks, and blocked groups (table `parking`) with their slot limits (table `gate`).
    pub async fn assert_slots_match(&self) {
        let slots = "with held as (select u.slot, count(*) used, sum(greatest(0, coalesce(expected_count - success - failures, 0))) \
                     load from task t cross join lateral unnest(t.slots) u(slot) group by 1) select count(*) from slot s \
                     full join held h on h.slot = s.id where (coalesce(s.used, 0), coalesce(s.load, 0)) is distinct from \
                     (coalesce(h.used, 0), coalesce(h.load, 0))";
        assert_eq!(self.number(slots).await, 0, "slots hold exactly what executes");
        let counted = "select count(*) from task t join task_spec s on s.id = t.id where t.status in ('claimed', 'running') and \
                       exists (select from matcher m where m.kind = s.kind and m.retired_at is null and \
                       coalesce(s.metadata, '{}') ?& m.fields and not exists (select from slot where matcher_id = m.id and \
                       id = any(t.slots)))";
        assert_eq!(self.number(counted).await, 0, "whatever executes is counted for every matcher of its kind");
        let forgotten = "select count(*) from task t left join parking p on p.id = t.parked_on where t.parked_on is not null \
                         and coalesce(p.state, 0) = 0";
        assert_eq!(self.number(forgotten).await, 0, "a blocked task belongs to a blocked group that is rechecked");
        let stranded = "select count(*) from parking p where p.state = 1 and exists (select from task t where t.parked_on = p.id) \
                        and not exists (select from gate g join slot s on s.id = g.slot_id where g.parking_id = p.id and \
                        (s.used >= g.max_tasks or s.load >= g.max_load))";
        assert_eq!(self.number(stranded).await, 0, "a blocked group has a full slot");
    }
}

async fn template() -> &'static str {
    static TEMPLATE: OnceCell<String> = OnceCell::const_new();
    TEMPLATE
        .get_or_init(|| async {
            let name = format!("template_{}_{}", migrate::fingerprint(), std::process::id());
            admin(&format!("create database {name}")).await;
            let store = Store::new(&named(&name), 2, Clock::Database, RetryLimits::default()).unwrap();
            store.migrate().await.unwrap();
            store.close();
            name
        })
        .await
}

pub async fn admin(statement: &str) {
    let options: PgConnectOptions = server().parse().unwrap();
    let mut connection = PgConnection::connect_with(&options).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(statement.to_owned())).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}

/// The server's URL with another database in it.
fn named(database: &str) -> String {
    let mut url = url::Url::parse(server()).unwrap();
    url.set_path(&format!("/{database}"));
    url.into()
}

fn server() -> &'static str {
    static URL: OnceLock<String> = OnceLock::new();
    URL.get_or_init(|| std::env::var("TEST_DATABASE_URL").unwrap_or_else(|_| start_server()))
}

/// Starts a server on its own thread. It stops when the test process ends.
fn start_server() -> String {
    let base = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    remove_left_over(&base);
    let dir = base.join(format!("postgres-{}", std::process::id()));
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(async {
            let settings = Settings {
                durable: false,
                extra: vec![("max_connections".into(), "500".into()), ("shared_buffers".into(), "256MB".into())],
                ..Settings::new("reprise", dir)
            };
            let server = Embedded::start(settings).await.unwrap();
            tell.send(server.url().to_owned()).unwrap();
            panic!("the test server is gone: {}", server.failed().await);
        });
    });
    told.recv().expect("the test server starts")
}

/// Removes the data of test runs whose process has ended.
fn remove_left_over(base: &Path) {
    for entry in std::fs::read_dir(base).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Some(pid) = name.strip_prefix("postgres-").and_then(|pid| pid.parse::<u32>().ok())
            && !Path::new(&format!("/proc/{pid}")).exists()
        {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}
