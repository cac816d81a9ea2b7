//! A PostgreSQL server of one test, which can stop it and start it again.

use std::path::PathBuf;

use private_postgres::{Embedded, Settings};
use rustix::process::{Pid, Signal, kill_process};

pub struct Server {
    dir: PathBuf,
    running: Option<Embedded>,
}

impl Server {
    pub fn new(name: &str) -> Server {
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        Server { dir, running: None }
    }

    pub async fn start(&mut self) -> String {
        // Durable, although the data is disposable: what was acknowledged must survive.
        let server = Embedded::start(Settings::new("reprise", &self.dir)).await.unwrap();
        let url = server.url().to_owned();
        self.running = Some(server);
        url
    }

    /// Disconnects all clients and shuts down cleanly.
    pub async fn stop_fast(&mut self) {
        self.running.take().unwrap().stop().await.unwrap();
    }

    /// Stops at once; the server recovers at the next start.
    pub async fn stop_immediately(&mut self) {
        let server = self.running.take().unwrap();
        let file = std::fs::read_to_string(server.data_dir().join("pgdata/postmaster.pid")).unwrap();
        let pid = file.lines().next().unwrap().parse().unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), Signal::QUIT).unwrap();
        server.stop().await.unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
