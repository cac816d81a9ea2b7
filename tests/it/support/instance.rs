//! The real binary as a separate process, which the test can kill.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::{Client, LOOPBACK, eventually};

pub struct Instance {
    child: Child,
    pub api: Client,
}

pub const BINARY: &str = env!("CARGO_BIN_EXE_reprise");

/// The binary, without variables of this environment that could configure it.
pub fn command(settings: &[(&str, &str)]) -> Command {
    let mut command = Command::new(BINARY);
    command.env_clear();
    for name in ["PATH", "HOME", "TMPDIR"] {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    command.envs(settings.iter().copied());
    command
}

impl Instance {
    pub fn start(url: &str, settings: &[(&str, &str)]) -> Instance {
        Instance::try_start(url, settings).expect("the instance ended before it was ready")
    }

    /// Returns `None` if the instance ended before it was ready.
    pub fn try_start(url: &str, settings: &[(&str, &str)]) -> Option<Instance> {
        let mut all = vec![("DATABASE_URL", url), ("PORT", "0"), ("RUST_LOG", "warn"), ("POOL_MAX_SIZE", "10")];
        all.push(("WEBHOOK_ALLOW", LOOPBACK));
        all.extend(settings);
        Instance::try_spawn(command(&all))
    }

    /// Waits until the instance prints its address.
    pub fn spawn(command: Command) -> Instance {
        Instance::try_spawn(command).expect("the instance ended before it was ready")
    }

    fn try_spawn(mut command: Command) -> Option<Instance> {
        let mut child = command.stdout(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let base = loop {
            let mut line = String::new();
            if lines.read_line(&mut line).unwrap() == 0 {
                child.wait().unwrap();
                return None;
            }
            if let Some(url) = line.trim().strip_prefix("API") {
                break url.trim().to_owned();
            }
        };
        // Further output must not fill the pipe.
        std::thread::spawn(move || {
            let _ = lines.read_to_end(&mut Vec::new());
        });
        Some(Instance { child, api: Client::new(base) })
    }

    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits until the instance has ended.
    pub async fn ended(mut self) -> ExitStatus {
        eventually("an instance to end", async || self.child.try_wait().unwrap()).await
    }

    pub fn terminate(mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.child.wait().unwrap()
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
