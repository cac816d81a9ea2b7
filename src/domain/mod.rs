//! The rules of the service as plain values and functions. Code here uses no database, network, clock or random
//! numbers: callers pass such values in as arguments, so every rule can be tested as a table.

/// Deduplication: which tasks of a request are new.
pub mod dedupe;
/// Dependencies: how the end or the retry of a task changes its children and parents.
pub mod graph;
/// JSON that is kept as text, and its size.
pub mod json;
/// The metadata fields that rules and deduplication compare.
pub mod matcher;
/// Readers of requests: from JSON to values that obey every limit.
pub mod request;
/// Retry policies, failures, and the decision whether to retry.
pub mod retry;
/// Concurrency and capacity rules: which tasks may start.
pub mod rules;
#[cfg(test)]
pub(crate) mod sample;
/// A task, its statuses and its state machine.
pub mod task;
/// The shapes of API answers.
pub mod view;
/// Actions, and the webhook calls made from them.
pub mod webhook;
