//! Logs and metrics. Both are global to the process, so both are set up once.

pub mod log_limit;

use std::sync::OnceLock;
use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{DefaultFields, Writer};

use crate::config::{Log, LogFormat};

/// From a fast local answer to the longest time a webhook may take.
const SECONDS: [f64; 13] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Logs go to standard error: standard output belongs to what was asked for.
pub fn logs(log: &Log) {
    let filter = EnvFilter::new(&log.rust_log.0);
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    let set = match log.log_format {
        LogFormat::Text => {
            let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr());
            builder.with_ansi(ansi).fmt_fields(OneLine).try_init()
        }
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    if let Err(error) = set {
        eprintln!("logs are already set up: {error}");
    }
}

/// Fields of text logs without control characters: an event stays one line, and nobody's text steers a terminal. By itself
/// the library escapes some of them, in messages only.
#[derive(Clone, Copy, Debug, Default)]
struct OneLine;

impl<'writer> FormatFields<'writer> for OneLine {
    fn format_fields<R: RecordFields>(&self, mut writer: Writer<'writer>, fields: R) -> std::fmt::Result {
        DefaultFields::new().format_fields(Writer::new(&mut Escaped(&mut writer)), fields)
    }
}

struct Escaped<'a, 'writer>(&'a mut Writer<'writer>);

impl std::fmt::Write for Escaped<'_, '_> {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        for part in text.split_inclusive(|c: char| c.is_control()) {
            match part.chars().next_back().filter(|c| c.is_control()) {
                Some(last) => write!(self.0, "{}{}", &part[..part.len() - last.len_utf8()], last.escape_default())?,
                None => self.0.write_str(part)?,
            }
        }
        Ok(())
    }
}

/// The metrics of this process. Whoever asks first sets them up.
pub fn metrics() -> PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    HANDLE
        .get_or_init(|| {
            let builder = PrometheusBuilder::new();
            let builder = match builder.set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &SECONDS) {
                Ok(builder) => builder,
                Err(_) => PrometheusBuilder::new(),
            };
            let recorder = builder.build_recorder();
            let handle = recorder.handle();
            if metrics::set_global_recorder(recorder).is_err() {
                tracing::error!("another metrics recorder is installed");
            }
            describe();
            handle
        })
        .clone()
}

/// Histograms keep every sample until somebody looks; where nobody scrapes, this does.
pub async fn upkeep(shutdown: CancellationToken) {
    let handle = metrics();
    loop {
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(5)) => handle.run_upkeep(),
            () = shutdown.cancelled() => return,
        }
    }
}

fn describe() {
    use metrics::{describe_counter as counter, describe_gauge as gauge, describe_histogram as histogram};
    counter!("reprise_tasks_created_total", "Tasks created");
    counter!("reprise_transitions_total", "Changes of status, by from and to");
    counter!("task_retry_total", "Retries scheduled, by trigger and number of the retry");
    counter!("task_retry_succeeded_total", "Tasks that succeeded after a retry");
    counter!("task_retry_final_total", "Failures that a policy did not want retried");
    counter!("task_retry_deferred_total", "Deferrals: the other side said when to come back");
    counter!("task_retry_manual_total", "Tasks retried or revived by hand");
    counter!("task_retry_exhausted_total", "Tasks that failed because their retries were used up");
    counter!("reprise_task_timeouts_total", "Runs that ended without a sign of life in time");
    counter!("reprise_webhook_calls_total", "Outgoing calls, by trigger and outcome");
    counter!("reprise_webhook_exhausted_total", "Notifications given up after their last attempt");
    histogram!("reprise_webhook_duration_seconds", "Duration of outgoing calls, by trigger and outcome");
    counter!("reprise_loop_ticks_total", "Ticks of the loops, by loop and outcome");
    counter!("reprise_loop_processed_total", "What the loops processed");
    histogram!("reprise_loop_tick_duration_seconds", "Duration of the loops' ticks");
    gauge!("reprise_loop_lag_seconds", "How overdue the most overdue work of a loop is");
    gauge!("reprise_queue_age_seconds", "For how long the task at the head of the queue has been in it");
    gauge!("reprise_book_differences", "Counters that differ from the rows they count, by book");
    gauge!("reprise_tasks", "Tasks by status");
    gauge!("reprise_blocked_groups", "Combinations of rules and values that block tasks");
    gauge!("reprise_outbox_depth", "Notifications still to be delivered");
    gauge!("reprise_outbox_oldest_age_seconds", "Age of the oldest of them");
    gauge!("reprise_pool_connections", "Database connections, used and idle");
    histogram!("reprise_http_request_duration_seconds", "Duration of requests, by method, path and status");
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn nobody_ends_a_line_of_the_text_log() {
        let lines = Lines::default();
        let writer = lines.clone();
        let logs =
            tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).fmt_fields(OneLine).finish();
        let text = "a\nb\r\x1b[31mc\u{9b}d\0é";
        tracing::subscriber::with_default(logs, || {
            let span = tracing::info_span!("call", shown = %text, later = tracing::field::Empty);
            span.record("later", text);
            let error = std::io::Error::other(text);
            span.in_scope(|| tracing::warn!(display = %text, debug = ?text, str = text, %error, "said {text}"));
        });
        let said = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        assert!(said.ends_with('\n') && said.contains("said a\\nb") && said.contains("display=a\\nb"), "{said}");
        assert_eq!(said.trim_end_matches('\n').chars().filter(|c| c.is_control()).count(), 0, "{said:?}");
        assert!(said.contains('é'), "{said}");
    }
}
