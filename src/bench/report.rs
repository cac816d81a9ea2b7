//! Formats the measurements as a table and as JSON. A figure may have a target, which is for a machine whose two cores
//! run everything, and knows whether more or less is better.

use std::fmt::Write;

use serde_json::{Value, json};

use super::load::Latencies;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FigureUnit {
    TasksPerSecond,
    RequestsPerSecond,
    Milliseconds,
    Megabytes,
    /// A multiple of something that the figure names.
    Times,
}

impl FigureUnit {
    fn more_is_better(self) -> bool {
        matches!(self, FigureUnit::TasksPerSecond | FigureUnit::RequestsPerSecond | FigureUnit::Times)
    }

    fn as_str(self) -> &'static str {
        match self {
            FigureUnit::TasksPerSecond => "tasks/s",
            FigureUnit::RequestsPerSecond => "requests/s",
            FigureUnit::Milliseconds => "ms",
            FigureUnit::Megabytes => "MB",
            FigureUnit::Times => "×",
        }
    }
}

/// One number measured by a workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// What the number is, unless the name of the workload says it.
    pub of: String,
    pub value: f64,
    pub unit: FigureUnit,
    pub target: Option<f64>,
    /// The maximum, where the value is a median.
    pub max: Option<f64>,
}

impl Figure {
    pub fn new(of: &str, value: f64, unit: FigureUnit) -> Figure {
        Figure { of: of.to_owned(), value, unit, target: None, max: None }
    }

    #[must_use]
    pub fn with_max(mut self, max: f64) -> Figure {
        self.max = Some(max);
        self
    }

    #[must_use]
    pub fn with_target(mut self, target: f64) -> Figure {
        self.target = Some(target);
        self
    }

    pub fn met(&self) -> Option<bool> {
        let better = |target| if self.unit.more_is_better() { self.value >= target } else { self.value <= target };
        self.target.map(better)
    }

    fn text(&self) -> String {
        let mut text = format!("{} {}", number(self.value), self.unit.as_str());
        if let Some(max) = self.max {
            let _ = write!(text, ", at most {}", number(max));
        }
        if !self.of.is_empty() {
            let _ = write!(text, " {}", self.of);
        }
        text
    }

    fn target_text(&self) -> String {
        let sign = if self.unit.more_is_better() { '≥' } else { '≤' };
        let mark = if self.met() == Some(true) { "yes" } else { "no" };
        self.target.map(|target| format!("{sign} {} {mark}", number(target))).unwrap_or_default()
    }

    fn json(&self) -> Value {
        json!({"of": self.of, "value": self.value, "unit": self.unit.as_str(), "max": self.max, "target": self.target,
            "met": self.met()})
    }
}

/// The result of PostgreSQL alone.
#[derive(Clone, Debug)]
pub struct ReferenceFigure {
    pub what: String,
    pub figure: Figure,
}

/// Seconds of processor time per 1,000 tasks or requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    pub service: Option<f64>,
    pub postgres: Option<f64>,
    pub generator: Option<f64>,
}

/// The result of a workload.
#[derive(Clone, Debug, Default)]
pub struct Measurement {
    pub workload: &'static str,
    /// Number of measured tasks or requests.
    pub count: usize,
    /// The main figure is the first.
    pub figures: Vec<Figure>,
    pub latencies: Latencies,
    pub cost: Cost,
    pub memory: Option<u64>,
    pub raw: Option<ReferenceFigure>,
    /// Why the workload was not measured.
    pub skipped: Option<String>,
    pub failed: Option<String>,
}

impl Measurement {
    pub fn failed(workload: &'static str, error: String) -> Measurement {
        Measurement { workload, failed: Some(error), ..Measurement::default() }
    }

    pub fn skipped(workload: &'static str, reason: &str) -> Measurement {
        Measurement { workload, skipped: Some(reason.to_owned()), ..Measurement::default() }
    }

    /// Returns the main figure divided by the result of PostgreSQL alone.
    pub fn ratio(&self) -> Option<f64> {
        let (own, raw) = (self.figures.first()?, &self.raw.as_ref()?.figure);
        Some(own.value / raw.value).filter(|ratio| ratio.is_finite())
    }

    fn quantile(&self, q: f64) -> Option<f64> {
        self.latencies.quantile(q).map(|latency| latency.as_secs_f64() * 1000.0)
    }

    fn cells(&self) -> Vec<[String; COLUMNS]> {
        let known = |value: Option<f64>| value.map_or_else(|| "n/a".to_owned(), number);
        let note = self.failed.as_ref().map(|error| format!("failed: {error}"));
        if let Some(note) = note.or_else(|| self.skipped.as_ref().map(|reason| format!("skipped: {reason}"))) {
            let mut cells = <[String; COLUMNS]>::default();
            cells[0].push_str(self.workload);
            cells[1] = note;
            return vec![cells];
        }
        let mut lines: Vec<[String; COLUMNS]> = self
            .figures
            .iter()
            .map(|figure| {
                let mut cells = <[String; COLUMNS]>::default();
                cells[1] = figure.text();
                cells[2] = figure.target_text();
                cells
            })
            .collect();
        let hidden = lines.len().saturating_sub(SHOWN);
        if hidden > 0 {
            lines.truncate(SHOWN);
            let mut cells = <[String; COLUMNS]>::default();
            cells[1] = format!("and {hidden} more");
            lines.push(cells);
        }
        if let Some(first) = lines.first_mut() {
            first[0].push_str(self.workload);
            for (cell, q) in first[3..6].iter_mut().zip([0.5, 0.99, 0.999]) {
                *cell = self.quantile(q).map(number).unwrap_or_default();
            }
            first[6] = known(self.cost.service);
            first[7] = known(self.cost.postgres);
            first[8] = known(self.cost.generator);
            first[9] = known(self.memory.map(megabytes));
            first[10] =
                self.raw.as_ref().map_or_else(|| "n/a".to_owned(), |raw| format!("{} {}", raw.figure.text(), raw.what));
            first[11] = self.ratio().map(number).unwrap_or_default();
        }
        lines
    }

