//! The background work of the service. Each loop is a `tick` that does a bounded amount of work and returns when the
//! next one is due. One generic `runner` calls it.

pub mod audit;
pub mod deferred_counters;
pub mod deliver;
mod held_back;
pub mod liveness;
pub mod retention;
pub mod retry;
pub mod runner;
pub mod start;
pub mod supervisor;
pub mod timeout;
pub mod waiters;
pub mod wakeup;
