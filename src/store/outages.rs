//! Times when no instance could work: the database was away, or all instances were. Workers could neither report nor give
//! a sign of life then, so this time does not count against a timeout or a lease.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};

use super::{Actor, Result, Session, Tx};

/// How often an instance says that it works.
pub const BEAT: Duration = Duration::from_secs(1);
/// From so many seconds without a beat on, nobody could work.
const SILENCE_SECS: f64 = 3.0;
/// Longer than any timeout.
const KEPT_DAYS: i32 = 3;

/// Says that this instance works. The first to do so after a silence notes how long that was.
pub async fn record_alive(session: &Session) -> Result<()> {
    let mut tx = session.begin_lease(Actor::Loop("liveness")).await?;
    let now = tx.store.clock().param();
    let rows = sqlx::query!(
        "with last as materialized (select max(at) as at from pulse), free as materialized (
             select shard from pulse order by shard limit 1 for update skip locked
         ), beat as (
             insert into pulse as p (shard, at)
             select coalesce((select shard from free), pg_backend_pid() % 1000), coalesce($1, statement_timestamp())
             on conflict (shard) do update set at = greatest(p.at, excluded.at)
         )
         insert into outage (began_at, ended_at)
         select at, coalesce($1, statement_timestamp()) from last
         where at < coalesce($1, statement_timestamp()) - make_interval(secs => $2)
         on conflict do nothing returning began_at, ended_at",
        now,
        SILENCE_SECS,
    )
    .fetch_all(tx.conn().await?)
    .await?;
    if !rows.is_empty() {
        sqlx::query!(
            "delete from outage where ended_at < coalesce($1, statement_timestamp()) - make_interval(days => $2)",
            now,
            KEPT_DAYS
        )
        .execute(tx.conn().await?)
        .await?;
    }
    tx.commit().await?;
    for row in rows {
        tracing::warn!(began_at = %row.began_at, ended_at = %row.ended_at, "no instance could work: timeouts do not count this time");
    }
    Ok(())
}

/// The outages of the last days.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outages(Vec<(DateTime<Utc>, DateTime<Utc>)>);

impl Outages {
    /// How much of the time between two moments was outage.
    pub fn between(&self, from: DateTime<Utc>, to: DateTime<Utc>) -> TimeDelta {
        let part = |(began, ended): &(DateTime<Utc>, DateTime<Utc>)| (*ended).min(to) - (*began).max(from);
        self.0.iter().map(part).filter(|part| *part > TimeDelta::zero()).sum()
    }

    /// Where a date lies that fell into an outage: as long after its end as it was after its beginning. Dates outside
    /// of outages stay.
    pub fn moved(&self, at: DateTime<Utc>) -> DateTime<Utc> {
        let hit = self.0.iter().find(|(began, ended)| *began <= at && at < *ended);
        hit.map_or(at, |(began, ended)| *ended + (at - *began))
    }
}

/// `None` if there has been no beat for so long that an outage has just ended, or is not noted yet.
pub async fn known(tx: &mut Tx) -> Result<Option<Outages>> {
    // A test that sets the time says itself when there was an outage.
    let manual = tx.store.clock().param().is_some();
    let fresh = sqlx::query_scalar!(
        "select max(at) > statement_timestamp() - make_interval(secs => $1) from pulse",
        SILENCE_SECS
    )
    .fetch_one(tx.conn().await?)
    .await?;
    if fresh == Some(false) && !manual {
        return Ok(None);
    }
    let rows = sqlx::query!("select began_at, ended_at from outage").fetch_all(tx.conn().await?).await?;
    Ok(Some(Outages(rows.into_iter().map(|row| (row.began_at, row.ended_at)).collect())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_between_counts() {
        let at = |secs| DateTime::from_timestamp(secs, 0).unwrap();
        let outages = Outages(vec![(at(100), at(110)), (at(200), at(260))]);
        let secs = |from, to| outages.between(at(from), at(to)).num_seconds();
        let moved = |secs| outages.moved(at(secs)).timestamp();
        assert_eq!((moved(99), moved(105), moved(110), moved(250)), (99, 115, 110, 310));
        assert_eq!((secs(0, 50), secs(0, 105), secs(105, 300), secs(120, 190), secs(0, 1000)), (0, 5, 65, 0, 70));
    }
}
