//! Propagation through dependencies: how the end or the manual retry of tasks changes the tasks that depend on them,
//! for any number of tasks at once.

pub mod dead_end;
mod propagate;
mod revive;

use uuid::Uuid;

pub use propagate::propagate;
pub use revive::{NoRevival, Revival, revive};

/// A dependency. A child is always created after its parents, so there are no cycles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    pub parent: Uuid,
    pub child: Uuid,
    pub requires_success: bool,
}

#[cfg(test)]
mod tests;
