//! Reprise: a REST task service on PostgreSQL. This is the map of the house, from the roof down; calls go down only.

#![forbid(unsafe_code)]

/// Who may use the API: keys and their scopes.
pub mod access;
/// Settings from the environment and the command line.
pub mod config;
/// What is printed.
pub mod output;
/// Logs and metrics.
pub mod telemetry;

/// The whole service, put together and taken apart in the right order.
pub mod app;
/// Measures how fast it is.
pub mod bench;
/// Errors of the private PostgreSQL, with the settings to change.
pub mod database;
/// Counts the books anew and mends them.
pub mod doctor;

/// The edge: HTTP in, problems out.
pub mod http;
/// What the service does by itself: start, time out, retry, deliver, clean up.
pub mod loops;
/// One function per verb of the API.
pub mod service;
/// Outgoing calls.
pub mod webhook;

/// The database is the clock; tests bring their own.
pub mod clock;
/// Handles: where workers report, and the tokens that let them.
pub mod handle;
/// The only place with SQL.
pub mod store;
/// Hints that there is new work, inside the process and between instances.
pub mod wake;

/// The rules as plain values and functions.
pub mod domain;
