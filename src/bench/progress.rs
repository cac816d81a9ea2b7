//! Shows progress on standard error: a bar if it is a terminal, otherwise one line per step. Standard output is for the
//! results.

use std::io::{IsTerminal, Write, stderr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::AbortHandle;

const WIDTH: u64 = 30;
const REDRAWN_EVERY: Duration = Duration::from_millis(100);

/// The progress of one step. Clones count for the same step.
#[derive(Clone, Debug)]
pub struct Progress {
    done: Arc<AtomicU64>,
    drawing: Option<Arc<Drawing>>,
}

/// The task that draws the bar. Dropping it stops the task and clears the line.
#[derive(Debug)]
struct Drawing(AbortHandle);

impl Drop for Drawing {
    fn drop(&mut self) {
        self.0.abort();
        let _ = write!(stderr(), "\r\x1b[K");
    }
}

impl Progress {
    pub fn start(what: &str, total: usize) -> Progress {
        let done = Arc::new(AtomicU64::new(0));
        if !stderr().is_terminal() {
            let _ = writeln!(stderr(), "{what}");
            return Progress { done, drawing: None };
        }
        let (what, total, count) = (what.to_owned(), total.max(1) as u64, Arc::clone(&done));
        let drawing = tokio::spawn(async move {
            loop {
                let _ = write!(stderr(), "\r\x1b[K{}", bar(&what, count.load(Ordering::Relaxed), total));
                tokio::time::sleep(REDRAWN_EVERY).await;
            }
        });
        Progress { done, drawing: Some(Arc::new(Drawing(drawing.abort_handle()))) }
    }

    /// A progress that is not shown, for short steps.
    pub fn hidden() -> Progress {
        Progress { done: Arc::default(), drawing: None }
    }

    pub fn step(&self) {
        self.add(1);
    }

    pub fn add(&self, count: u64) {
        if self.drawing.is_some() {
            self.done.fetch_add(count, Ordering::Relaxed);
        }
    }
}

fn bar(what: &str, done: u64, total: u64) -> String {
    let filled = usize::try_from((done * WIDTH / total).min(WIDTH)).unwrap_or_default();
    let width = usize::try_from(WIDTH).unwrap_or_default();
    format!("[{:<width$}] {:>3} %  {what}", "#".repeat(filled), (done * 100 / total).min(100))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_never_exceeds_100_percent() {
        assert_eq!(bar("x", 0, 4), format!("[{}]   0 %  x", " ".repeat(30)));
        assert_eq!(bar("x", 2, 4), format!("[{}{}]  50 %  x", "#".repeat(15), " ".repeat(15)));
        assert_eq!(bar("x", 9, 4), format!("[{}] 100 %  x", "#".repeat(30)));
    }
}
