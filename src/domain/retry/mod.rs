//! Whether, when and why a failed task is retried.

pub mod failure;
mod judge;
pub mod policy;

pub use judge::*;
