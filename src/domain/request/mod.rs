//! Readers of requests. Each reader takes JSON and returns either a value that obeys every limit or all problems at
//! once, each with the path of its field.

pub mod fields;
pub mod new_action;
pub mod new_policy;
pub mod new_task;
pub mod patch;
pub mod problems;
pub mod shapes;
