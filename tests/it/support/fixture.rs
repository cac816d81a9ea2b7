//! The service inside the test process: its API on a real port, with loops and a clock that the test drives.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use clap::Parser;
use reprise::clock::Clock;
use reprise::config::{Cli, Config};
use reprise::handle::Handles;
use reprise::http::{Api, Authenticator, Bodies, serve};
use reprise::loops::deliver::{self, Deliver, ResultWriter};
use reprise::loops::retention::Retention;
use reprise::loops::retry::Retry;
use reprise::loops::runner::Loop;
use reprise::loops::start::answers::AnswerWriter;
use reprise::loops::start::lease_keeper::LeaseKeeper;
use reprise::loops::start::{self, Start};
use reprise::loops::timeout::Timeout;
use reprise::service::Service;
use reprise::store::Store;
use reprise::{telemetry, webhook};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{Client, Database, LOOPBACK};

pub struct Fixture {
    pub db: Database,
    pub store: Store,
    pub api: Client,
    start: Start,
    keeper: LeaseKeeper,
    answers: AnswerWriter,
    deliver: Deliver,
    results: ResultWriter,
}

/// The time at which every test begins.
pub fn dawn() -> DateTime<Utc> {
    DateTime::parse_from_rfc3339("2026-01-01T00:00:00Z").unwrap().with_timezone(&Utc)
}

/// The configuration of a service with a `DATABASE_URL`, which may call the receivers of the tests.
pub fn config(args: &[&str]) -> Config {
    let mut all = vec!["reprise", "--port", "0", "--database-url", "postgres://the-tests-own"];
    if !args.contains(&"--webhook-allow") {
        all.extend(["--webhook-allow", LOOPBACK]);
    }
    all.extend(args);
    Cli::try_parse_from(all).unwrap().config
}

impl Fixture {
    pub async fn new() -> Fixture {
        Fixture::with(&[]).await
    }

    pub async fn with(args: &[&str]) -> Fixture {
        Fixture::on(Database::new().await, args).await
    }

    pub async fn on(db: Database, args: &[&str]) -> Fixture {
        let config = config(args);
        let store = Store::new(&db.url, 16, Clock::fixed(dawn()), config.limits().retry).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let secret = store.secret().await.unwrap();
        let handles = Handles::new(base.clone(), secret.clone());
        let api = Api {
            loops: store.clone(),
            service: Service::new(store.clone(), config.limits().metadata_bytes, config.retry.stuck_after_secs),
            limits: config.limits(),
            bodies: Bodies::new(config.request.max_body_bytes),
            idempotency_ttl: Duration::from_secs(config.request.idempotency_ttl_secs),
            request_time: config.request_time(),
            authenticator: Arc::new(Authenticator {
                keys: config.keys().unwrap(),
                public: config.access.public_paths.clone(),
                secret,
                hosts: config.hosts(),
            }),
            metrics: telemetry::metrics(),
            graphs: tokio::sync::Semaphore::new(1),
            requests: TaskTracker::new(),
            ending: CancellationToken::new(),
        };
        tokio::spawn(serve(listener, api, CancellationToken::new()));
        let timeout = Duration::from_millis(config.webhook.webhook_timeout_ms);
        let client = webhook::Client::new(webhook::ClientSettings {
            handles,
            timeout,
            per_host: config.webhook.webhook_concurrency_per_host,
            guard: config.guard(),
            signer: config.signer().unwrap(),
        })
        .unwrap();
        let interval = Duration::from_secs(1);
        let concurrency = config.webhook.webhook_concurrency;
        let settings = start::StartSettings { interval, lease: config.lease(), concurrency };
        let (start, caller, answers) = Start::new(store.clone(), client.clone(), settings);
        let keeper = caller.lease_keeper();
        tokio::spawn(caller.run(CancellationToken::new()));
        let settings = deliver::DeliverySettings {
            interval,
            concurrency,
            lease: timeout + Duration::from_secs(30),
            patience: Duration::from_millis(200),
            max_attempts: config.webhook.webhook_max_attempts,
            retry_base: Duration::from_millis(config.webhook.webhook_retry_base_ms),
            retry_max: Duration::from_millis(config.webhook.webhook_retry_max_ms),
        };
        let (deliver, results) = Deliver::new(store.clone(), client, settings);
        Fixture { db, store, api: Client::new(base), start, keeper, answers, deliver, results }
    }

    pub fn advance(&self, secs: i64) {
        self.store.clock().advance(TimeDelta::seconds(secs));
    }

    pub fn advance_ms(&self, ms: i64) {
        self.store.clock().advance(TimeDelta::milliseconds(ms));
    }

    /// Claims pending tasks. Those without `on_start` are Running afterwards.
    pub async fn claim(&self) -> u64 {
        self.start.tick().await.unwrap().processed
    }

    /// Waits for answers to `on_start` and writes them.
    pub async fn write_answers(&mut self) {
        assert!(self.answers.write_some().await);
    }

    /// Claims pending tasks and writes the answers to their calls.
    pub async fn start(&mut self) -> u64 {
        let claimed = self.claim().await;
        self.write_answers().await;
        claimed
    }

    pub fn keeper(&self) -> &LeaseKeeper {
        &self.keeper
    }

    pub async fn expire(&self) -> u64 {
        Timeout::new(self.store.clone(), Duration::from_secs(1)).tick().await.unwrap().processed
    }

    pub async fn release(&self) -> u64 {
        Retry { store: self.store.clone(), interval: Duration::from_secs(1) }.tick().await.unwrap().processed
    }

    /// Sends due notifications and writes the results; returns how many were sent.
    pub async fn deliver(&mut self) -> u64 {
        let sent = self.deliver.tick().await.unwrap().processed;
        self.deliver.tracker().close();
        self.deliver.tracker().wait().await;
        self.deliver.tracker().reopen();
        let mut left = sent;
        while left > 0 {
            assert!(self.results.write_some().await);
            left = u64::try_from(self.deliver.in_flight()).unwrap();
        }
        sent
    }

    /// Sends what is due and writes the first results, while other deliveries may still be in flight.
    pub async fn begin_delivery(&mut self) -> u64 {
        let sent = self.deliver.tick().await.unwrap().processed;
        self.write_delivery_results().await;
        sent
    }

    /// Waits for results of deliveries and writes them.
    pub async fn write_delivery_results(&mut self) {
        assert!(self.results.write_some().await);
    }

    pub async fn clean_up(&self, days: u32) -> u64 {
        let retention = Retention::new(self.store.clone(), days, Duration::from_secs(86_400));
        retention.tick().await.unwrap().processed
    }
}
