//! The history of tasks: events and attempts as rows, statistics and totals as counters, and the audit that compares
//! counters with rows. Nothing here moves a task, except the repair of a wrong wait count.

pub mod attempts;
pub mod audit;
pub mod events;
pub mod retry_stats;
pub mod status_counts;
