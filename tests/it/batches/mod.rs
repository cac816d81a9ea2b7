//! Batches: their counters, and their deletion once they are old.

mod batch_counters;
mod retention;
