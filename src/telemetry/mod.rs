//! Logs and metrics. Both are global to the process and set up once.

pub mod log_limit;

use std::sync::OnceLock;
use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{DefaultFields, Writer};

use crate::config::{LogFormat, LogSettings};

/// Buckets of histograms, from a fast local answer to the default timeout of a webhook.
const SECONDS: [f64; 13] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Sets up logs on standard error. Standard output is for the output of commands.
pub fn logs(log: &LogSettings) {
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
        eprintln!("cannot set up logs: {error}");
    }
}

/// Escapes control characters in text logs, so that an event is one line and no value controls a terminal. The library
/// itself escapes only some of them, and only in messages.
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

/// Returns the metrics of this process. The first call sets them up.
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
                tracing::error!("another metrics recorder is already installed");
            }
            describe();
            handle
        })
        .clone()
}

/// Aggregates the samples of histograms every five seconds. Otherwise they would keep every sample until the next
/// scrape.
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
    counter!("reprise_transitions_total", "Status changes, by from and to");
    counter!("task_retry_total", "Retries scheduled, by trigger and number of the retry");
    counter!("task_retry_succeeded_total", "Tasks that succeeded after a retry");
    counter!("task_retry_final_total", "Failures that a retry policy excludes from retries");
    counter!("task_retry_deferred_total", "Deferrals: the receiver or worker said when to try again");
    counter!("task_retry_manual_total", "Tasks retried manually, or revived by a manual retry");
    counter!("task_retry_exhausted_total", "Tasks that failed because their retries were used up");
    counter!("reprise_task_timeouts_total", "Runs ended because no heartbeat arrived in time");
    counter!("reprise_webhook_calls_total", "Webhook calls, by trigger and outcome");
    counter!("reprise_webhook_exhausted_total", "Notifications that failed on their last attempt");
    histogram!("reprise_webhook_duration_seconds", "Duration of webhook calls, by trigger and outcome");
    counter!("reprise_loop_ticks_total", "Ticks of the loops, by loop and outcome");
    counter!("reprise_loop_processed_total", "Tasks and rows processed by the loops, by loop");
    histogram!("reprise_loop_tick_duration_seconds", "Duration of the ticks of the loops, by loop");
    gauge!("reprise_loop_lag_seconds", "Delay of the most overdue work, by loop");
    gauge!("reprise_queue_age_seconds", "Time that the task at the head of the queue has been in it");
    gauge!("reprise_counter_differences", "Counters that differ from the rows they count, by counter");
    gauge!("reprise_tasks", "Tasks by status");
    gauge!("reprise_blocked_groups", "Groups of tasks blocked by the same rule and values");
    gauge!("reprise_outbox_depth", "Notifications still to be delivered");
    gauge!("reprise_outbox_oldest_age_seconds", "Age of the oldest notification still to be delivered");
    gauge!("reprise_pool_connections", "Database connections for requests, by state: used or idle");
    gauge!("reprise_waiting_requests", "Requests that wait for a task or a batch");
    histogram!("reprise_http_request_duration_seconds", "Duration of HTTP requests, by method, path and status");
    histogram!(
        "reprise_http_wait_duration_seconds",
        "Duration of HTTP requests with wait_secs, by method, path and status"
    );
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
    fn values_cannot_end_a_line_of_the_text_log() {
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
        let log = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        assert!(log.ends_with('\n') && log.contains("said a\\nb") && log.contains("display=a\\nb"), "{log}");
        assert_eq!(log.trim_end_matches('\n').chars().filter(|c| c.is_control()).count(), 0, "{log:?}");
        assert!(log.contains('é'), "{log}");
    }
}
