//! Tests of the whole service against a real PostgreSQL: one file per behaviour.

mod api;
mod books;
mod concurrency;
mod deliveries;
mod door;
mod fairness;
mod faults;
mod graph;
mod guard;
mod history;
mod idempotency;
mod layers;
mod lifecycle;
mod manual;
mod model;
mod operations;
mod plans;
mod policies;
mod rate_limits;
mod retention;
mod retry;
mod rules;
mod setup;
mod start;
mod sums;
mod support;
