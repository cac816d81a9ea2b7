//! Retries: automatic and manual ones, deferrals, default policies, and statistics.

mod automatic;
mod manual;
mod policies;
mod rate_limits;
