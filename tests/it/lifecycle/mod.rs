//! The life of a task: its states, its dependencies, its start, and the record of it.

mod concurrency;
mod dead_ends;
mod dependencies;
mod history;
mod model;
mod on_start;
mod tasks;
