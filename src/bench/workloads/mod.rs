//! Runs the workloads. Each has its own service and tables, so that no workload slows down another.

mod compared;
mod create;
mod end_to_end;
mod fan_in;
mod large;
mod latency;
mod lists;
mod reference;
mod reports;
mod requests;
mod retry;
mod soak;
mod workload;

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::environment::{Environment, Target, Usage};
use super::load;
use super::raw::fill;
use super::report::{Cost, Figure, FigureUnit, Measurement, megabytes};
use super::sink::Sink;
use super::wire;
use requests::{calling, cancel, locked, tasks, wait_for_failure};

pub use workload::{WORKLOADS, Workload};

/// The time limit of a wait, longer than any successful wait takes.
const PATIENCE: Duration = Duration::from_secs(600);
/// Tasks per request, where tasks are created in bulk.
const BULK: usize = 1000;
const BULK_CLIENTS: usize = 4;
/// Clients that send single tasks or reports.
const CLIENTS: usize = 64;
const NEEDS_OWN_SERVICE: &str = "needs a service that the benchmark starts; omit --url";

/// One run of the benchmark.
pub struct Bench<'a> {
    pub environment: &'a Environment,
    pub sink: &'a Sink,
    pub quick: bool,
    pub scale: f64,
    pub filled: Option<usize>,
}

