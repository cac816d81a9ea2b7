//! Faults: crashes, disconnects, outages of the database, lost claims, and rows that another transaction holds.

mod crashes_and_disconnects;
mod dates;
mod fencing;
mod held_rows;
mod instances;
mod outages;
mod pooler;
mod server_processes;
mod silent_connections;
mod storm;
