//! The names of the workloads, their descriptions and what each needs.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    Http,
    Create1,
    Create1000,
    CreateDag,
    E2e5k,
    E2e50k,
    Latency,
    Chain,
    Patch,
    Put,
    Retry,
    E2eFilled,
    E2eBlocked,
    FanIn,
    Lists,
    Memory,
    Soak,
}

pub const WORKLOADS: [Workload; 17] = [
    Workload::Http,
    Workload::Create1,
    Workload::Create1000,
    Workload::CreateDag,
    Workload::E2e5k,
    Workload::E2e50k,
    Workload::Latency,
    Workload::Chain,
    Workload::Patch,
    Workload::Put,
    Workload::Retry,
    Workload::E2eFilled,
    Workload::E2eBlocked,
    Workload::FanIn,
    Workload::Lists,
    Workload::Memory,
    Workload::Soak,
];

impl Workload {
    pub fn name(self) -> &'static str {
        match self {
            Workload::Http => "http",
            Workload::Create1 => "create-1",
            Workload::Create1000 => "create-1000",
            Workload::CreateDag => "create-dag",
            Workload::E2e5k => "e2e-5k",
            Workload::E2e50k => "e2e-50k",
            Workload::Latency => "latency",
            Workload::Chain => "chain",
            Workload::Patch => "patch",
            Workload::Put => "put",
            Workload::Retry => "retry",
            Workload::E2eFilled => "e2e-filled",
            Workload::E2eBlocked => "e2e-blocked",
            Workload::FanIn => "fan-in",
            Workload::Lists => "lists",
            Workload::Memory => "memory",
            Workload::Soak => "soak",
        }
    }

    pub fn about(self) -> &'static str {
        match self {
            Workload::Http => "GET /health without the database, 64 clients",
            Workload::Create1 => "create tasks, 1 per request, 64 clients",
            Workload::Create1000 => "create tasks, 1,000 per request, 4 clients",
            Workload::CreateDag => "create graphs of 10 x 100 tasks with 3 parents each, 4 clients",
            Workload::E2e5k => "5,000 tasks end to end: created, on_start called, Success reported",
            Workload::E2e50k => "50,000 tasks end to end: created, on_start called, Success reported",
            Workload::Latency => "time from POST to on_start, one task at a time",
            Workload::Chain => "a chain of 50 tasks: time from the Success of one to the on_start of the next",
            Workload::Patch => "report Success on Running tasks, 64 clients",
            Workload::Put => "raise counters of Running tasks, 64 clients",
            Workload::Retry => "100,000 tasks fail at the same moment and return to the queue for their retry",
            Workload::E2eFilled => "end to end with 5,000,000 finished tasks in the table, compared with an empty one",
            Workload::E2eBlocked => "end to end behind 100,000 tasks that a rule blocks, compared with none",
            Workload::FanIn => "a batch of 50,000 in which the last task waits for all others: the last report",
            Workload::Lists => "lists, filters and statistics with 5,000,000 finished tasks in the table",
            Workload::Memory => "memory of the service after e2e-50k, and with the largest possible tasks",
            Workload::Soak => "end to end for 30 minutes; only on request",
        }
    }

    /// Whether the workload inserts rows directly or compares two services.
    pub fn needs_own(self) -> bool {
        matches!(self, Workload::Retry | Workload::E2eFilled | Workload::E2eBlocked)
    }

    /// Whether the service has to call the sink.
    pub fn needs_calls(self) -> bool {
        use Workload::{Chain, E2e5k, E2e50k, E2eBlocked, E2eFilled, Latency, Soak};
        matches!(self, Latency | Chain | E2e5k | E2e50k | E2eFilled | E2eBlocked | Soak)
    }

    /// Whether the benchmark measures the workload by default.
    pub fn is_default(self) -> bool {
        self != Workload::Soak
    }

    /// Whether the workload needs tables with many finished tasks.
    pub fn needs_filled(self) -> bool {
        matches!(self, Workload::E2eFilled | Workload::Lists)
    }

    pub fn parse(text: &str) -> Result<Workload, String> {
        let found = WORKLOADS.into_iter().find(|workload| workload.name() == text);
        found.ok_or_else(|| format!("must be one of {}", WORKLOADS.map(Workload::name).join(", ")))
    }
}