impl Bench<'_> {
    /// Measures the workloads in order, until the shutdown.
    pub async fn run(&self, wanted: &[Workload], shutdown: &CancellationToken) -> Vec<Measurement> {
        let (mut outcomes, mut filled): (Vec<Measurement>, _) = (Vec::new(), None);
        for workload in wanted {
            let measuring = async {
                match workload {
                    Workload::Memory => self.memory(&outcomes).await,
                    workload => self.measure(*workload, &mut filled).await,
                }
            };
            let outcome = shutdown.run_until_cancelled(measuring).await.unwrap_or_else(|| Err("interrupted".into()));
            outcomes.push(outcome.unwrap_or_else(|error| Measurement::failed(workload.name(), error)));
            if shutdown.is_cancelled() {
                self.clean_up().await;
                return outcomes;
            }
        }
        if let Some(target) = filled {
            // If this fails, the environment removes the rest.
            let _ = self.environment.tear_down(target).await;
        }
        outcomes
    }

    /// Cancels the tasks of an interrupted workload in a running service. The environment removes its own services.
    async fn clean_up(&self) {
        if self.environment.is_own() {
            return;
        }
        let cleaned = async { cancel(&self.environment.target().await?).await };
        if let Err(error) = cleaned.await {
            tracing::warn!(%error, "tasks of the benchmark not canceled");
        }
    }

    /// Measures memory: after `e2e-50k`, whose result is reused if it has been measured, and with the largest tasks.
    async fn memory(&self, outcomes: &[Measurement]) -> Result<Measurement, String> {
        let (name, after) = (Workload::Memory.name(), Workload::E2e50k);
        if !self.environment.is_own() {
            return Ok(Measurement::skipped(name, NEEDS_OWN_SERVICE));
        }
        let earlier = outcomes.iter().find(|outcome| outcome.workload == after.name() && outcome.failed.is_none());
        let outcome = match earlier {
            Some(outcome) => outcome.clone(),
            None => self.measure(after, &mut None).await?,
        };
        let Some(bytes) = outcome.memory else { return Ok(Measurement::skipped(name, "there is no /proc")) };
        let mut figures = vec![Figure::new("", megabytes(bytes), FigureUnit::Megabytes).with_target(80.0)];
        let (count, memory) = (outcome.count, outcome.memory);
        self.sink.clear().await;
        let target = self.environment.target().await?;
        let large = Box::pin(large::large(self, &target)).await;
        self.environment.tear_down(target).await?;
        figures.extend(large?);
        Ok(Measurement { workload: name, count, figures, memory, ..Measurement::default() })
    }

    /// Measures one workload. `filled` is the service with many finished tasks, started for the first workload that
    /// needs it.
    async fn measure(&self, workload: Workload, filled: &mut Option<Target>) -> Result<Measurement, String> {
        self.sink.clear().await;
        let is_own = self.environment.is_own();
        if workload.needs_own() && !is_own {
            return Ok(Measurement::skipped(workload.name(), NEEDS_OWN_SERVICE));
        }
        if workload.needs_filled() && is_own && filled.is_none() {
            *filled = Some(self.filled_target().await?);
        }
        let target = self.environment.target().await?;
        let outcome = async {
            if workload.needs_calls() {
                self.check_callback(&target).await?;
            }
            self.run_workload(workload, &target, filled.as_ref().unwrap_or(&target)).await
        };
        let outcome = outcome.await;
        let memory = target.memory();
        if !is_own {
            cancel(&target).await?;
        }
        self.environment.tear_down(target).await?;
        let outcome = outcome?;
        Ok(Measurement { workload: workload.name(), memory: outcome.memory.or(memory), ..outcome })
    }

    /// Checks that the service can call the sink, because a workload would otherwise wait in vain.
    async fn check_callback(&self, target: &Target) -> Result<(), String> {
        let (status, body) =
            load::once(&target.peer, "POST", "/task", tasks(1, &calling(self.sink)).as_bytes()).await?;
        let (Some(id), 201) = (wire::first_uuid(&body, "id"), status) else {
            return Err(format!("POST /task: {status} {}", String::from_utf8_lossy(&body)));
        };
        locked(&target.created_batches).extend(wire::first_uuid(&body, "batch_id"));
        tokio::select! {
            worked = self.sink.next() => worked.map(drop),
            reason = wait_for_failure(&target.peer, id) => {
                let url = &self.sink.url;
                Err(format!("the service cannot call {url}, see --sink and WEBHOOK_ALLOW: {}", reason?))
            }
        }
    }

    /// Starts a service with many finished tasks in its tables.
    async fn filled_target(&self) -> Result<Target, String> {
        let target = self.environment.target().await?;
        if let Some(database) = &target.database {
            let count = self.filled.unwrap_or_else(|| self.size(5_000_000, 200_000));
            fill::finished(database, count).await?;
        }
        Ok(target)
    }

    async fn run_workload(&self, workload: Workload, target: &Target, filled: &Target) -> Result<Measurement, String> {
        match workload {
            Workload::Http => reports::health(self, target).await,
            Workload::Create1 => create::single(self, target).await,
            Workload::Create1000 => create::bulk(self, target).await,
            Workload::CreateDag => create::dag(self, target).await,
            Workload::E2e5k => end_to_end::plain(self, target, self.size(5000, 2000)).await,
            Workload::E2e50k => end_to_end::plain(self, target, self.size(50_000, 10_000)).await,
            Workload::Latency => latency::idle(self, target).await,
            Workload::Chain => latency::chain(self, target).await,
            Workload::Patch => reports::patch(self, target).await,
            Workload::Put => reports::put(self, target).await,
            Workload::Retry => retry::retry(self, target).await,
            Workload::E2eFilled => compared::filled(self, target, filled).await,
            Workload::E2eBlocked => {
                let other = self.environment.target().await?;
                let outcome = compared::blocked(self, target, &other).await;
                self.environment.tear_down(other).await?;
                outcome
            }
            Workload::FanIn => fan_in::fan_in(self, target).await,
            Workload::Lists => lists::lists(self, filled).await,
            Workload::Memory => Err("memory is measured after the other workloads".into()),
            Workload::Soak => soak::soak(self, target).await,
        }
    }

    /// Returns the size of a workload: `full` or, with `--quick`, `quick`, times the scale, and at least one.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a size")]
    fn size(&self, full: usize, quick: usize) -> usize {
        let size = if self.quick { quick } else { full };
        ((size as f64 * self.scale).ceil() as usize).max(1)
    }
}

/// Returns the processor time between two readings per 1,000 of `count` tasks or requests.
#[allow(clippy::cast_precision_loss, reason = "it is rounded anyway")]
fn cost(before: Usage, after: Usage, count: usize) -> Cost {
    let each = |before: Option<f64>, after: Option<f64>| Some((after? - before?) * 1000.0 / count as f64);
    Cost {
        service: each(before.service, after.service),
        postgres: each(before.postgres, after.postgres),
        generator: each(before.generator, after.generator),
    }
}

#[allow(clippy::cast_precision_loss, reason = "it is rounded anyway")]
fn rate(count: usize, elapsed: Duration) -> f64 {
    count as f64 / elapsed.as_secs_f64()
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
