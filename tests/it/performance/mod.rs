//! Costs that stay bounded: query plans, memory, and the benchmark that measures the rest.

mod bench;
mod bounds;
mod query_plans;
