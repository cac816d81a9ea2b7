//! The reference of a workload: PostgreSQL alone with the same kind of work.

use super::{Bench, millis, rate};
use crate::bench::environment::Target;
use crate::bench::load::Measured;
use crate::bench::progress::Progress;
use crate::bench::raw::reference::{self, Reference};
use crate::bench::report::{Figure, FigureUnit, ReferenceFigure};

impl Bench<'_> {
    /// Measures PostgreSQL alone, or returns `None` if the database is not known.
    async fn measure_reference(
        &self,
        target: &Target,
        kind: Reference,
        connections: usize,
        count: usize,
    ) -> Result<Option<Measured>, String> {
        let Some(database) = &target.database else { return Ok(None) };
        let progress = Progress::start(&format!("PostgreSQL alone: {}", kind.describe()), count);
        reference::measure(database, kind, connections, count, &progress).await.map(Some)
    }

    /// Measures the rate of PostgreSQL alone at the concurrency of the workload.
    pub async fn reference_rate(
        &self,
        target: &Target,
        kind: Reference,
        connections: usize,
        count: usize,
        unit: FigureUnit,
    ) -> Result<Option<ReferenceFigure>, String> {
        let measured = self.measure_reference(target, kind, connections, count).await?;
        Ok(measured.map(|measured| ReferenceFigure {
            what: kind.describe(),
            figure: Figure::new("", rate(count, measured.elapsed), unit),
        }))
    }

    /// Measures the median time of one transaction on one connection of an idle PostgreSQL.
    pub async fn reference_time(
        &self,
        target: &Target,
        kind: Reference,
        count: usize,
    ) -> Result<Option<ReferenceFigure>, String> {
        let measured = self.measure_reference(target, kind, 1, count).await?;
        Ok(measured.and_then(|measured| {
            let figure = Figure::new("", millis(measured.latencies.quantile(0.5)?), FigureUnit::Milliseconds);
            Some(ReferenceFigure { what: kind.describe(), figure })
        }))
    }
}
