//! Settings, read from environment variables or from flags of the same name. A bad value stops the program with one
//! line that names the variable, its value and what is allowed. `docs/configuration.md` lists every setting.

pub mod secret;
pub mod value;

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory, Parser, Subcommand};

use self::value::{parsed, whole};
use crate::access::{Access, Keys};
use crate::bench::args::BenchArgs;
use crate::domain::request::RequestLimits;
use crate::domain::retry;
use crate::http::Hosts;
use crate::webhook::{Allow, Guard, SHORTEST, Signer};
use secret::Secret;

#[derive(Debug, Parser)]
#[command(name = "reprise", version, about, long_about = None, max_term_width = 120)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub config: Config,
}

#[derive(Clone, Debug, PartialEq, Subcommand)]
pub enum Command {
    /// Run the service (the default)
    Serve,
    /// Bring the database schema up to date and exit
    Migrate,
    /// Recount all counters and report those that differ
    Doctor {
        /// Repair the differences
        #[arg(long)]
        fix: bool,
    },
    /// Print the `OpenAPI` description and exit
    Openapi,
    /// Measure throughput and latency on this machine
    Bench(BenchArgs),
}

#[derive(Clone, Debug, Args)]
pub struct Config {
    #[command(flatten)]
    pub database: DatabaseSettings,
    #[command(flatten)]
    pub http: HttpSettings,
    #[command(flatten)]
    pub access: Access,
    #[command(flatten)]
    pub loops: LoopsSettings,
    #[command(flatten)]
    pub webhook: WebhookSettings,
    #[command(flatten)]
    pub retry: RetrySettings,
    #[command(flatten)]
    pub dependencies: DependenciesSettings,
    #[command(flatten)]
    pub request: RequestSettings,
    #[command(flatten)]
    pub log: LogSettings,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Database")]
pub struct DatabaseSettings {
    /// Database to use, PostgreSQL 14 or newer. Without it, the service starts a private PostgreSQL
    #[arg(long, env = "DATABASE_URL", global = true, hide_env_values = true, value_name = "URL")]
    pub database_url: Option<String>,
    /// Data directory of the private PostgreSQL
    #[arg(long, env = "REPRISE_DATA_DIR", global = true, default_value = ".reprise", value_name = "DIR")]
    pub reprise_data_dir: PathBuf,
    /// Directory with the `postgres` and `initdb` programs for the private PostgreSQL [default: detected]
    #[arg(long, env = "POSTGRES_BIN_DIR", global = true, value_name = "DIR")]
    pub postgres_bin_dir: Option<PathBuf>,
    /// Bring the database schema up to date at startup
    #[arg(long, env = "AUTO_MIGRATE", global = true, default_value = "1", value_parser = boolean, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub auto_migrate: bool,
    /// Maximum number of database connections
    #[arg(long, env = "POOL_MAX_SIZE", global = true, default_value = "16", value_parser = whole(5..=1000u32), value_name = "N")]
    pub pool_max_size: u32,
    /// Time limit of a transaction, in seconds
    #[arg(long, env = "DATABASE_TIMEOUT_SECS", global = true, default_value = "30", value_parser = whole(1..=3600u64), value_name = "SECS")]
    pub database_timeout_secs: u64,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "HTTP")]
