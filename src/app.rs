//! Starts the service and shuts it down in order: stop claiming, let calls in flight end, record their results, answer
//! the last requests, close the pools, and only then stop a private PostgreSQL.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use private_postgres::{PrivatePostgres, Settings};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::clock::Clock;
use crate::config::{Command, Config};
use crate::handle::Handles;
use crate::http::{self, Api, Authenticator, Bodies};
use crate::loops::audit::Audit;
use crate::loops::deferred_counters::Counters;
use crate::loops::deliver::{self, Deliver};
use crate::loops::liveness::Liveness;
use crate::loops::retention::Retention;
use crate::loops::retry::Retry;
use crate::loops::start::lease_keeper::LeaseKeeper;
use crate::loops::start::{self, Start};
use crate::loops::supervisor::Supervisor;
use crate::loops::timeout::Timeout;
use crate::loops::waiters::CheckWaiters;
use crate::loops::{runner, wakeup};
use crate::output::print;
use crate::service::Service;
use crate::store::Store;
use crate::webhook::{self, Client};
use crate::{bench, doctor, postgres_errors, telemetry};

/// Time limit of each last step of the shutdown: open connections, requests in progress, background work.
const LAST_STEPS: Duration = Duration::from_secs(2);

/// Runs a command. An error is the one line to print; `shutdown` ends the service.
pub async fn run(command: Command, config: Config, shutdown: CancellationToken) -> Result<(), String> {
    if command == Command::Openapi {
        return print(&http::document_text(&config.limits()));
    }
    if let Command::Bench(args) = &command {
        return Box::pin(bench::run(args, &config, shutdown)).await;
    }
    for warning in config.warnings() {
        tracing::warn!("{warning}");
    }
    // Bind the port first: it fails faster than the start of a database.
    let listener = match command {
        Command::Serve => Some(bind(&config).await?),
        Command::Migrate | Command::Doctor { .. } | Command::Openapi | Command::Bench(_) => None,
    };
    let private = match config.database_url() {
        Some(_) => None,
        None => Some(start_postgres(&config).await?),
    };
    let url = config.database_url().or(private.as_ref().map(PrivatePostgres::url)).unwrap_or_default();
    let for_requests = config.database.pool_max_size - connections_for_loops(&config);
    let store = Store::new(url, for_requests, Clock::Database, config.limits().retry)?
        .with_limit(Duration::from_secs(config.database.database_timeout_secs));
    let work = async {
        store.check_server().await?;
        match (listener, command) {
            (Some(listener), _) => serve(&config, &store, listener, private.as_ref(), shutdown).await,
            (None, Command::Doctor { fix }) => doctor::run(&store, fix).await,
            (None, _) => store.migrate().await,
        }
    };
    let result = tokio::select! {
        result = work => result,
        error = failed(private.as_ref()) => Err(error),
    };
    // Work that still uses a connection loses it, and the server rolls back its transaction.
    store.close();
    if let Some(private) = private
        && let Err(error) = private.stop().await
    {
        tracing::warn!(%error, "private PostgreSQL did not stop cleanly");
    }
    result
}

/// Starts a private PostgreSQL, or joins the one that runs in the data directory.
async fn start_postgres(config: &Config) -> Result<PrivatePostgres, String> {
    let settings = &config.database;
    let connections = (settings.pool_max_size + 20).max(100).to_string();
    let settings = Settings {
        bin_dir: settings.postgres_bin_dir.clone(),
        extra: vec![("max_connections".into(), connections)],
        ..Settings::new("reprise", &settings.reprise_data_dir)
    };
    PrivatePostgres::open(settings).await.map_err(|error| postgres_errors::explain(&error))
}

/// Waits until the private PostgreSQL fails, and returns why.
async fn failed(private: Option<&PrivatePostgres>) -> String {
    match private {
        Some(private) => postgres_errors::explain(&private.failed().await),
        None => std::future::pending().await,
    }
}

async fn bind(config: &Config) -> Result<TcpListener, String> {
    config.keys()?;
    let address = SocketAddr::new(config.http.bind_addr, config.http.port);
    let cannot = |error| format!("PORT={}: cannot listen on {address}: {error}", config.http.port);
    TcpListener::bind(address).await.map_err(cannot)
}

