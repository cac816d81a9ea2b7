//! A storm of random faults: instances are killed and stopped, their connections break in every way, sessions are
//! terminated, and another transaction holds rows. Once the faults are over, all work comes to its end and nothing that
//! was acknowledged is lost.
//!
//! `STORM_SEED` repeats a storm, as far as timing allows; `STORM_SECS` sets its length.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use crate::support::{Database, Fault, Instance, Load, LockHolder, PATIENCE, Proxy, eventually};

const SETTINGS: [(&str, &str); 8] = [
    ("RUST_LOG", "off"),
    ("WORKER_LOOP_INTERVAL_MS", "200"),
    ("RETRY_LOOP_INTERVAL_MS", "200"),
    ("WEBHOOK_DELIVERY_INTERVAL_MS", "200"),
    ("WEBHOOK_CONCURRENCY", "20"),
    ("WEBHOOK_TIMEOUT_MS", "30000"),
    ("WORKER_CLAIM_TIMEOUT_SECS", "3"),
    ("DATABASE_TIMEOUT_SECS", "3"),
];

/// Texts in statements at which a connection may break.
const SAYINGS: [&str; 6] = ["commit", "begin", "rollback", "select", "update", "insert"];
/// Tables whose rows another transaction holds.
const TABLES: [&str; 6] = ["task", "task", "batch_count", "status_count", "slot", "outbox"];

/// One instance and the network between it and the database. At most one fault at a time concerns it.
struct Target {
    proxy: Proxy,
    instance: Mutex<Option<Instance>>,
}

#[derive(Clone)]
struct Storm {
    db: Database,
    load: Load,
    targets: Arc<Vec<Target>>,
}

#[derive(Debug)]
enum Blow {
    Kill(usize),
    Stop(usize),
    Network(usize, Vec<(Fault, Reach)>),
    /// Of all sessions, this share.
    EndSessions(f64),
    Hold(&'static str, u8),
}

/// Which connections a fault concerns.
#[derive(Debug)]
enum Reach {
    Present,
    New,
    Everything,
    Share(f64, u64),
    Saying(&'static str),
}

fn draw_fault(rng: &mut StdRng) -> (Fault, Reach) {
    let fault = match rng.random_range(0..10) {
        0..3 => Fault::Forget,
        3..5 => Fault::Stall,
        5..6 => Fault::Cut,
        6..8 => Fault::Delay(Duration::from_millis(rng.random_range(1..500))),
        _ => Fault::Swallow,
    };
    let reach = match rng.random_range(0..10) {
        0..2 => Reach::Present,
        2..3 => Reach::New,
        3..5 => Reach::Everything,
        5..8 => Reach::Share(rng.random_range(0.1..0.9), rng.random()),
        _ => Reach::Saying(SAYINGS.choose(rng).unwrap()),
    };
    (fault, reach)
}

fn draw_blow(rng: &mut StdRng, targets: usize) -> Blow {
    let target = rng.random_range(0..targets);
    match rng.random_range(0..20) {
        0..2 => Blow::Kill(target),
        2..5 => Blow::Stop(target),
        5..11 => Blow::Network(target, (0..rng.random_range(1..4)).map(|_| draw_fault(rng)).collect()),
        11..13 => Blow::EndSessions(rng.random_range(0.1..1.0)),
        _ => Blow::Hold(TABLES.choose(rng).unwrap(), rng.random_range(1..20)),
    }
}

impl Storm {
    async fn start(instances: usize) -> Storm {
        let db = Database::new().await;
        db.watch_last_updated().await;
        let (mut proxies, mut running) = (Vec::new(), Vec::new());
        for _ in 0..instances {
            let proxy = Proxy::start(&db).await;
            running.push(begin(&proxy).await);
            proxies.push(proxy);
        }
        let load = Load::on(&running).await;
        load.limit_tenants(4);
        let target = |(proxy, instance)| Target { proxy, instance: Mutex::new(Some(instance)) };
        let targets = Arc::new(proxies.into_iter().zip(running).map(target).collect());
        Storm { db, load, targets }
    }