pub struct HttpSettings {
    /// Address to listen on
    #[arg(long, env = "BIND_ADDR", global = true, default_value = "127.0.0.1", value_parser = parsed::<IpAddr>("an IP address"), value_name = "IP")]
    pub bind_addr: IpAddr,
    /// Port to listen on; 0 picks a free port
    #[arg(long, env = "PORT", global = true, default_value = "8085", value_parser = whole(0..=65_535u16), value_name = "N")]
    pub port: u16,
    /// URL at which workers reach this service; every handle starts with it [default: `http://BIND_ADDR:PORT`]
    #[arg(long, env = "HOST_URL", global = true, value_parser = http_url, value_name = "URL")]
    pub host_url: Option<String>,
    /// Time that calls in flight get to finish at shutdown, in seconds
    #[arg(long, env = "SHUTDOWN_GRACE_SECS", global = true, default_value = "30", value_parser = whole(0..=3600u64), value_name = "SECS")]
    pub shutdown_grace_secs: u64,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Loops")]
pub struct LoopsSettings {
    /// Poll interval of the start and timeout loops, in milliseconds
    #[arg(long, env = "WORKER_LOOP_INTERVAL_MS", global = true, default_value = "1000", value_parser = whole(10..=3_600_000u64), value_name = "MS")]
    pub worker_loop_interval_ms: u64,
    /// Poll interval of the retry loop, in milliseconds
    #[arg(long, env = "RETRY_LOOP_INTERVAL_MS", global = true, default_value = "1000", value_parser = whole(10..=3_600_000u64), value_name = "MS")]
    pub retry_loop_interval_ms: u64,
    /// Poll interval of the delivery loop, in milliseconds
    #[arg(long, env = "WEBHOOK_DELIVERY_INTERVAL_MS", global = true, default_value = "1000", value_parser = whole(10..=3_600_000u64), value_name = "MS")]
    pub webhook_delivery_interval_ms: u64,
    /// Lease of a claimed task, in seconds: how long after an instance dies its claimed tasks return to the queue
    #[arg(long, env = "WORKER_CLAIM_TIMEOUT_SECS", global = true, default_value = "30", value_parser = whole(1..=3600u64), value_name = "SECS")]
    pub worker_claim_timeout_secs: u64,
    /// Days after which completed batches are deleted; 0 keeps them forever
    #[arg(long, env = "RETENTION_DAYS", global = true, default_value = "0", value_parser = whole(0..=36_500u32), value_name = "DAYS")]
    pub retention_days: u32,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Webhooks")]
pub struct WebhookSettings {
    /// Maximum number of concurrent calls, counted separately for `on_start` and for notifications
    #[arg(long, env = "WEBHOOK_CONCURRENCY", global = true, default_value = "256", value_parser = whole(1..=10_000usize), value_name = "N")]
    pub webhook_concurrency: usize,
    /// Maximum number of concurrent calls to one host and port, `on_start` and notifications together
    #[arg(long, env = "WEBHOOK_CONCURRENCY_PER_HOST", global = true, default_value = "128", value_parser = whole(1..=10_000usize), value_name = "N")]
    pub webhook_concurrency_per_host: usize,
    /// Time limit of a webhook call, in milliseconds
    #[arg(long, env = "WEBHOOK_TIMEOUT_MS", global = true, default_value = "10000", value_parser = whole(10..=600_000u64), value_name = "MS")]
    pub webhook_timeout_ms: u64,
    /// Maximum number of attempts to deliver a notification
    #[arg(long, env = "WEBHOOK_MAX_ATTEMPTS", global = true, default_value = "12", value_parser = whole(1..=1000i32), value_name = "N")]
    pub webhook_max_attempts: i32,
    /// Delay before the second attempt at a notification, in milliseconds; it doubles with each further attempt
    #[arg(long, env = "WEBHOOK_RETRY_BASE_MS", global = true, default_value = "1000", value_parser = whole(1..=86_400_000u64), value_name = "MS")]
    pub webhook_retry_base_ms: u64,
    /// Longest delay between two attempts at a notification, in milliseconds
    #[arg(long, env = "WEBHOOK_RETRY_MAX_MS", global = true, default_value = "300000", value_parser = whole(1..=86_400_000u64), value_name = "MS")]
    pub webhook_retry_max_ms: u64,
    /// Destinations that webhooks may call besides public addresses: host names, .suffixes, addresses and CIDRs,
    /// separated by commas
    #[arg(long, env = "WEBHOOK_ALLOW", global = true, default_value = "", value_parser = Allow::from_str, value_name = "LIST")]
    pub webhook_allow: Allow,
    /// Secrets that sign every webhook call, each `whsec_<base64>`, separated by commas
    #[arg(long, env = "WEBHOOK_SIGNING_SECRETS", global = true, hide_env_values = true, value_name = "SECRETS")]
    pub webhook_signing_secrets: Option<Secret>,
    /// File with the signing secrets, instead of `WEBHOOK_SIGNING_SECRETS`
    #[arg(long, env = "WEBHOOK_SIGNING_SECRETS_FILE", global = true, value_name = "FILE")]
    pub webhook_signing_secrets_file: Option<PathBuf>,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Retries")]
pub struct RetrySettings {
    /// Highest `max_retries` that a retry policy may have
    #[arg(long, env = "RETRY_MAX_RETRIES_LIMIT", global = true, default_value = "10", value_parser = whole(1..=10_000i16), value_name = "N")]
    pub retry_max_retries_limit: i16,
    /// Highest `max_delay_secs` and `delay_secs` that a retry policy may have, in seconds
    #[arg(long, env = "RETRY_MAX_DELAY_LIMIT", global = true, default_value = "3600", value_parser = whole(1..=31_536_000u64), value_name = "SECS")]
    pub retry_max_delay_limit: u64,
    /// Longest delay in the `schedule` of a retry policy, in seconds
    #[arg(long, env = "RETRY_MAX_SCHEDULE_DELAY_SECS", global = true, default_value = "2592000", value_parser = whole(1..=315_360_000u64), value_name = "SECS")]
    pub retry_max_schedule_delay_secs: u64,
    /// Longest deferral that a `Retry-After` or a `retry_after_secs` can cause, in seconds
    #[arg(long, env = "RETRY_MAX_RETRY_AFTER_SECS", global = true, default_value = "86400", value_parser = whole(1..=315_360_000u64), value_name = "SECS")]
    pub retry_max_retry_after_secs: u64,
    /// Maximum number of deferrals of a task; after that, a rate limit counts as an ordinary failure
    #[arg(long, env = "RETRY_MAX_DEFERRALS", global = true, default_value = "100", value_parser = whole(0..=1_000_000i32), value_name = "N")]
    pub retry_max_deferrals: i32,
    /// Seconds without a heartbeat after which a Claimed or Running task may be retried manually
    #[arg(long, env = "STUCK_AFTER_SECS", global = true, default_value = "1800", value_parser = whole(1..=315_360_000u64), value_name = "SECS")]
    pub stuck_after_secs: u64,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Dependencies")]
pub struct DependenciesSettings {
    /// Default of `dead_end_cancel` for new batches: cancel a task once a failure or cancellation leaves it without an
    /// alive child
    #[arg(long, env = "DEAD_END_CANCEL", global = true, default_value = "0", value_parser = boolean, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub dead_end_cancel: bool,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Request limits")]
pub struct RequestSettings {
    /// Maximum number of tasks in a batch
    #[arg(long, env = "MAX_TASKS_PER_BATCH", global = true, default_value = "10000", value_parser = whole(1..=1_000_000usize), value_name = "N")]
    pub max_tasks_per_batch: usize,
    /// Maximum number of dependencies of a task
    #[arg(long, env = "MAX_DEPENDENCIES_PER_TASK", global = true, default_value = "10000", value_parser = whole(0..=1_000_000usize), value_name = "N")]
    pub max_dependencies_per_task: usize,
    /// Maximum number of dependencies in a batch, over all its tasks
    #[arg(long, env = "MAX_LINKS_PER_BATCH", global = true, default_value = "200000", value_parser = whole(0..=10_000_000usize), value_name = "N")]
    pub max_links_per_batch: usize,
    /// Maximum number of notification actions of a task or a batch
    #[arg(long, env = "MAX_ACTIONS_PER_TASK", global = true, default_value = "20", value_parser = whole(0..=1000usize), value_name = "N")]
    pub max_actions_per_task: usize,
    /// Maximum size of an action in bytes: URL, headers and body
    #[arg(long, env = "MAX_ACTION_BYTES", global = true, default_value = "262144", value_parser = whole(1024..=1_073_741_824usize), value_name = "BYTES")]
    pub max_action_bytes: usize,
    /// Maximum size of a task in bytes, with all its actions
    #[arg(long, env = "MAX_TASK_BYTES", global = true, default_value = "1048576", value_parser = whole(1024..=1_073_741_824usize), value_name = "BYTES")]
    pub max_task_bytes: usize,
    /// Time for which the service remembers an `Idempotency-Key`, in seconds
    #[arg(long, env = "IDEMPOTENCY_TTL_SECS", global = true, default_value = "86400", value_parser = whole(1..=315_360_000u64), value_name = "SECS")]
    pub idempotency_ttl_secs: u64,
    /// Maximum size of a request body, in bytes
    #[arg(long, env = "MAX_BODY_BYTES", global = true, default_value = "33554432", value_parser = whole(1024..=1_073_741_824usize), value_name = "BYTES")]
    pub max_body_bytes: usize,
    /// Time limit to receive the headers of a request, and again to receive its body, in seconds
    #[arg(long, env = "REQUEST_TIMEOUT_SECS", global = true, default_value = "60", value_parser = whole(1..=3600u64), value_name = "SECS")]
    pub request_timeout_secs: u64,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Logs")]
pub struct LogSettings {
    /// Format of the logs, `text` or `json`
    #[arg(long, env = "LOG_FORMAT", global = true, default_value = "text", value_parser = parsed::<LogFormat>("text or json"), value_name = "FORMAT")]
    pub log_format: LogFormat,
    /// What is logged, as a tracing filter such as `info` or `reprise=debug`
    #[arg(long, env = "RUST_LOG", global = true, default_value = "info,sqlx=warn", value_parser = parsed::<Filter>("a tracing filter such as info or reprise=debug"), value_name = "FILTER")]
    pub rust_log: Filter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
}

impl FromStr for LogFormat {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "text" => Ok(LogFormat::Text),
            "json" => Ok(LogFormat::Json),
            _ => Err(()),
        }
    }
}

/// A tracing filter that is known to parse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter(pub String);

impl FromStr for Filter {
    type Err = tracing_subscriber::filter::ParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse::<tracing_subscriber::EnvFilter>().map(|_| Filter(text.to_owned()))
    }
}

impl Config {
    /// Checks constraints that span several settings.
    pub fn validate(&self) -> Result<(), String> {
        let webhook = &self.webhook;
        if webhook.webhook_retry_base_ms > webhook.webhook_retry_max_ms {
            return Err(format!(
                "WEBHOOK_RETRY_BASE_MS={}: must not exceed WEBHOOK_RETRY_MAX_MS ({})",
                webhook.webhook_retry_base_ms, webhook.webhook_retry_max_ms
            ));
        }
        self.signer()?;
        Ok(())
    }

