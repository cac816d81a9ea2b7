//! Tests of the whole service against a real PostgreSQL: one folder per area, one file per behaviour.

mod api;
mod batches;
mod faults;
mod layers;
mod lifecycle;
mod operations;
mod performance;
mod retry;
mod rules;
mod support;
mod webhooks;
