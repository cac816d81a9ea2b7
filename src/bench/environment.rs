//! The services that workloads run against: either a running one, or a new one for each workload, on a fresh database
//! of a private PostgreSQL or of the server that `DATABASE_URL` names. The environment removes everything it has
//! created.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use private_postgres::{Embedded, Settings};
use uuid::Uuid;

use super::process::{self, ServiceProcess};
use super::raw::RawDatabase;
use super::wire::Peer;
use crate::config::Config;
use crate::postgres_errors;

/// The smallest `max_connections` of the private PostgreSQL: enough for two services and one connection per client.
const CONNECTIONS: u32 = 200;
const CLIENTS: u32 = 64;

pub struct Environment {
    kind: Kind,
    settings: Vec<(&'static str, String)>,
    next_number: AtomicU32,
    /// The batches that the workloads created, to cancel them in a service that keeps running.
    created_batches: Arc<Mutex<Vec<Uuid>>>,
    /// The databases that are not dropped yet.
    databases: Mutex<Vec<String>>,
}

enum Kind {
    /// A service that is already running and, if known, its database.
    Given { peer: Peer, database: Option<RawDatabase> },
    /// A server on which the environment creates databases.
    Own { server: RawDatabase, embedded: Option<Private> },
}

/// A private PostgreSQL whose data directory is removed at the end.
struct Private {
    embedded: Embedded,
    /// The directory above the data directory, if it was created as well.
    parent: Option<PathBuf>,
}

/// A service to measure.
pub struct Target {
    pub peer: Peer,
    pub database: Option<RawDatabase>,
    /// The process id of PostgreSQL, if it runs on this machine.
    pub postgres: Option<i32>,
    /// The batches that the workload created.
    pub created_batches: Arc<Mutex<Vec<Uuid>>>,
    own: Option<(ServiceProcess, String)>,
}

/// Seconds of processor time used so far, where known.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    pub service: Option<f64>,
    pub postgres: Option<f64>,
    pub generator: Option<f64>,
}

impl Environment {
    /// An environment for a service that is already running.
    pub fn given(url: &str, key: Option<&str>, config: &Config) -> Result<Environment, String> {
        let authority = authority(url)?;
        let database = config.database_url().map(RawDatabase::new);
        let kind = Kind::Given { peer: Peer::new(&authority, key), database };
        Ok(Environment::new(kind, Vec::new()))
    }

    /// An environment that starts its services.
    pub async fn own(config: &Config) -> Result<Environment, String> {
        let embedded = match config.database_url() {
            Some(_) => None,
            None => Some(Private::start(config).await?),
        };
        let url = config.database_url().or(embedded.as_ref().map(|private| private.embedded.url())).unwrap_or_default();
        let kind = Kind::Own { server: RawDatabase::new(url), embedded };
        Ok(Environment::new(kind, settings(config)))
    }

