//! The list of notifications, newest first. Nothing here changes one.

use chrono::{DateTime, Utc};
use sqlx::{FromRow, Postgres, QueryBuilder};
use uuid::Uuid;

use crate::domain::view::{Delivery, DeliveryStatus, Timestamp};
use crate::domain::webhook::Action;
use crate::store::page::Page;
use crate::store::{Error, Result, Store};

/// The conditions of a list. `None` means no condition.
#[derive(Debug, Default)]
pub struct DeliveryFilter {
    pub id: Option<i64>,
    pub status: Option<DeliveryStatus>,
    pub task_id: Option<Uuid>,
    pub batch_id: Option<Uuid>,
}

/// Reads a page of the list, newest first.
pub async fn deliveries(store: &Store, filter: &DeliveryFilter, page: Page<i64>, limit: i64) -> Result<Vec<Delivery>> {
    let mut query = QueryBuilder::<Postgres>::new(
        "select id, task_id, batch_id, trigger, condition, run, action, status::text as status, attempts, last_status,
                last_error, next_attempt_at, created_at, updated_at from outbox where true",
    );
    if let Some(id) = filter.id {
        query.push(" and id = ").push_bind(id);
    }
    if let Some(status) = filter.status {
        query.push(" and status = ").push_bind(status.as_str()).push("::delivery_status");
    }
    if let Some(task_id) = filter.task_id {
        query.push(" and task_id = ").push_bind(task_id);
    }
    if let Some(batch_id) = filter.batch_id {
        query.push(" and batch_id = ").push_bind(batch_id);
    }
    if let Page::After(id) = page {
        query.push(" and id < ").push_bind(id);
    }
    query.push(" order by id desc limit ").push_bind(limit);
    if let Page::Offset(offset) = page {
        query.push(" offset ").push_bind(offset);
    }
    let rows: Vec<DeliveryRow> =
        store.listing(async |tx| Ok(query.build_query_as().fetch_all(tx.conn().await?).await?)).await?;
    rows.into_iter().map(DeliveryRow::into_view).collect()
}

#[derive(FromRow)]
struct DeliveryRow {
    id: i64,
    task_id: Option<Uuid>,
    batch_id: Uuid,
    trigger: String,
    condition: String,
    run: i32,
    action: String,
    status: String,
    attempts: i32,
    last_status: Option<i32>,
    last_error: Option<String>,
    next_attempt_at: DateTime<Utc>,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
}

impl DeliveryRow {
    fn into_view(self) -> Result<Delivery> {
        let action: Action = serde_json::from_str(&self.action).map_err(Error::corrupt)?;
        let status = DeliveryStatus::parse(&self.status).ok_or_else(|| Error::corrupt(&self.status))?;
        Ok(Delivery {
            id: self.id,
            task_id: self.task_id,
            batch_id: self.batch_id,
            trigger: self.trigger,
            condition: self.condition,
            run: self.run,
            url: action.params.url,
            status,
            attempts: self.attempts,
            last_status: self.last_status,
            last_error: self.last_error,
            next_attempt_at: (status == DeliveryStatus::Pending).then_some(Timestamp(self.next_attempt_at)),
            created_at: Timestamp(self.created_at),
            updated_at: Timestamp(self.updated_at),
        })
    }
}
