//! The HTTP API: requests and their errors, access, limits, and requests that are repeated.

mod action_visibility;
mod authentication;
mod body_limits;
mod deduplication;
mod errors;
mod hosts;
mod idempotency;
mod requests;
mod waiting;
