//! The service behind PgBouncer in transaction mode, where each transaction may use another connection of the server.
//! Needs a PgBouncer: `PGBOUNCER=/usr/sbin/pgbouncer cargo test --test it -- --ignored pooler`.

use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use futures_util::future::join_all;
use url::Url;

use crate::support::instance::command;
use crate::support::{Database, Instance, Load, Server, eventually};

const SOCKET: &str = ".s.PGSQL.6432";

struct Pooler {
    dir: PathBuf,
    child: Child,
    url: String,
}

impl Pooler {
    /// In front of the server of this URL, with the user of that server: it may not be root, and has to reach the socket.
    async fn start(url: &str, prepared_statements: u32) -> Pooler {
        let mut url = Url::parse(url).unwrap();
        let database = url.path().trim_start_matches('/').to_owned();
        let socket = url.query_pairs().find(|(name, _)| name == "host").expect("a socket").1.into_owned();
        let owner = std::fs::metadata(&socket).unwrap();
        let dir = std::env::temp_dir().join(format!("pooler-{}-{prepared_statements}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        chown(&dir, Some(owner.uid()), Some(owner.gid())).unwrap();
        let at = dir.display();
        let settings = format!(
            "[databases]\n{database} = host={socket} port=5432 user=postgres\n\
             [pgbouncer]\nlisten_addr =\nunix_socket_dir = {at}\nlisten_port = 6432\nauth_type = any\n\
             pool_mode = transaction\nmax_prepared_statements = {prepared_statements}\ndefault_pool_size = 2\nserver_round_robin = 1\n\
             server_login_retry = 1\nquery_wait_timeout = 10\nlogfile = {at}/log\n"
        );
        std::fs::write(dir.join("pgbouncer.ini"), settings).unwrap();
        url.set_port(Some(6432)).unwrap();
        url.query_pairs_mut().clear().append_pair("host", dir.to_str().unwrap()).append_pair("sslmode", "disable");
        let child = Pooler::run(&dir).await;
        Pooler { dir, child, url: url.into() }
    }

    async fn run(dir: &Path) -> Child {
        let program = std::env::var("PGBOUNCER").expect("PGBOUNCER is the path of PgBouncer");
        let owner = std::fs::metadata(dir).unwrap();
        let mut command = Command::new(program);
        command.arg(dir.join("pgbouncer.ini")).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.uid(owner.uid()).gid(owner.gid()).spawn().unwrap();
        eventually("PgBouncer to listen", async || dir.join(SOCKET).exists().then_some(())).await;
        child
    }

    async fn restart(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        std::fs::remove_file(self.dir.join(SOCKET)).unwrap();
        self.child = Pooler::run(&self.dir).await;
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "needs PGBOUNCER"]
async fn the_service_works_behind_pgbouncer_in_transaction_mode() {
    let mut server = Server::new("pooled");
    let url = server.start().await;
    let db = Database::at(&url);
    let mut pooler = Pooler::start(&url, 200).await;
    // From an empty database, all at once.
    let starts = (0..3).map(|_| {
        let url = pooler.url.clone();
        let settings = [("WORKER_CLAIM_TIMEOUT_SECS", "3"), ("RUST_LOG", "error")];
        tokio::task::spawn_blocking(move || Instance::start(&url, &settings))
    });
    let mut instances: Vec<Instance> = join_all(starts).await.into_iter().map(Result::unwrap).collect();
    let load = Load::on(&instances).await;
    load.create(40).await;
    let clients = load.clients(6);
    let goes_on = async || {
        let before = load.ended();
        eventually("work to go on", async || (load.ended() > before + 60).then_some(())).await;
    };
    goes_on().await;
    pooler.restart().await;
    goes_on().await;
    server.stop_fast().await;
    let refused = load.refused();
    eventually("clients and workers to get a 503", async || (load.refused() > refused).then_some(())).await;
    server.start().await;
    goes_on().await;
    load.remove_instance(&instances[0]);
    assert!(instances.remove(0).terminate().success());
    goes_on().await;
    clients.stop().await;
    load.finish(&db).await;
    let log = pooler.log();
    assert!(!log.contains("not linked"), "no instance listens through the pooler: {log}");
    drop(instances);
    db.pool.close().await;
    server.stop_fast().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "needs PGBOUNCER"]
async fn a_pooler_that_mixes_up_prepared_statements_is_refused() {
    let db = Database::new().await;
    let pooler = Pooler::start(&db.url, 0).await;
    let settings = [("DATABASE_URL", pooler.url.as_str()), ("PORT", "0"), ("RUST_LOG", "warn")];
    let output = command(&settings).output().unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.starts_with("reprise: DATABASE_URL: a pooler mixes up the prepared statements"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}
