//! Calls to other people's servers. Nobody may hold a database connection while one is under way.

mod client;

pub use client::{Answer, Call, CallError, Client};
