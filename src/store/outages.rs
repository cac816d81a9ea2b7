//! Outages: periods in which no instance could work, because the database or all instances were down. Workers could
//! send neither reports nor heartbeats then, so this time does not count against a timeout or a lease. An instance
//! never decides alone that there was an outage: only the silence of all instances counts as one.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};

use super::{Actor, Result, Session, Tx};

/// How often an instance records that it works.
pub const BEAT: Duration = Duration::from_secs(1);
/// An outage is a period of more than this many seconds in which no instance recorded that it works.
const SILENCE_SECS: f64 = 3.0;
/// How long outages are kept: longer than any timeout.
const KEPT_DAYS: i32 = 3;

/// Records that this instance works. The first instance to do so after a silence records the outage.
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
        tracing::warn!(began_at = %row.began_at, ended_at = %row.ended_at, "outage ended; its time does not count against timeouts");
    }
    Ok(())
}

/// The outages of the last days.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outages(Vec<(DateTime<Utc>, DateTime<Utc>)>);

impl Outages {
    /// Returns how much of the time between `from` and `to` was outage.
    pub fn between(&self, from: DateTime<Utc>, to: DateTime<Utc>) -> TimeDelta {
        let part = |(began, ended): &(DateTime<Utc>, DateTime<Utc>)| (*ended).min(to) - (*began).max(from);
        self.0.iter().map(part).filter(|part| *part > TimeDelta::zero()).sum()
    }

    /// Moves a date inside an outage past its end, by as much as it was past the beginning. Other
    /// dates stay.
    pub fn moved(&self, at: DateTime<Utc>) -> DateTime<Utc> {
        let hit = self.0.iter().find(|(began, ended)| *began <= at && at < *ended);
        hit.map_or(at, |(began, ended)| *ended + (at - *began))
    }
}

/// Reads the recorded outages. Returns `None` while the last beat is so old that an outage may not be recorded yet.
pub async fn known(tx: &mut Tx) -> Result<Option<Outages>> {
    // Tests with a manual clock record their outages themselves.
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
    fn only_the_outage_between_two_dates_counts() {
        let at = |secs| DateTime::from_timestamp(secs, 0).unwrap();
        let outages = Outages(vec![(at(100), at(110)), (at(200), at(260))]);
        let secs = |from, to| outages.between(at(from), at(to)).num_seconds();
        let moved = |secs| outages.moved(at(secs)).timestamp();
        assert_eq!((moved(99), moved(105), moved(110), moved(250)), (99, 115, 110, 310));
        assert_eq!((secs(0, 50), secs(0, 105), secs(105, 300), secs(120, 190), secs(0, 1000)), (0, 5, 65, 0, 70));
    }
}
