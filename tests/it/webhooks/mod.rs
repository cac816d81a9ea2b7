//! Outgoing calls: what they carry, where they may go, and how notifications are delivered.

mod calls;
mod deliveries;
mod webhook_guard;
mod workers;
