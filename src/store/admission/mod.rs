//! What decides which pending task starts next, beyond its priority: rules and turns.

pub mod fairness;
pub mod matchers;
pub mod slots;
