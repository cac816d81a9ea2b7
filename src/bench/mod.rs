//! `reprise bench` measures the service on this machine. A load generator and a receiver of webhooks run against a
//! service, and each result is compared with PostgreSQL alone. The benchmark is an HTTP client like any other; only
//! `raw` accesses the database directly.

pub mod args;
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

use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::output::print;
use args::BenchArgs;
use environment::Environment;
use report::Measurement;
use sink::Sink;
use workloads::{Bench, WORKLOADS};

/// Measures the workloads and prints the results. An error is one line, printed last.
pub async fn run(args: &BenchArgs, config: &Config, shutdown: CancellationToken) -> Result<(), String> {
    if args.list {
        for workload in WORKLOADS {
            print(&format!("{:<12} {}\n", workload.name(), workload.about()))?;
        }
        return Ok(());
    }
    let json_file = args.json.as_ref().filter(|path| path.as_os_str() != "-");
    let cannot = |path: &std::path::Path, error: std::io::Error| format!("--json {}: {error}", path.display());
    if let Some(path) = json_file {
        // Fail now rather than after everything is measured.
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
    let note = if args.quick { "Sizes are those of --quick; the targets apply to the full sizes.\n" } else { "" };
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
    let defaults = || WORKLOADS.into_iter().filter(|workload| workload.is_default()).collect();
    let wanted = if args.workloads.is_empty() { defaults() } else { args.workloads.clone() };
    Ok((facts, Box::pin(bench.run(&wanted, shutdown)).await))
}

/// Returns the facts about machine and server that a comparison of results needs.
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