async fn serve(
    config: &Config,
    store: &Store,
    listener: TcpListener,
    private: Option<&PrivatePostgres>,
    shutdown: CancellationToken,
) -> Result<(), String> {
    prepare(config, store).await?;
    let address = listener.local_addr().map_err(|error| format!("BIND_ADDR={}: {error}", config.http.bind_addr))?;
    let local = reachable(address);
    let host_url = config.http.host_url.clone().unwrap_or_else(|| format!("http://{local}"));
    let secret = store.secret().await.map_err(|error| error.to_string())?;
    let client = Client::new(webhook::ClientSettings {
        handles: Handles::new(host_url, secret.clone()),
        timeout: Duration::from_millis(config.webhook.webhook_timeout_ms),
        per_host: config.webhook.webhook_concurrency_per_host,
        guard: config.guard(),
        signer: config.signer()?,
    })?;

    let mut supervisor = Supervisor::default();
    // One of the connections is for LISTEN, which needs no pool.
    let for_loops = store.with_own_pool(connections_for_loops(config) - 1);
    let running = start_loops(config, &for_loops, &client, &mut supervisor);
    let (requests, ending) = (TaskTracker::new(), CancellationToken::new());
    let keys = config.keys()?;
    let needs_key = !keys.is_empty();
    let api = Api {
        loops: for_loops.clone(),
        service: Service::new(store.clone(), config.limits().metadata_bytes, config.retry.stuck_after_secs),
        limits: config.limits(),
        bodies: Bodies::new(config.request.max_body_bytes),
        idempotency_ttl: Duration::from_secs(config.request.idempotency_ttl_secs),
        request_time: config.request_time(),
        authenticator: Arc::new(Authenticator {
            keys,
            public: config.access.public_paths.clone(),
            secret,
            hosts: config.hosts(),
        }),
        metrics: telemetry::metrics(),
        graphs: tokio::sync::Semaphore::new(1),
        requests: requests.clone(),
        ending: ending.clone(),
    };
    let stop_http = CancellationToken::new();
    let mut server = tokio::spawn(http::serve(listener, api, stop_http.clone()));
    tracing::info!(%address, instance = %store.instance(), "ready");
    if let Err(error) = print(&greeting(local, private, needs_key)) {
        tracing::warn!("{error}");
    }

    let result = tokio::select! {
        () = shutdown.cancelled() => Ok(()),
        died = supervisor.died() => Err(died),
        _ = &mut server => Err("the HTTP server ended unexpectedly".to_owned()),
    };
    tracing::info!("shutting down");
    ending.cancel();
    let grace = Duration::from_secs(config.http.shutdown_grace_secs);
    supervisor.shutdown().cancel();
    running.end(grace).await;
    stop_http.cancel();
    if result.is_ok() && tokio::time::timeout(LAST_STEPS, &mut server).await.is_err() {
        tracing::warn!("connections still open at shutdown");
    }
    requests.close();
    let _ = tokio::time::timeout(LAST_STEPS, requests.wait()).await;
    if tokio::time::timeout(LAST_STEPS, supervisor.stop()).await.is_err() {
        tracing::warn!("background work aborted at shutdown");
    }
    for_loops.close();
    result
}

/// The part of the connections that is reserved for the loops.
fn connections_for_loops(config: &Config) -> u32 {
    (config.database.pool_max_size / 3).clamp(3, 8)
}

