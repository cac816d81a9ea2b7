//! What the service does by itself. Each loop is a `tick` that does a bounded amount of work and says when it
//! wants to be called again; one generic runner calls it.

pub mod audit;
pub mod counters;
pub mod deliver;
mod held_back;
pub mod liveness;
pub mod retention;
pub mod retry;
pub mod runner;
pub mod start;
pub mod supervisor;
pub mod timeout;
pub mod wakeup;