    /// Whether the service runs on a private PostgreSQL and listens on a loopback address only.
    pub fn is_local(&self) -> bool {
        self.database_url().is_none() && self.http.bind_addr.is_loopback()
    }

    pub fn database_url(&self) -> Option<&str> {
        self.database.database_url.as_deref().filter(|url| !url.trim().is_empty())
    }

    pub fn guard(&self) -> Guard {
        Guard::new(self.webhook.webhook_allow.clone(), self.is_local())
    }

    pub fn signer(&self) -> Result<Signer, String> {
        let webhook = &self.webhook;
        let file = webhook.webhook_signing_secrets_file.as_ref();
        let read = Secret::read("WEBHOOK_SIGNING_SECRETS", webhook.webhook_signing_secrets.as_ref(), file)?;
        let (text, at) = read.unwrap_or_default();
        // The value is a secret: the message names its source only.
        Signer::parse(&text).map_err(|problem| format!("{at}: {problem}"))
    }

    /// Reads the API keys. Without keys, any `BIND_ADDR` other than a loopback address is an error.
    pub fn keys(&self) -> Result<Keys, String> {
        let (keys, bind) = (self.access.keys()?, self.http.bind_addr);
        if keys.is_empty() && !bind.is_loopback() {
            return Err(format!(
                "BIND_ADDR={bind}: must be a loopback address such as 127.0.0.1 as long as the API has no keys; \
                 set API_KEYS or API_KEYS_FILE to listen on another address"
            ));
        }
        Ok(keys)
    }

