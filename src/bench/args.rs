//! The command line of `reprise bench`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

use super::workloads::Workload;
use crate::config::value::{parsed, whole};

/// The arguments of `reprise bench`.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct BenchArgs {
    /// Workloads to measure [default: all except soak]
    #[arg(value_name = "WORKLOAD", value_parser = Workload::parse)]
    pub(super) workloads: Vec<Workload>,
    /// Measure a running service, `http://host:port` [default: start one]
    #[arg(long, value_name = "URL")]
    pub(super) url: Option<String>,
    /// API key for the service at --url
    #[arg(long, value_name = "KEY", requires = "url")]
    pub(super) key: Option<String>,
    /// Address on which the benchmark listens for the calls of the service
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:0", value_parser = parsed::<SocketAddr>("an IP address with a port, such as 127.0.0.1:0"))]
    pub(super) sink: SocketAddr,
    /// Use smaller sizes; measures everything in a minute or two
    #[arg(long)]
    pub(super) quick: bool,
    /// Number of finished tasks in the table for e2e-filled and lists [default: 5000000, or 200000 with --quick]
    #[arg(long, value_name = "N", value_parser = whole(0..=1_000_000_000usize))]
    pub(super) filled: Option<usize>,
    /// Write all results as JSON; `-` writes them to standard output instead of the table
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// List the workloads and exit
    #[arg(long)]
    pub(super) list: bool,
    /// Multiply all sizes by this factor
    #[arg(long, value_name = "FACTOR", default_value = "1", hide = true)]
    pub(super) scale: f64,
}
