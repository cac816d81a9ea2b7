//! Admission: which pending task starts next, beyond its priority. Matchers and slots count what executes, for the
//! rules; fairness gives turns to keys. The domain judges; this folder only keeps the rows that it judges by.

pub mod fairness;
pub mod matchers;
pub mod slots;

/// A slot by what it counts: the id of a matcher and the values of its fields. The slot may have no row yet.
pub(in crate::store) type MatcherKey = (i32, String);
