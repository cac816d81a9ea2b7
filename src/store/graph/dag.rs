//! The graph of a batch, as the API shows it. Nothing here locks or writes.

use sqlx::{Postgres, QueryBuilder};
use uuid::Uuid;

use crate::domain::view::{Dag, Link};
use crate::store::tasks::row::{SUMMARY, SummaryRow};
use crate::store::{Result, Store, Tx};

/// Returns about how many bytes the graph of a batch has in an answer.
pub async fn dag_bytes(store: &Store, batch_id: Uuid) -> Result<i64> {
    let adding = sqlx::query_scalar!(
        r#"select coalesce((
               select sum(octet_length(name) + octet_length(kind) + 450) from task_spec where batch_id = $1
           ), 0)::bigint + 140 * (
               select count(*) from task_spec s join link l on l.parent_id = s.id where s.batch_id = $1
           ) as "bytes!""#,
        batch_id
    );
    store.listing(async |tx| Ok(adding.fetch_one(tx.conn().await?).await?)).await
}

/// Reads the tasks and links of a batch; `None` if it has no tasks.
pub async fn dag(store: &Store, batch_id: Uuid) -> Result<Option<Dag>> {
    store.listing(async |tx| dag_in(tx, batch_id).await).await
}

async fn dag_in(tx: &mut Tx, batch_id: Uuid) -> Result<Option<Dag>> {
    let mut query = QueryBuilder::<Postgres>::new(SUMMARY);
    query.push("task_spec s join task t on t.id = s.id where s.batch_id = ").push_bind(batch_id).push(" order by s.id");
    let rows: Vec<SummaryRow> = query.build_query_as().fetch_all(tx.conn().await?).await?;
    if rows.is_empty() {
        return Ok(None);
    }
    let links = sqlx::query_as!(
        Link,
        r#"select l.parent_id as "parent_id!", l.child_id as "child_id!", l.requires_success as "requires_success!"
           from task_spec s join link l on l.parent_id = s.id where s.batch_id = $1
           union
           select l.parent_id, l.child_id, l.requires_success
           from task_spec s join link l on l.child_id = s.id where s.batch_id = $1
           order by 2, 1"#,
        batch_id
    )
    .fetch_all(tx.conn().await?)
    .await?;
    Ok(Some(Dag { tasks: rows.into_iter().map(SummaryRow::into_view).collect::<Result<_>>()?, links }))
}