    /// Host names that a request may carry in its `Host` header when there are no keys.
    pub fn hosts(&self) -> Hosts {
        Hosts::new(self.http.bind_addr, self.http.host_url.as_deref())
    }

    /// Warnings about settings that work but are probably a mistake, one line each.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for name in self.access.keys().iter().flat_map(Keys::short) {
            warnings.push(format!("API_KEYS: the key of {name} has fewer than 16 characters and can be guessed"));
        }
        if self.http.bind_addr.is_unspecified() && self.http.host_url.is_none() {
            warnings.push(format!(
                "BIND_ADDR={} without HOST_URL: workers are told to report to the loopback address",
                self.http.bind_addr
            ));
        }
        if self.webhook.webhook_timeout_ms >= self.loops.worker_claim_timeout_secs * 1000 {
            warnings.push(format!(
                "WEBHOOK_TIMEOUT_MS={} is not shorter than WORKER_CLAIM_TIMEOUT_SECS={}: \
                 after a crash a task may be started again while its first call is still being answered",
                self.webhook.webhook_timeout_ms, self.loops.worker_claim_timeout_secs
            ));
        }
        if self.signer().is_ok_and(|signer| signer.shortest().is_some_and(|bytes| bytes < SHORTEST)) {
            warnings.push(format!("WEBHOOK_SIGNING_SECRETS: a secret has fewer than {SHORTEST} bytes"));
        }
        warnings
    }

