//! Reprise: a REST task service on PostgreSQL.
//!
//! The modules, from the outermost layer to the innermost. Calls go down only.

#![forbid(unsafe_code)]

/// API keys and their scopes.
pub mod access;
/// Settings from the environment and the command line.
pub mod config;
/// Writes to standard output.
pub mod output;
/// Logs and metrics.
pub mod telemetry;

/// Starts the service and shuts it down in the right order.
pub mod app;
/// `reprise bench`: measures throughput and latency.
pub mod bench;
/// `reprise doctor`: audits all counters and repairs them.
pub mod doctor;
/// Errors of the private PostgreSQL, with the settings to change.
pub mod postgres_errors;

/// The HTTP API: handlers, authentication, error answers.
pub mod http;
/// Background work: start, time out, retry, deliver, clean up.
pub mod loops;
/// The operations of the API, one function each.
pub mod service;
/// The client for webhook calls.
pub mod webhook;

/// The current time: the database's, or a test's.
pub mod clock;
/// Handles: the URLs that workers report to, and their tokens.
pub mod handle;
/// Statements and transactions: the only module with SQL.
pub mod store;
/// Hints about new work, within the process and between instances.
pub mod wake;

/// The rules of the service as plain values and functions.
pub mod domain;
