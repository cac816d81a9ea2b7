//! Standard output, for the output of commands; logs go to standard error.

use std::io::{ErrorKind, Write, stdout};

/// Prints a text. A reader that closes the pipe early is no error; any other error is the one line to print.
pub fn print(text: &str) -> Result<(), String> {
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(format!("standard output: {error}")),
        _ => Ok(()),
    }
}
