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

    /// Whether a connection stays the same from one transaction to the next. Behind a pooler in transaction mode it does
    /// not, and what it would listen to goes astray. Such a pooler gives prepared statements names of its own, and this
    /// statement finds itself among those of the server.
    pub async fn can_listen(&self) -> Result<bool> {
        let own_name = sqlx::query_scalar!(
            r#"select exists (select from pg_prepared_statements where starts_with(name, 'sqlx_s_')) as "own_name!""#
        );
        Ok(own_name.fetch_one(&self.pool).await?)
    }

    pub async fn listen(&self) -> Result<Listener> {
        let mut inner = PgListener::connect_with(&self.pool).await?;
        inner.listen(CHANNEL).await?;
        Ok(Listener { inner, own: self.instance })
    }
}

impl Listener {
    /// An error if it hears nothing any more.
    pub async fn check(&mut self) -> Result<()> {
        sqlx::query("select 1").execute(&mut self.inner).await?;
        Ok(())
    }

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
