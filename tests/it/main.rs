//! Tests of the whole service against a real PostgreSQL: one file per behaviour.

mod api;
mod concurrency;
mod deliveries;
mod faults;
mod graph;
mod layers;
mod lifecycle;
mod model;
mod operations;
mod plans;
mod retention;
mod retry;
mod setup;
mod start;
mod support;
