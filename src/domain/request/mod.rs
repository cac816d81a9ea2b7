//! Requests, from JSON to values that obey every limit. `input` declares a field once: its struct, its reader and its
//! schema. Readers return either a value or all problems at once, each with the path of its field.

pub mod fields;
pub mod input;
mod limits;
pub mod new_action;
pub mod new_batch;
pub mod new_matcher;
pub mod new_policy;
pub mod new_rule;
pub mod new_task;
pub mod patch;
pub mod problems;
pub mod reading;
pub mod values;

use serde_json::Map;

use input::{Input, Schemas};

pub use limits::{RequestLimits, limit};

/// Returns the schemas of all request bodies and of everything in them, by name.
pub fn schemas() -> Schemas {
    let mut schemas = Map::new();
    new_batch::CreateTasks::define(&mut schemas);
    new_policy::PolicyInput::define(&mut schemas);
    new_rule::RulesInput::define(&mut schemas);
    patch::PatchInput::define(&mut schemas);
    patch::HeartbeatInput::define(&mut schemas);
    patch::ManualRetryInput::define(&mut schemas);
    schemas
}
