//! The position of a page in a list. It knows nothing of what the list holds.

/// The start of a page.
#[derive(Clone, Copy, Debug)]
pub enum Page<Key> {
    /// Skips this many rows.
    Offset(i64),
    /// Continues after the row with this key.
    After(Key),
}