/// Migrates the tables, or checks that they are up to date.
async fn prepare(config: &Config, store: &Store) -> Result<(), String> {
    if config.database.auto_migrate {
        return store.migrate().await;
    }
    match store.is_migrated().await {
        Ok(true) => Ok(()),
        Ok(false) => Err("AUTO_MIGRATE=0: the tables are out of date; run `reprise migrate` first".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// Work that has to end in order at shutdown.
struct RunningService {
    /// Canceled once the start loop claims and calls nothing more.
    start_ended: CancellationToken,
    keeper: LeaseKeeper,
    deliveries: TaskTracker,
}

impl RunningService {
    async fn end(self, grace: Duration) {
        let tasks = async {
            self.start_ended.cancelled().await;
            self.keeper.drain(grace).await;
        };
        let notifications = async {
            self.deliveries.close();
            self.deliveries.wait().await;
        };
        let both = async { tokio::join!(tasks, notifications) };
        if tokio::time::timeout(grace, both).await.is_err() {
            tracing::warn!("calls still in flight after SHUTDOWN_GRACE_SECS");
        }
    }
}

fn start_loops(config: &Config, store: &Store, client: &Client, supervisor: &mut Supervisor) -> RunningService {
    let shutdown = supervisor.shutdown();
    let worker = Duration::from_millis(config.loops.worker_loop_interval_ms);
    let webhook = &config.webhook;

    let settings =
        start::StartSettings { interval: worker, lease: config.lease(), concurrency: webhook.webhook_concurrency };
    let (start, caller, answers) = Start::new(store.clone(), client.clone(), settings);
    let (keeper, last_keeper) = (caller.lease_keeper(), caller.lease_keeper());
    let token = shutdown.clone();
    supervisor.spawn("lease", async move { keeper.run(token).await });
    let start_ended = CancellationToken::new();
    let (ended, token, loops_store) = (start_ended.clone(), shutdown.clone(), store.clone());
    supervisor.spawn("start", async move {
        tokio::join!(runner::run(start, loops_store, token.clone()), caller.run(token));
        ended.cancel();
    });
    supervisor.spawn("start result", answers.run());

    let settings = deliver::DeliverySettings {
        interval: Duration::from_millis(config.loops.webhook_delivery_interval_ms),
        concurrency: webhook.webhook_concurrency,
        lease: Duration::from_millis(webhook.webhook_timeout_ms) + Duration::from_secs(30),
        patience: Duration::from_secs(5),
        max_attempts: webhook.webhook_max_attempts,
        retry_base: Duration::from_millis(webhook.webhook_retry_base_ms),
        retry_max: Duration::from_millis(webhook.webhook_retry_max_ms),
    };
    let (deliver, results) = Deliver::new(store.clone(), client.clone(), settings);
    let deliveries = deliver.tracker();
    supervisor.spawn("delivery", runner::run(deliver, store.clone(), shutdown.clone()));
    supervisor.spawn("delivery result", results.run());

    let timeout = Timeout::new(store.clone(), worker);
    supervisor.spawn("timeout", runner::run(timeout, store.clone(), shutdown.clone()));
    let interval = Duration::from_millis(config.loops.retry_loop_interval_ms);
    let retry = Retry { store: store.clone(), interval };
    supervisor.spawn("retry", runner::run(retry, store.clone(), shutdown.clone()));
    let idempotency_ttl = Duration::from_secs(config.request.idempotency_ttl_secs);
    let retention = Retention::new(store.clone(), config.loops.retention_days, idempotency_ttl);
    supervisor.spawn("liveness", runner::run(Liveness { store: store.clone() }, store.clone(), shutdown.clone()));
    supervisor.spawn("counters", runner::run(Counters { store: store.clone() }, store.clone(), shutdown.clone()));
    supervisor.spawn("audit", runner::run(Audit::new(store.clone()), store.clone(), shutdown.clone()));
    supervisor.spawn("retention", runner::run(retention, store.clone(), shutdown.clone()));
    let waiters = CheckWaiters { store: store.clone() };
    supervisor.spawn("waiters", runner::run(waiters, store.clone(), shutdown.clone()));
    supervisor.spawn("metrics", telemetry::upkeep(shutdown.clone()));
    supervisor.spawn("wake-up", wakeup::tell(store.clone(), shutdown.clone()));
    supervisor.spawn("listener", wakeup::listen(store.clone(), shutdown));
    RunningService { start_ended, keeper: last_keeper, deliveries }
}

/// Replaces an unspecified address, which clients cannot call, by the loopback address.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

fn greeting(address: SocketAddr, private: Option<&PrivatePostgres>, needs_key: bool) -> String {
    let url = format!("http://{address}");
    let data = private.map_or_else(String::new, |private| {
        let whose = if private.is_own() { "of its own" } else { "of another instance, which stops it when it ends" };
        format!("  Data  {} (PostgreSQL {} {whose})\n", private.data_dir().display(), private.version())
    });
    let key = if needs_key { "-H \"Authorization: Bearer $KEY\" " } else { "" };
    format!(
        "Reprise is ready.\n  API   {url}\n  Docs  {url}/docs\n{data}Try:\n  curl -s {url}/task {key}-d \
         '[{{\"name\": \"hello\", \"kind\": \"demo\"}}]'\n"
    )
}
