//! What operators do: set up, upgrade, monitor, and audit the counters.

mod configuration;
mod counter_audit;
mod monitoring;
mod setup;
mod upgrades;
