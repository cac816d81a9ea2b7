//! The command line of `reprise bench`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

use super::workloads::Workload;
use crate::config::value::{parsed, whole};

/// What to measure, on which service, and how to report it.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct BenchArgs {
    /// What to measure [default: all but soak]
    #[arg(value_name = "WORKLOAD", value_parser = Workload::parse)]
    pub(super) workloads: Vec<Workload>,
    /// A service that runs already, `http://host:port` [default: one is started]
    #[arg(long, value_name = "URL")]
    pub(super) url: Option<String>,
    /// A key for it
    #[arg(long, value_name = "KEY", requires = "url")]
    pub(super) key: Option<String>,
    /// Where this program listens for the service's calls
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:0", value_parser = parsed::<SocketAddr>("an IP address with a port, such as 127.0.0.1:0"))]
    pub(super) sink: SocketAddr,
    /// Smaller sizes: all of it in a minute or two
    #[arg(long)]
    pub(super) quick: bool,
    /// Finished tasks in the table for the workloads that want it filled [default: 5000000, or 200000 with --quick]
    #[arg(long, value_name = "N", value_parser = whole(0..=1_000_000_000usize))]
    pub(super) filled: Option<usize>,
    /// Write everything as JSON; `-` for standard output, instead of the table
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Only say which workloads there are
    #[arg(long)]
    pub(super) list: bool,
    /// All sizes times this
    #[arg(long, value_name = "FACTOR", default_value = "1", hide = true)]
    pub(super) scale: f64,
}
