//! The secret that signs handles, shared by all instances. It is created once and must never change: handles that
//! workers hold depend on it.

use super::{Actor, Error, Result, Store};
use crate::handle::SigningKey;

impl Store {
    /// Returns the secret. The first instance that asks creates it.
    pub async fn secret(&self) -> Result<SigningKey> {
        let fresh: [u8; SigningKey::LENGTH] = rand::random();
        let bytes = self
            .alone(|session| async move {
                let mut tx = session.begin(Actor::Api).await?;
                sqlx::query!("insert into secret (handle) values ($1) on conflict do nothing", fresh.as_slice())
                    .execute(tx.conn().await?)
                    .await?;
                let bytes = sqlx::query_scalar!("select handle from secret").fetch_one(tx.conn().await?).await?;
                tx.commit().await?;
                Ok(bytes)
            })
            .await?;
        let bytes = bytes
            .try_into()
            .map_err(|_| Error::corrupt(format!("table secret: the key must have {} bytes", SigningKey::LENGTH)))?;
        Ok(SigningKey::new(bytes))
    }
}
