//! Retries: policies, failures, and the decision whether and when to retry.

pub mod failure;
mod failure_type;
mod judge;
pub mod policy;

pub use judge::*;
