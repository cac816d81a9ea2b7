//! Walks along dependencies that need locks: up from dead ends, down from manual retries.

pub mod dag;
pub mod dead_ends;
pub mod revive;