    fn new(kind: Kind, settings: Vec<(&'static str, String)>) -> Environment {
        Environment {
            kind,
            settings,
            next_number: AtomicU32::default(),
            created_batches: Arc::default(),
            databases: Mutex::default(),
        }
    }

    pub fn is_own(&self) -> bool {
        matches!(self.kind, Kind::Own { .. })
    }

    /// Returns the facts about the database server, if the database is known.
    pub async fn facts(&self) -> Result<Vec<(String, String)>, String> {
        match &self.kind {
            Kind::Own { server, .. } => server.facts().await,
            Kind::Given { database: Some(database), .. } => database.facts().await,
            Kind::Given { database: None, .. } => Ok(Vec::new()),
        }
    }

    /// Starts a service with empty tables, or returns the running one.
    pub async fn target(&self) -> Result<Target, String> {
        let server = match &self.kind {
            Kind::Own { server, .. } => server,
            Kind::Given { peer, database } => {
                let postgres = match database {
                    Some(database) => database.process().await?,
                    None => None,
                };
                let (peer, database) = (peer.clone(), database.clone());
                return Ok(Target {
                    peer,
                    database,
                    postgres,
                    created_batches: Arc::clone(&self.created_batches),
                    own: None,
                });
            }
        };
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let name = format!("reprise_bench_{}_{number}", std::process::id());
        server.execute(&format!("create database {name}")).await?;
        self.databases().push(name.clone());
        let database = server.named(&name)?;
        let service = ServiceProcess::start(&database.url, &self.settings).await?;
        let postgres = database.process().await?;
        let peer = Peer::new(&service.authority, None);
        let created_batches = Arc::clone(&self.created_batches);
        Ok(Target { peer, database: Some(database), postgres, created_batches, own: Some((service, name)) })
    }

    /// Stops the service that [`Environment::target`] has started and drops its database.
    pub async fn tear_down(&self, target: Target) -> Result<(), String> {
        let (Kind::Own { server, .. }, Some((service, name))) = (&self.kind, target.own) else { return Ok(()) };
        service.stop().await;
        self.databases().retain(|database| *database != name);
        drop_database(server, &name).await
    }

    /// Removes everything that is left, also by interrupted workloads.
    pub async fn close(self) {
        let databases = std::mem::take(&mut *self.databases());
        match self.kind {
            Kind::Own { embedded: Some(private), .. } => private.remove().await,
            Kind::Own { server, embedded: None } => {
                for name in databases {
                    if let Err(error) = drop_database(&server, &name).await {
                        tracing::warn!(database = name, error, "database not dropped");
                    }
                }
            }
            Kind::Given { .. } => {}
        }
    }

    fn databases(&self) -> MutexGuard<'_, Vec<String>> {
        self.databases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Target {
    pub fn usage(&self) -> Usage {
        Usage {
            service: self.own.as_ref().and_then(|(service, _)| process::cpu(service.pid)),
            postgres: self.postgres.and_then(process::cpu_of_family),
            generator: process::cpu(std::process::id().cast_signed()),
        }
    }

    /// Returns the resident memory of the service in bytes.
    pub fn memory(&self) -> Option<u64> {
        self.own.as_ref().and_then(|(service, _)| process::memory(service.pid))
    }
}

impl Private {
    /// Starts PostgreSQL on the disk where the service would keep its data. A directory for temporary files may be in
    /// memory, where nothing is flushed to disk.
    async fn start(config: &Config) -> Result<Private, String> {
        let parent = &config.database.reprise_data_dir;
        let is_new = !parent.exists();
        let connections = CONNECTIONS.max(2 * config.database.pool_max_size + CLIENTS + 20).to_string();
        let settings = Settings {
            bin_dir: config.database.postgres_bin_dir.clone(),
            extra: vec![("max_connections".into(), connections)],
            ..Settings::new("reprise", parent.join(format!("bench-{}", std::process::id())))
        };
        let embedded = Embedded::start(settings).await.map_err(|error| postgres_errors::explain(&error))?;
        Ok(Private { embedded, parent: is_new.then(|| parent.clone()) })
    }

    async fn remove(self) {
        let dir = self.embedded.data_dir().to_owned();
        if let Err(error) = self.embedded.stop().await {
            tracing::warn!(%error, "private PostgreSQL not stopped cleanly");
        }
        remove(&dir, self.parent.as_deref());
    }
}

async fn drop_database(server: &RawDatabase, name: &str) -> Result<(), String> {
    server.execute(&format!("drop database if exists {name} with (force)")).await
}

/// Removes the data directory, and `parent` if the benchmark created it and it is empty.
fn remove(dir: &Path, parent: Option<&Path>) {
    if let Err(error) = std::fs::remove_dir_all(dir) {
        tracing::warn!(%error, dir = %dir.display(), "data directory not removed");
    }
    if let Some(parent) = parent {
        let _ = std::fs::remove_dir(parent);
    }
}

fn authority(url: &str) -> Result<String, String> {
    let wrong = || format!("--url {url}: must be http://host or http://host:port");
    let parsed = url::Url::parse(url).map_err(|_| wrong())?;
    let plain = parsed.scheme() == "http" && parsed.path() == "/" && parsed.query().is_none();
    let host = parsed.host_str().filter(|_| plain).ok_or_else(wrong)?;
    Ok(format!("{host}:{}", parsed.port_or_known_default().unwrap_or(80)))
}

/// Returns the settings of a service that the benchmark starts: those that affect speed, and limits high enough for the
/// large batches.
fn settings(config: &Config) -> Vec<(&'static str, String)> {
    let (loops, webhook) = (&config.loops, &config.webhook);
    vec![
        ("POOL_MAX_SIZE", config.database.pool_max_size.to_string()),
        ("WORKER_LOOP_INTERVAL_MS", loops.worker_loop_interval_ms.to_string()),
        ("RETRY_LOOP_INTERVAL_MS", loops.retry_loop_interval_ms.to_string()),
        ("WEBHOOK_CONCURRENCY", webhook.webhook_concurrency.to_string()),
        ("WEBHOOK_CONCURRENCY_PER_HOST", webhook.webhook_concurrency_per_host.to_string()),
        ("MAX_TASKS_PER_BATCH", config.request.max_tasks_per_batch.max(100_000).to_string()),
        ("MAX_DEPENDENCIES_PER_TASK", config.request.max_dependencies_per_task.max(100_000).to_string()),
        ("MAX_LINKS_PER_BATCH", config.request.max_links_per_batch.max(200_000).to_string()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_url_of_a_service_is_http_with_host_and_port() {
        assert_eq!(authority("http://127.0.0.1:8085").unwrap(), "127.0.0.1:8085");
        assert_eq!(authority("http://reprise/").unwrap(), "reprise:80");
        for url in ["https://reprise", "reprise:8085", "http://reprise/api", ""] {
            assert_eq!(authority(url).unwrap_err(), format!("--url {url}: must be http://host or http://host:port"));
        }
    }
}
