//! Which task starts next: limits on what executes, and turns between fair keys.

mod fairness;
mod limits;
