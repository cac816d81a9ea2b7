//! The rules of the service as plain values and functions. Nothing in here may know a database, a network, a clock or
//! a random number: what they say comes in as arguments, so every rule can be tested as a table.

/// Concurrency and capacity rules: which tasks may start.
pub mod admission;
/// Deduplication: which tasks of a request are new.
pub mod dedupe;
/// Dependencies: what the end or the return of a task does to its children and parents.
pub mod graph;
/// JSON that stays text, and its size.
pub mod json;
/// The metadata fields that rules and deduplication compare.
pub mod matcher;
/// Requests: from JSON to values that obey every limit.
pub mod request;
/// Retry policies, failures, and the decision whether to retry.
pub mod retry;
#[cfg(test)]
mod sample;
/// A task, its statuses and its state machine.
pub mod task;
/// The shapes of answers.
pub mod view;
/// Actions and the calls they become.
pub mod webhook;