    fn json(&self) -> Value {
        json!({
            "workload": self.workload,
            "count": self.count,
            "figures": self.figures.iter().map(Figure::json).collect::<Vec<_>>(),
            "latency_ms": {"p50": self.quantile(0.5), "p99": self.quantile(0.99), "p999": self.quantile(0.999),
                           "max": self.quantile(1.0), "samples": self.latencies.len()},
            "cpu_seconds_per_1000": {"service": self.cost.service, "postgres": self.cost.postgres,
                                     "generator": self.cost.generator},
            "service_rss_bytes": self.memory,
            "raw": self.raw.as_ref().map(|raw| json!({"what": raw.what, "value": raw.figure.value,
                                                      "unit": raw.figure.unit.as_str(), "ratio": self.ratio()})),
            "skipped": self.skipped,
            "failed": self.failed,
        })
    }
}

const COLUMNS: usize = 12;
/// Figures per workload in the table; the JSON has all of them.
const SHOWN: usize = 12;
const HEAD: [&str; COLUMNS] = [
    "workload",
    "result",
    "target",
    "p50 ms",
    "p99",
    "p99.9",
    "CPU s/1000",
    "postgres",
    "bench",
    "RSS MB",
    "PostgreSQL alone",
    "ratio",
];

/// Formats the measurements as a table.
pub fn table(outcomes: &[Measurement]) -> String {
    let mut lines = vec![HEAD.map(str::to_owned)];
    lines.extend(outcomes.iter().flat_map(Measurement::cells));
    // A note extends over the columns after it.
    let is_note = |line: &[String; COLUMNS]| line[2..].iter().all(String::is_empty) && line[1].contains(": ");
    let mut widths = [0; COLUMNS];
    for line in lines.iter().filter(|line| !is_note(line)) {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    widths[0] = lines.iter().map(|line| line[0].chars().count()).max().unwrap_or_default();
    let mut text = String::new();
    for line in &lines {
        let mut row = String::new();
        for (i, (cell, width)) in line.iter().zip(widths).enumerate() {
            // Numbers are aligned to the right.
            let _ = if (3..=9).contains(&i) || i == 11 {
                write!(row, "{cell:>width$}  ")
            } else {
                write!(row, "{cell:<width$}  ")
            };
        }
        let _ = writeln!(text, "{}", row.trim_end());
    }
    text
}

/// Returns the measurements as JSON.
pub fn document(run: &Value, machine: &Value, outcomes: &[Measurement]) -> Value {
    json!({"run": run, "machine": machine, "workloads": outcomes.iter().map(Measurement::json).collect::<Vec<_>>()})
}

#[allow(clippy::cast_precision_loss, reason = "it is rounded anyway")]
pub fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

/// Formats a number with three significant digits, or from 100 on as a whole number with separators.
fn number(value: f64) -> String {
    let decimals = match value.abs() {
        v if v >= 99.95 || v == 0.0 => 0,
        v if v >= 9.995 => 1,
        v if v >= 0.9995 => 2,
        _ => 3,
    };
    let text = format!("{value:.decimals$}");
    if decimals > 0 {
        return text;
    }
    let digits: Vec<char> = text.chars().collect();
    let mut grouped = String::new();
    for (i, digit) in digits.iter().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) && digits[i - 1] != '-' {
            grouped.push(',');
        }
        grouped.push(*digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_significant_digits_or_separators() {
        let cases = [
            (0.0, "0"),
            (0.012_34, "0.012"),
            (0.5, "0.500"),
            (1.0, "1.00"),
            (12.345, "12.3"),
            (99.96, "100"),
            (999.6, "1,000"),
            (1_234_567.0, "1,234,567"),
            (-1234.0, "-1,234"),
        ];
        for (value, text) in cases {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn rates_must_reach_their_target_and_times_must_not_exceed_it() {
        let rate = Figure::new("", 8000.0, FigureUnit::TasksPerSecond).with_target(8000.0);
        assert_eq!((rate.met(), rate.target_text().as_str()), (Some(true), "≥ 8,000 yes"));
        let delay = Figure::new("p50", 5.1, FigureUnit::Milliseconds).with_target(5.0);
        assert_eq!((delay.met(), delay.target_text().as_str()), (Some(false), "≤ 5.00 no"));
        assert_eq!(Figure::new("", 1.0, FigureUnit::Times).met(), None);
    }

    #[test]
    fn a_table_has_a_line_for_each_figure_and_for_each_note() {
        let outcome = Measurement {
            workload: "create-1",
            figures: vec![
                Figure::new("", 1000.0, FigureUnit::TasksPerSecond).with_target(8000.0),
                Figure::new("of raw", 0.5, FigureUnit::Times),
            ],
            raw: Some(ReferenceFigure {
                what: "inserts".into(),
                figure: Figure::new("", 2000.0, FigureUnit::TasksPerSecond),
            }),
            ..Measurement::default()
        };
        let text = table(&[
            outcome.clone(),
            Measurement::skipped("lists", "no database"),
            Measurement::failed("put", "x".into()),
        ]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5, "{text}");
        assert!(lines[1].contains("1,000 tasks/s") && lines[1].contains("≥ 8,000 no") && lines[1].ends_with("0.500"));
        assert!(lines[3].contains("skipped: no database") && lines[4].contains("failed: x"));
        assert_eq!(outcome.json()["raw"]["ratio"], 0.5);
    }
}
