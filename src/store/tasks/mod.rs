//! Tasks: how they are created, locked, moved from status to status, kept alive and read.

pub mod create;
mod dedupe;
pub mod details;
pub mod heartbeat;
pub(super) mod ids;
pub mod lease;
pub mod list;
pub mod lock;
pub(super) mod row;
pub mod transitions;