    /// Causes a fault, waits for its duration and ends it.
    async fn strike(self, blow: Blow, time: Duration) {
        match blow {
            Blow::Kill(target) => {
                let target = &self.targets[target];
                let Ok(mut place) = target.instance.try_lock() else { return };
                let Some(killed) = place.take() else { return };
                let address = killed.api.base().to_owned();
                killed.kill();
                tokio::time::sleep(time).await;
                let next = begin(&target.proxy).await;
                self.load.replace_instance(&address, &next);
                *place = Some(next);
            }
            Blow::Stop(target) => {
                let Ok(place) = self.targets[target].instance.try_lock() else { return };
                let Some(stopped) = place.as_ref() else { return };
                stopped.signal(Signal::STOP);
                tokio::time::sleep(time).await;
                stopped.signal(Signal::CONT);
            }
            Blow::Network(target, faults) => {
                let target = &self.targets[target];
                let Ok(_place) = target.instance.try_lock() else { return };
                for (fault, reach) in faults {
                    match reach {
                        Reach::Present => target.proxy.break_all(fault),
                        Reach::New => target.proxy.break_new(fault),
                        Reach::Everything => target.proxy.break_network(fault),
                        Reach::Share(share, seed) => {
                            let mut rng = StdRng::seed_from_u64(seed);
                            target.proxy.break_some(fault, || rng.random_bool(share));
                        }
                        Reach::Saying(text) => target.proxy.break_saying(fault, text),
                    }
                }
                tokio::time::sleep(time).await;
                target.proxy.heal();
            }
            Blow::EndSessions(share) => {
                let sessions = format!(
                    "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database() \
                     and application_name = 'reprise' and random() < {share}"
                );
                self.db.number(&sessions).await;
            }
            Blow::Hold(table, rows) => {
                let rows = format!("select from {table} order by random() limit {rows} for update skip locked");
                if let Some(holder) = LockHolder::holding_any(&self.db, &rows).await {
                    tokio::time::sleep(time).await;
                    holder.release().await;
                }
            }
        }
    }

    async fn rage(&self, rng: &mut StdRng, length: Duration) {
        let (started, mut blows) = (Instant::now(), JoinSet::new());
        while started.elapsed() < length {
            let blow = draw_blow(rng, self.targets.len());
            // Around the lease and the limit of transactions, and mostly short.
            let time = Duration::from_millis(rng.random_range(50..8000) >> rng.random_range(0..3));
            println!("{:7.2} s: {blow:?} for {time:?}", started.elapsed().as_secs_f64());
            blows.spawn(self.clone().strike(blow, time));
            tokio::time::sleep(Duration::from_millis(rng.random_range(50..1000))).await;
        }
        while let Some(done) = blows.join_next().await {
            done.unwrap();
        }
        for target in self.targets.iter() {
            target.proxy.heal();
        }
    }
}

/// An instance behind the proxy, which is healed for it. Other faults may hit it before it is ready.
async fn begin(proxy: &Proxy) -> Instance {
    let started = Instant::now();
    loop {
        proxy.heal();
        let url = proxy.url.clone();
        let begun = tokio::task::spawn_blocking(move || Instance::try_start(&url, &SETTINGS)).await.unwrap();
        if let Some(instance) = begun {
            return instance;
        }
        assert!(started.elapsed() < PATIENCE, "no instance starts");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name}={value}: not a number")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_lost_in_a_storm_of_faults() {
    let seed = setting("STORM_SEED").unwrap_or_else(rand::random);
    let length = Duration::from_secs(setting("STORM_SECS").unwrap_or(20));
    println!("STORM_SEED={seed} STORM_SECS={}", length.as_secs());
    let mut rng = StdRng::seed_from_u64(seed);
    let storm = Storm::start(rng.random_range(2..=3)).await;
    let clients = storm.load.clients(6);
    storm.rage(&mut rng, length).await;
    println!("{} runs ended in the storm", storm.load.ended());

    // Each instance works again.
    for target in storm.targets.iter() {
        let mut place = target.instance.lock().await;
        let instance = place.as_mut().unwrap();
        assert!(instance.is_alive(), "an instance ended although it was not killed");
        let api = instance.api.clone();
        eventually("an instance to be ready", async || (api.get("/ready").await.status == 200).then_some(())).await;
    }
    let before = storm.load.ended();
    eventually("work to go on", async || (storm.load.ended() > before + 30).then_some(())).await;
    clients.stop().await;
    storm.load.finish(&storm.db).await;
    storm.db.assert_last_updated_rose().await;
}
