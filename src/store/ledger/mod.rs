//! The record of what happened: events and attempts as rows, statistics and totals as counters, and the audit that
//! compares counters with rows.

pub mod attempts;
pub mod audit;
pub mod events;
pub mod retry_stats;
pub mod status_counts;
