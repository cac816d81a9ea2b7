//! Which part of a list is wanted.

/// A page of a list, by offset or after a key.
#[derive(Clone, Copy, Debug)]
pub enum Page<Key> {
    /// Skip this many.
    Offset(i64),
    /// Go on after this one.
    After(Key),
}
