//! `reprise bench`: how fast is it on this machine? A load generator and a receiver of webhooks against a service, and next
//! to each number what PostgreSQL does by itself. It talks to the service over HTTP alone, like everybody else; only what
//! `raw` does goes past it.

mod environment;
mod load;
mod process;
mod progress;
mod raw;
mod report;
mod sink;
mod wire;
mod workloads;

use std::fs::File;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;

use crate::config::{Config, parsed, whole};
use crate::output::print;
use environment::Environment;
use report::Measurement;
use sink::Sink;
use workloads::{Bench, WORKLOADS, Workload};

#[derive(Clone, Debug, PartialEq, Args)]
pub struct BenchArgs {
    /// What to measure [default: all but soak]
    #[arg(value_name = "WORKLOAD", value_parser = Workload::parse)]
    workloads: Vec<Workload>,
    /// A service that runs already, `http://host:port` [default: one is started]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// A key for it
    #[arg(long, value_name = "KEY", requires = "url")]
    key: Option<String>,
    /// Where this program listens for the service's calls
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:0", value_parser = parsed::<SocketAddr>("an IP address with a port, such as 127.0.0.1:0"))]
    sink: SocketAddr,
    /// Smaller sizes: all of it in a minute or two
    #[arg(long)]
    quick: bool,
    /// Finished tasks in the table for the workloads that want it filled [default: 5000000, or 200000 with --quick]
    #[arg(long, value_name = "N", value_parser = whole(0..=1_000_000_000usize))]
    filled: Option<usize>,
    /// Write everything as JSON; `-` for standard output, instead of the table
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only say which workloads there are
    #[arg(long)]
    list: bool,
    /// All sizes times this
    #[arg(long, value_name = "FACTOR", default_value = "1", hide = true)]
    scale: f64,
}

/// Measures and prints; an error is the one line for the end.
pub async fn run(args: &BenchArgs, config: &Config, shutdown: CancellationToken) -> Result<(), String> {
    if args.list {
        for workload in WORKLOADS {
            print(&format!("{:<12} {}\n", workload.name(), workload.about()))?;
        }
        return Ok(());
    }
    let json_file = args.json.as_ref().filter(|path| path.as_os_str() != "-");
    let cannot = |path: &PathBuf, error: std::io::Error| format!("--json {}: {error}", path.display());
    if let Some(path) = json_file {
        // Known now, and not when all is measured.
        File::options().append(true).create(true).open(path).map_err(|error| cannot(path, error))?;
    }
    let environment = match &args.url {
        Some(url) => Environment::given(url, args.key.as_deref(), config)?,
        None => Environment::own(config).await?,
    };
    let run = json!({
        "quick": args.quick,
        "filled": args.filled,
        "url": args.url,
    });
    let measured = Box::pin(measure(args, &environment, &shutdown)).await;
    environment.close().await;
    let (machine, outcomes) = measured?;
    let document = report::document(&run, &machine, &outcomes);
    let note =
        if args.quick { "The sizes are those of --quick: what is to be reached counts with all of it.\n" } else { "" };
    let table = report::table(&outcomes) + note;
    match json_file {
        None if args.json.is_some() => print(&format!("{document:#}\n"))?,
        None => print(&table)?,
        Some(path) => {
            print(&table)?;
            std::fs::write(path, format!("{document:#}\n")).map_err(|error| cannot(path, error))?;
        }
    }
    if shutdown.is_cancelled() {
        return Err("interrupted".into());
    }
    match outcomes.iter().filter(|outcome| outcome.failed.is_some()).count() {
        0 => Ok(()),
        failed => Err(format!("{failed} of {} workloads failed", outcomes.len())),
    }
}

async fn measure(
    args: &BenchArgs,
    environment: &Environment,
    shutdown: &CancellationToken,
) -> Result<(Value, Vec<Measurement>), String> {
    let facts = facts(environment).await?;
    let sink = Sink::start(args.sink).await?;
    let bench = Bench { environment, sink: &sink, quick: args.quick, scale: args.scale, filled: args.filled };
    let usual = || WORKLOADS.into_iter().filter(|workload| workload.is_usual()).collect();
    let wanted = if args.workloads.is_empty() { usual() } else { args.workloads.clone() };
    Ok((facts, Box::pin(bench.run(&wanted, shutdown)).await))
}

/// What has to be known to compare numbers.
async fn facts(environment: &Environment) -> Result<Value, String> {
    let server: Map<String, Value> =
        environment.facts().await?.into_iter().map(|(name, value)| (name, value.into())).collect();
    Ok(json!({
        "reprise": env!("CARGO_PKG_VERSION"),
        "optimized": !cfg!(debug_assertions),
        "cores": std::thread::available_parallelism().map_or(0, std::num::NonZero::get),
        "system": format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        "postgres": server,
    }))
}
