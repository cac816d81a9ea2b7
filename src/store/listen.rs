//! Wake-ups between instances through LISTEN and NOTIFY. Hints only; whatever is lost here, the polls find.

use sqlx::postgres::PgListener;
use uuid::Uuid;

use super::{Result, Store};
use crate::wake::Hints;

const CHANNEL: &str = "reprise_wake";

/// What other instances say.
pub struct Listener {
    inner: PgListener,
    own: Uuid,
}

impl Store {
    pub async fn notify(&self, hints: Hints) -> Result<()> {
        let payload = format!("{}:{}", self.instance, hints.bits());
        sqlx::query!("select pg_notify($1, $2)", CHANNEL, payload).execute(&self.pool).await?;
        Ok(())
    }

    pub async fn listen(&self) -> Result<Listener> {
        let mut inner = PgListener::connect_with(&self.pool).await?;
        inner.listen(CHANNEL).await?;
        Ok(Listener { inner, own: self.instance })
    }
}

impl Listener {
    /// The next hint of another instance. After a reconnect everything is hinted at: something may have been missed.
    pub async fn hinted(&mut self) -> Result<Hints> {
        loop {
            let Some(notification) = self.inner.try_recv().await? else {
                let mut all = Hints::START;
                all.add(Hints::RETRY);
                all.add(Hints::DELIVER);
                return Ok(all);
            };
            let Some((from, bits)) = notification.payload().split_once(':') else { continue };
            if from != self.own.to_string()
                && let Ok(bits) = bits.parse()
            {
                return Ok(Hints::from_bits(bits));
            }
        }
    }
}