    pub fn limits(&self) -> RequestLimits {
        RequestLimits {
            tasks_per_batch: self.request.max_tasks_per_batch,
            dependencies_per_task: self.request.max_dependencies_per_task,
            links_per_batch: self.request.max_links_per_batch,
            actions_per_task: self.request.max_actions_per_task,
            metadata_bytes: 65_536,
            action_bytes: self.request.max_action_bytes,
            task_bytes: self.request.max_task_bytes,
            retry: retry::RetryLimits {
                max_retries: self.retry.retry_max_retries_limit,
                max_delay_secs: self.retry.retry_max_delay_limit,
                max_schedule_delay_secs: self.retry.retry_max_schedule_delay_secs,
                max_retry_after_secs: self.retry.retry_max_retry_after_secs,
                max_deferrals: self.retry.retry_max_deferrals,
            },
            dead_end_cancel: self.dependencies.dead_end_cancel,
        }
    }

    pub fn lease(&self) -> Duration {
        Duration::from_secs(self.loops.worker_claim_timeout_secs)
    }

    pub fn request_time(&self) -> Duration {
        Duration::from_secs(self.request.request_timeout_secs)
    }
}

/// Parses the command line and the environment. An error is the one line to print.
pub fn parse() -> Result<Cli, String> {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => error.exit(),
        Err(error) => return Err(one_line(&error)),
    };
    cli.config.validate()?;
    Ok(cli)
}

fn one_line(error: &clap::Error) -> String {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    if let (Some(flag), Some(value)) = (text(ContextKind::InvalidArg), text(ContextKind::InvalidValue)) {
        let flag = flag.split([' ', '=']).next().unwrap_or_default();
        let name = flag.trim_start_matches('-').replace('-', "_").to_uppercase();
        let is_variable = Cli::command().get_arguments().any(|arg| arg.get_env().is_some_and(|env| *env == *name));
        let what = if is_variable { format!("{name}={value}") } else { format!("{flag} {value}") };
        let allowed = std::error::Error::source(error).map_or_else(|| "is not allowed".to_owned(), ToString::to_string);
        return format!("{what}: {allowed}");
    }
    // clap lists missing arguments on lines of their own, then an empty line and the usage, which is dropped.
    let text = error.to_string();
    let lines: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    lines.join(" ").trim_start_matches("error: ").to_owned()
}

fn boolean(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        _ => Err("must be 0, 1, true or false".into()),
    }
}

fn http_url(text: &str) -> Result<String, String> {
    match url::Url::parse(text) {
        Ok(url) if matches!(url.scheme(), "http" | "https") && url.query().is_none() && url.fragment().is_none() => {
            Ok(text.trim_end_matches('/').to_owned())
        }
        _ => Err("must be an http or https URL without a query".into()),
    }
}

#[cfg(test)]
mod tests;
