//! Operations of `/webhook-deliveries`.

use super::{Error, Result, Service};
use crate::domain::view::Delivery;
use crate::store::outbox::list::DeliveryFilter;
use crate::store::page::Page;
use crate::store::{Session, outbox};

impl Service {
    pub async fn deliveries(&self, filter: &DeliveryFilter, page: Page<i64>, limit: i64) -> Result<Vec<Delivery>> {
        Ok(outbox::list::deliveries(&self.store, filter, page, limit).await?)
    }

    /// Makes a notification pending again; one that is still pending stays as it is.
    pub async fn redeliver(&self, id: i64) -> Result<Delivery> {
        let missing = || Error::NotFound { what: super::Resource::Delivery, id: id.to_string() };
        let redeliver = |session: Session| async move { outbox::delivery::redeliver(&session, id).await };
        self.store.alone(redeliver).await?.ok_or_else(missing)?;
        let filter = DeliveryFilter { id: Some(id), ..DeliveryFilter::default() };
        let found = self.deliveries(&filter, Page::Offset(0), 1).await?;
        found.into_iter().next().ok_or_else(missing)
    }
}
