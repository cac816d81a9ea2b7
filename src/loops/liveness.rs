//! Records every second that this instance is alive, so that outages of all instances are known afterwards.

use std::time::Duration;

use super::runner::{Loop, Tick};
use crate::store::{self, Patience, Session, Store, outages};

pub struct Liveness {
    pub store: Store,
}

impl Loop for Liveness {
    const NAME: &'static str = "liveness";

    fn interval(&self) -> Duration {
        outages::BEAT
    }

    async fn tick(&self) -> store::Result<Tick> {
        let beat = |session: Session| async move { outages::record_alive(&session).await };
        match self.store.retrying(Patience::Least, beat).await {
            Err(error) if error.is_busy() => {}
            result => result?,
        }
        Ok(Tick::default())
    }
}
