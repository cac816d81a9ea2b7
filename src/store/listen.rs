//! Wake-ups between instances through LISTEN and NOTIFY. Hints only; whatever is lost here, the polls find.

use std::time::Duration;

use sqlx::postgres::{PgListener, PgPoolOptions};
use uuid::Uuid;

use super::{Actor, Patience, Result, Store};
use crate::wake::Hints;

/// Named once more in [`Listener::check`].
const CHANNEL: &str = "reprise_wake";
/// How long it may take to begin to listen.
const PATIENCE: Duration = Duration::from_secs(5);

/// What other instances say, on a connection of its own.
pub struct Listener {
    inner: Option<PgListener>,
    own: Uuid,
}

impl Store {
    pub async fn notify(&self, hints: Hints) -> Result<()> {
        let payload = format!("{}:{}", self.instance, hints.bits());
        let payload = payload.as_str();
        self.retrying(Patience::Brief, |session| async move {
            let mut tx = session.begin_lease(Actor::Loop("wake-up")).await?;
            sqlx::query!("select pg_notify($1, $2)", CHANNEL, payload).execute(tx.conn().await?).await?;
            tx.commit().await
        })
        .await
    }

    /// Whether a connection stays the same from one transaction to the next. Behind a pooler in transaction mode it does
    /// not, and what it would listen to goes astray. Such a pooler gives prepared statements names of its own, and this
    /// statement finds itself among those of the server.
    pub async fn can_listen(&self) -> Result<bool> {
        let own_name = sqlx::query_scalar!(
            r#"select exists (select from pg_prepared_statements where starts_with(name, 'sqlx_s_')) as "own_name!""#
        );
        self.reading(async |tx| Ok(own_name.fetch_one(tx.conn().await?).await?)).await
    }

    pub async fn listen(&self) -> Result<Listener> {
        let options = self.pool.options().clone();
        let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(PATIENCE).connect_lazy_with(options);
        let inner = PgListener::connect_with(&pool).await?;
        let mut listener = Listener { inner: Some(inner), own: self.instance };
        let listening = listener.get()?.listen(CHANNEL);
        match tokio::time::timeout(PATIENCE, listening).await {
            Ok(listening) => listening?,
            Err(_) => return Err(super::Error::too_late(PATIENCE)),
        }
        Ok(listener)
    }
}

impl Listener {
    fn get(&mut self) -> Result<&mut PgListener> {
        self.inner.as_mut().ok_or_else(super::Error::broken_off)
    }

    /// An error if it hears nothing any more.
    pub async fn check(&mut self) -> Result<()> {
        // Listening to what one listens to already changes nothing.
        match tokio::time::timeout(PATIENCE, sqlx::query("listen reprise_wake").execute(self.get()?)).await {
            Ok(checked) => checked.map(|_| ()).map_err(super::Error::from),
            Err(_) => Err(super::Error::too_late(PATIENCE)),
        }
    }

    /// The next hint of another instance. After a reconnect everything is hinted at: something may have been missed.
    pub async fn hinted(&mut self) -> Result<Hints> {
        loop {
            let own = self.own;
            let Some(notification) = self.get()?.try_recv().await? else {
                let mut all = Hints::START;
                all.add(Hints::RETRY);
                all.add(Hints::DELIVER);
                return Ok(all);
            };
            let Some((from, bits)) = notification.payload().split_once(':') else { continue };
            if from != own.to_string()
                && let Ok(bits) = bits.parse()
            {
                return Ok(Hints::from_bits(bits));
            }
        }
    }
}

impl Drop for Listener {
    /// The library's listener says good-bye in a task of its own and waits for the answer, for ever if the connection is
    /// silent. Here that task is given to a runtime that never runs it and ends at once: the socket is closed.
    fn drop(&mut self) {
        let Some(inner) = self.inner.take() else { return };
        if let Ok(nowhere) = tokio::runtime::Builder::new_current_thread().build() {
            let entered = nowhere.enter();
            drop(inner);
            drop(entered);
            nowhere.shutdown_background();
        }
    }
}
