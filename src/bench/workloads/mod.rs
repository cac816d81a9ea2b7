//! The workloads: what each one does, how large it is, and what it is compared with. Each has a service and tables of its
//! own, so that none pays for another.

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
use super::report::{Cost, Figure, Measurement, Unit, megabytes};
use super::sink::Sink;
use super::wire;
use requests::{calling, cancel, failure, locked, tasks};

pub use workload::{WORKLOADS, Workload};

/// Longer than anything takes that ends at all.
const PATIENCE: Duration = Duration::from_secs(600);
/// Tasks in a request, where the request is not what is measured.
const BULK: usize = 1000;
const BULK_CLIENTS: usize = 4;
/// Clients that send single tasks or reports.
const CLIENTS: usize = 64;

pub struct Bench<'a> {
    pub environment: &'a Environment,
    pub sink: &'a Sink,
    pub quick: bool,
    pub scale: f64,
    pub filled: Option<usize>,
}

impl Bench<'_> {
    /// All of them, or those before the shutdown.
    pub async fn run(&self, wanted: &[Workload], shutdown: &CancellationToken) -> Vec<Measurement> {
        let (mut outcomes, mut filled): (Vec<Measurement>, _) = (Vec::new(), None);
        for workload in wanted {
            let measuring = async {
                match workload {
                    Workload::Memory => self.memory(&outcomes).await,
                    workload => self.one(*workload, &mut filled).await,
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
            // What is left of it goes with the environment.
            let _ = self.environment.tear_down(target).await;
        }
        outcomes
    }

    /// After a workload that was broken off. Services of our own go with the environment.
    async fn clean_up(&self) {
        if self.environment.is_own() {
            return;
        }
        let cleaned = async { cancel(&self.environment.target().await?).await };
        if let Err(error) = cleaned.await {
            tracing::warn!(%error, "not all tasks of the benchmark were canceled");
        }
    }

    /// Known already if that workload has been run.
    async fn memory(&self, outcomes: &[Measurement]) -> Result<Measurement, String> {
        let (name, after) = (Workload::Memory.name(), Workload::E2e50k);
        if !self.environment.is_own() {
            return Ok(Measurement::skipped(name, "only with a service of its own, without --url"));
        }
        let earlier = outcomes.iter().find(|outcome| outcome.workload == after.name() && outcome.failed.is_none());
        let outcome = match earlier {
            Some(outcome) => outcome.clone(),
            None => self.one(after, &mut None).await?,
        };
        let Some(bytes) = outcome.memory else { return Ok(Measurement::skipped(name, "there is no /proc")) };
        let mut figures = vec![Figure::new("", megabytes(bytes), Unit::Megabytes).reach(80.0)];
        let (count, memory) = (outcome.count, outcome.memory);
        self.sink.clear().await;
        let target = self.environment.target().await?;
        let large = Box::pin(large::large(self, &target)).await;
        self.environment.tear_down(target).await?;
        figures.extend(large?);
        Ok(Measurement { workload: name, count, figures, memory, ..Measurement::default() })
    }

    /// `filled` has the many finished tasks, once a workload has wanted them.
    async fn one(&self, workload: Workload, filled: &mut Option<Target>) -> Result<Measurement, String> {
        self.sink.clear().await;
        let is_own = self.environment.is_own();
        if workload.needs_own() && !is_own {
            return Ok(Measurement::skipped(workload.name(), "only with a service of its own, without --url"));
        }
        if workload.wants_filled() && is_own && filled.is_none() {
            *filled = Some(self.filled_stage().await?);
        }
        let target = self.environment.target().await?;
        let outcome = async {
            if workload.is_called() {
                self.reached(&target).await?;
            }
            self.perform(workload, &target, filled.as_ref().unwrap_or(&target)).await
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

    /// A service that cannot call this program would be waited for in vain.
    async fn reached(&self, target: &Target) -> Result<(), String> {
        let (status, body) =
            load::once(&target.peer, "POST", "/task", tasks(1, &calling(self.sink)).as_bytes()).await?;
        let (Some(id), 201) = (wire::first_uuid(&body, "id"), status) else {
            return Err(format!("POST /task: {status} {}", String::from_utf8_lossy(&body)));
        };
        locked(&target.made).extend(wire::first_uuid(&body, "batch_id"));
        tokio::select! {
            worked = self.sink.next() => worked.map(drop),
            why = failure(&target.peer, id) => {
                let url = &self.sink.url;
                Err(format!("the service cannot call {url}, see --sink and WEBHOOK_ALLOW: {}", why?))
            }
        }
    }

    async fn filled_stage(&self) -> Result<Target, String> {
        let target = self.environment.target().await?;
        if let Some(database) = &target.database {
            let count = self.filled.unwrap_or_else(|| self.size(5_000_000, 200_000));
            fill::finished(database, count).await?;
        }
        Ok(target)
    }

    async fn perform(&self, workload: Workload, target: &Target, filled: &Target) -> Result<Measurement, String> {
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
            Workload::Memory => Err("is no workload of its own".into()),
            Workload::Soak => soak::soak(self, target).await,
        }
    }

    /// How much of something: as the table of targets has it, less of it in a quick run, at least one.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a size")]
    fn size(&self, full: usize, quick: usize) -> usize {
        let size = if self.quick { quick } else { full };
        ((size as f64 * self.scale).ceil() as usize).max(1)
    }
}

/// Processor time between two moments, for 1,000 of `count`.
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
