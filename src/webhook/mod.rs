//! Outgoing calls to webhooks. Callers must not hold a database connection while a call is in progress.

mod address;
mod client;
mod guard;
mod host_permits;
mod sign;

pub use client::{Answer, Call, CallError, Client, ClientSettings};
pub use guard::{Allow, Guard};
pub use host_permits::HostPermit;
pub use sign::{SHORTEST, Signer};
