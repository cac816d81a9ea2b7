//! Standard output, which belongs to what was asked for.

use std::io::{ErrorKind, Write, stdout};

/// Prints a text as it is. Whoever reads no further has seen enough; any other error is the one line to end with.
pub fn print(text: &str) -> Result<(), String> {
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(format!("standard output: {error}")),
        _ => Ok(()),
    }
}
