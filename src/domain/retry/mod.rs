//! Retries: policies, failures, and the decision whether and when to retry.

pub mod failure;
mod judge;
pub mod policy;

pub use judge::*;
