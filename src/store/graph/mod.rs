//! Walks along dependencies: up to dead ends and down from manual retries, with the locks that they need, and the graph
//! of a batch as the API shows it. The domain decides what the walks lead to.

pub mod dag;
pub mod dead_ends;
pub(super) mod propagate;
pub mod revive;
