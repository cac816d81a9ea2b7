//! Wake-ups between instances through LISTEN and NOTIFY. They are only hints: nothing may depend on their arrival, and
//! the poll of each loop finds the work of a lost one.

use std::time::Duration;

use sqlx::postgres::{PgListener, PgPoolOptions};
use uuid::Uuid;

use super::{Actor, Patience, Result, Store};
use crate::wake::Hints;

/// The channel. [`Listener::check`] repeats its name.
const CHANNEL: &str = "reprise_wake";
/// How long the server may take to answer a LISTEN.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(5);

/// Receives the hints of other instances, on a connection of its own.
pub struct Listener {
    inner: Option<PgListener>,
    own: Uuid,
}

impl Store {
    /// Sends hints to the other instances.
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

    /// Whether a session keeps its server connection from one transaction to the next. Behind a pooler in transaction
    /// mode it does not, and notifications get lost. Such a pooler renames prepared statements, so this statement looks
    /// for its own name among those of the server.
    pub async fn can_listen(&self) -> Result<bool> {
        let own_name = sqlx::query_scalar!(
            r#"select exists (select from pg_prepared_statements where starts_with(name, 'sqlx_s_')) as "own_name!""#
        );
        self.reading(async |tx| Ok(own_name.fetch_one(tx.conn().await?).await?)).await
    }

    /// Opens a connection and begins to listen.
    pub async fn listen(&self) -> Result<Listener> {
        let options = self.pool.options().clone();
        let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(LISTEN_TIMEOUT).connect_lazy_with(options);
        let inner = PgListener::connect_with(&pool).await?;
        let mut listener = Listener { inner: Some(inner), own: self.instance };
        let listening = listener.get()?.listen(CHANNEL);
        match tokio::time::timeout(LISTEN_TIMEOUT, listening).await {
            Ok(listening) => listening?,
            Err(_) => return Err(super::Error::timed_out(LISTEN_TIMEOUT)),
        }
        Ok(listener)
    }
}

impl Listener {
    fn get(&mut self) -> Result<&mut PgListener> {
        self.inner.as_mut().ok_or_else(super::Error::aborted)
    }

    /// Fails if the connection no longer works.
    pub async fn check(&mut self) -> Result<()> {
        // Repeating a LISTEN changes nothing.
        match tokio::time::timeout(LISTEN_TIMEOUT, sqlx::query("listen reprise_wake").execute(self.get()?)).await {
            Ok(checked) => checked.map(|_| ()).map_err(super::Error::from),
            Err(_) => Err(super::Error::timed_out(LISTEN_TIMEOUT)),
        }
    }

    /// Waits for the next hint of another instance. After a reconnect it returns all hints, since some may have been
    /// lost.
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
    /// Closes the socket at once. The library's listener sends UNLISTEN in a separate task and waits for the answer,
    /// forever if the connection is silent. Here that task goes to a runtime that never runs it and ends at once.
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
