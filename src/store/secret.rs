//! The secret that all instances share. It is made once and never changed: handles that are out there depend on it.

use super::{Actor, Error, Result, Store};
use crate::handle::SigningKey;

impl Store {
    /// The first instance that starts makes it; all others find it.
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
        let bytes = bytes.try_into().map_err(|_| Error::corrupt("the secret has another length"))?;
        Ok(SigningKey::new(bytes))
    }
}
