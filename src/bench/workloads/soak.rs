//! A constant load for half an hour, to see whether the service becomes slower and whether tables and indexes bloat. All
//! tasks stay in the table, so it grows as well. PostgreSQL alone is measured before each part, because machines become
//! slower, too.

use std::time::{Duration, Instant};

use super::end_to_end::run_tasks;
use super::{Bench, CLIENTS, cost, rate};
use crate::bench::environment::Target;
use crate::bench::load::Latencies;
use crate::bench::raw::reference::Reference;
use crate::bench::report::{Figure, FigureUnit, Measurement, megabytes};

/// Tasks per round of a part.
const ROUND: usize = 20_000;
/// Parts with their own figures.
const PARTS: u32 = 6;

pub async fn soak(bench: &Bench<'_>, target: &Target) -> Result<Measurement, String> {
    let Some(database) = &target.database else {
        return Ok(Measurement::skipped("", "needs DATABASE_URL to read the sizes of the tables"));
    };
    let part = Duration::from_secs(60 * bench.size(30, 3) as u64) / PARTS;
    let round = bench.size(ROUND, 5000);
    let (mut total, mut latencies, mut figures) = (0, Latencies::default(), Vec::new());
    let (mut rates, mut ratios) = (Vec::new(), Vec::new());
    let (before, started) = (target.usage(), Instant::now());
    for number in 1..=PARTS {
        let alone = bench.reference_rate(target, Reference::Update, CLIENTS, round, FigureUnit::TasksPerSecond).await?;
        let (mut count, mut busy) = (0, Duration::ZERO);
        while started.elapsed() < part * number {
            let done = run_tasks(target, bench.sink, round, &format!("part {number} of {PARTS}")).await?;
            count += done.count;
            busy += done.elapsed;
            latencies.extend(&done.latencies);
        }
        total += count;
        let table = database.task_table().await?;
        let minutes = (part * number).as_secs_f64() / 60.0;
        let of = |what: &str| format!("{what} after {minutes} min");
        let rate = rate(count, busy);
        rates.push(rate);
        figures.push(Figure::new(&of("in this part,"), rate, FigureUnit::TasksPerSecond));
        if let Some(alone) = alone {
            ratios.push(rate / alone.figure.value);
            figures.push(Figure::new(
                &of("of single-row updates just before,"),
                rate / alone.figure.value,
                FigureUnit::Times,
            ));
        }
        figures.push(Figure::new(&of("of the rows are dead"), table.dead / table.live.max(1.0), FigureUnit::Times));
        figures.push(Figure::new(&of("table"), megabytes(table.heap), FigureUnit::Megabytes));
        figures.push(Figure::new(&of("indexes of the loops"), megabytes(table.loops), FigureUnit::Megabytes));
        figures.push(Figure::new(&of("key"), megabytes(table.key), FigureUnit::Megabytes));
    }
    // First of all, whether the service has become slower, and slower than the machine has.
    for (position, (what, values)) in [("tasks/s", rates), ("ratio", ratios)].into_iter().enumerate() {
        if let [first, .., last] = values.as_slice() {
            let of = format!("of the first part's {what} in the last");
            figures.insert(position, Figure::new(&of, last / first, FigureUnit::Times));
        }
    }
    let cost = cost(before, target.usage(), total);
    Ok(Measurement { count: total, figures, latencies, cost, ..Measurement::default() })
}
