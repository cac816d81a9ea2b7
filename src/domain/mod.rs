//! The rules of the service as plain values and functions. Nothing in here may know a database, a network,
//! a clock or a random number: what they say comes in as arguments, so every rule can be tested as a table.

pub mod dead_end;
pub mod dedupe;
pub mod failure;
pub mod graph;
pub mod input;
pub mod json;
pub mod lifecycle;
pub mod matcher;
pub mod new_action;
pub mod new_policy;
pub mod new_task;
pub mod patch;
pub mod policy;
pub mod retry;
pub mod retry_view;
pub mod rules;
#[cfg(test)]
mod sample;
pub mod status;
pub mod task;
pub mod view;
pub mod webhook;
