//! Tasks: the statements that create, lock, move, keep alive and read them. After a task is created, only `transitions`
//! writes its status.

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
