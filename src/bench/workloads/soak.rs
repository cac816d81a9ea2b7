//! The same load for half an hour: does it become slower, and do tables and indexes hold more than what is in them? All
//! tasks stay in the table, so it grows as well. Before each part PostgreSQL is measured by itself: machines become slower, too.

use std::time::{Duration, Instant};

use super::end_to_end::through;
use super::{Bench, CLIENTS, cost, rate};
use crate::bench::environment::Target;
use crate::bench::load::Latencies;
use crate::bench::raw::limits::Limit;
use crate::bench::report::{Figure, Measurement, Unit, megabytes};

/// Tasks that are sent through together, again and again.
const ROUND: usize = 20_000;
/// Parts that are told apart.
const PARTS: u32 = 6;

pub async fn soak(bench: &Bench<'_>, target: &Target) -> Result<Measurement, String> {
    let Some(database) = &target.database else {
        return Ok(Measurement::skipped("", "only with DATABASE_URL, to look into its tables"));
    };
    let part = Duration::from_secs(60 * bench.size(30, 3) as u64) / PARTS;
    let round = bench.size(ROUND, 5000);
    let (mut total, mut latencies, mut figures) = (0, Latencies::default(), Vec::new());
    let (mut rates, mut ratios) = (Vec::new(), Vec::new());
    let (before, started) = (target.usage(), Instant::now());
    for number in 1..=PARTS {
        let alone = bench.limit_rate(target, Limit::Update, CLIENTS, round, Unit::TasksPerSecond).await?;
        let (mut count, mut busy) = (0, Duration::ZERO);
        while started.elapsed() < part * number {
            let done = through(target, bench.sink, round, &format!("part {number} of {PARTS}")).await?;
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
        figures.push(Figure::new(&of("in this part,"), rate, Unit::TasksPerSecond));
        if let Some(alone) = alone {
            ratios.push(rate / alone.figure.value);
            figures.push(Figure::new(
                &of("of single-row updates just before,"),
                rate / alone.figure.value,
                Unit::Times,
            ));
        }
        figures.push(Figure::new(&of("of the rows are dead"), table.dead / table.live.max(1.0), Unit::Times));
        figures.push(Figure::new(&of("table"), megabytes(table.heap), Unit::Megabytes));
        figures.push(Figure::new(&of("indexes of the loops"), megabytes(table.loops), Unit::Megabytes));
        figures.push(Figure::new(&of("key"), megabytes(table.key), Unit::Megabytes));
    }
    // First whether it has become slower, and slower than the machine has.
    for (place, (what, values)) in [("tasks/s", rates), ("ratio", ratios)].into_iter().enumerate() {
        if let [first, .., last] = values.as_slice() {
            let of = format!("of the first part's {what} in the last");
            figures.insert(place, Figure::new(&of, last / first, Unit::Times));
        }
    }
    let cost = cost(before, target.usage(), total);
    Ok(Measurement { count: total, figures, latencies, cost, ..Measurement::default() })
}
