//! What decides which pending task starts next, beyond its priority: rules and turns.

pub mod fairness;
pub mod matchers;
pub mod slots;

/// A slot by what it counts, whether it has a row already or not.
pub(in crate::store) type MatcherKey = (i32, String);
