//! PostgreSQL alone, as the reference of a workload: the same kind of work without the service.

use super::{Bench, millis, rate};
use crate::bench::environment::Target;
use crate::bench::load::Measured;
use crate::bench::progress::Progress;
use crate::bench::raw::limits::{self, Limit};
use crate::bench::report::{Figure, Raw, Unit};

impl Bench<'_> {
    /// What PostgreSQL does by itself, at the same concurrency.
    async fn limit(
        &self,
        target: &Target,
        limit: Limit,
        connections: usize,
        count: usize,
    ) -> Result<Option<Measured>, String> {
        let Some(database) = &target.database else { return Ok(None) };
        let progress = Progress::start(&format!("PostgreSQL alone: {}", limit.describe()), count);
        limits::measure(database, limit, connections, count, &progress).await.map(Some)
    }

    /// The same as a rate.
    pub async fn limit_rate(
        &self,
        target: &Target,
        limit: Limit,
        connections: usize,
        count: usize,
        unit: Unit,
    ) -> Result<Option<Raw>, String> {
        let measured = self.limit(target, limit, connections, count).await?;
        Ok(measured.map(|measured| Raw {
            what: limit.describe(),
            figure: Figure::new("", rate(count, measured.elapsed), unit),
        }))
    }

    /// The same as the time that one takes when nothing else goes on.
    pub async fn limit_time(&self, target: &Target, limit: Limit, count: usize) -> Result<Option<Raw>, String> {
        let measured = self.limit(target, limit, 1, count).await?;
        Ok(measured.and_then(|measured| {
            let figure = Figure::new("", millis(measured.latencies.quantile(0.5)?), Unit::Milliseconds);
            Some(Raw { what: limit.describe(), figure })
        }))
    }
}
