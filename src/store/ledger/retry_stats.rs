//! Statistics of retries: how executions of tasks with a retry policy end, counted by the hour. Reading them never
//! reads tasks, so it costs the same at any number of tasks.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};

use crate::domain::retry::Final;
use crate::domain::retry::failure::FailureType;
use crate::domain::task::lifecycle::{AttemptOutcome, Transition};
use crate::domain::view::retry::{AttemptStats, FailureTypeStats, KindStats, RetryStats, RetryTotals};
use crate::store::{Result, Store, Tx};

/// The counts that a transaction adds.
#[derive(Default)]
pub(in crate::store) struct RetryStatDeltas(BTreeMap<(String, i16, &'static str), RetryStatDelta>);

#[derive(Clone, Copy, Default)]
struct RetryStatDelta {
    succeeded: i64,
    scheduled: i64,
    deferred: i64,
    exhausted: i64,
    final_: i64,
}

impl RetryStatDeltas {
    /// Counts the end of an execution, if its task has a retry policy.
    pub fn count(&mut self, transition: &Transition) {
        let (Some(attempt), Some(_)) = (transition.attempt(), &transition.task().retry) else { return };
        let failure_type = attempt.failure.as_ref().map_or("", |f| f.failure_type.as_str());
        let key = (transition.task().kind.clone(), attempt.attempt, failure_type);
        match (attempt.outcome, attempt.refusal) {
            (AttemptOutcome::Success, _) => self.0.entry(key).or_default().succeeded += 1,
            (AttemptOutcome::Retried, _) => self.0.entry(key).or_default().scheduled += 1,
            (AttemptOutcome::Deferred, _) => self.0.entry(key).or_default().deferred += 1,
            (AttemptOutcome::Failed, Some(Final::Exhausted)) => self.0.entry(key).or_default().exhausted += 1,
            (AttemptOutcome::Failed, _) => self.0.entry(key).or_default().final_ += 1,
            (AttemptOutcome::Canceled | AttemptOutcome::Lost, _) => {}
        }
    }
}

/// Adds the counts. Rows are written in the order of their keys, so that transactions that share some queue up.
pub(in crate::store) async fn add(tx: &mut Tx, deltas: &RetryStatDeltas, now: Option<DateTime<Utc>>) -> Result<()> {
    if deltas.0.is_empty() {
        return Ok(());
    }
    let column = |pick: fn(&RetryStatDelta) -> i64| deltas.0.values().map(pick).collect::<Vec<i64>>();
    sqlx::query!(
        "insert into retry_stat as s (bucket, shard, kind, attempt, failure_type, succeeded, scheduled, deferred,
                                      exhausted, final)
         select date_trunc('hour', coalesce($1, statement_timestamp()), 'utc'), $10, u.*
         from unnest($2::text[], $3::smallint[], $4::text[], $5::bigint[], $6::bigint[], $7::bigint[], $8::bigint[],
                     $9::bigint[]) u
         on conflict (bucket, kind, attempt, failure_type, shard) do update set
             succeeded = s.succeeded + excluded.succeeded, scheduled = s.scheduled + excluded.scheduled,
             deferred = s.deferred + excluded.deferred, exhausted = s.exhausted + excluded.exhausted,
             final = s.final + excluded.final",
        now,
        &deltas.0.keys().map(|(kind, _, _)| kind.as_str()).collect::<Vec<_>>() as &[&str],
        &deltas.0.keys().map(|(_, attempt, _)| *attempt).collect::<Vec<_>>(),
        &deltas.0.keys().map(|(_, _, failure_type)| *failure_type).collect::<Vec<_>>() as &[&str],
        &column(|d| d.succeeded),
        &column(|d| d.scheduled),
        &column(|d| d.deferred),
        &column(|d| d.exhausted),
        &column(|d| d.final_),
        // Any shard will do: a transaction that finds one locked takes another when it is repeated.
        rand::random_range(0..16i16),
    )
    .execute(tx.conn().await?)
    .await?;
    Ok(())
}

/// Reads the statistics since the hour of `since`, of one kind or of all.
pub async fn read(store: &Store, kind: Option<&str>, since: Option<DateTime<Utc>>) -> Result<RetryStats> {
    let adding = sqlx::query!(
        r#"select kind, attempt, failure_type, sum(succeeded)::bigint as "succeeded!",
                  sum(scheduled)::bigint as "scheduled!", sum(deferred)::bigint as "deferred!",
                  sum(exhausted)::bigint as "exhausted!", sum(final)::bigint as "final!"
           from retry_stat
           where ($1::text is null or kind = $1) and ($2::timestamptz is null or bucket >= date_trunc('hour', $2, 'utc'))
           group by kind, attempt, failure_type order by kind, attempt, failure_type"#,
        kind,
        since,
    );
    let rows = store.listing(async |tx| Ok(adding.fetch_all(tx.conn().await?).await?)).await?;
    let mut all = RetryTotals::default();
    let mut by_attempt: BTreeMap<i16, RetryTotals> = BTreeMap::new();
    let mut by_kind: BTreeMap<String, RetryTotals> = BTreeMap::new();
    let mut by_failure_type: BTreeMap<String, RetryTotals> = BTreeMap::new();
    for row in rows {
        let sums = RetryTotals {
            succeeded: row.succeeded,
            succeeded_after_retry: if row.attempt > 0 { row.succeeded } else { 0 },
            failed_after_retry: if row.attempt > 0 { row.exhausted + row.r#final } else { 0 },
            scheduled: row.scheduled,
            deferred: row.deferred,
            exhausted: row.exhausted,
            final_: row.r#final,
        };
        all.add(&sums);
        by_attempt.entry(row.attempt).or_default().add(&sums);
        by_kind.entry(row.kind).or_default().add(&sums);
        if !row.failure_type.is_empty() {
            by_failure_type.entry(row.failure_type).or_default().add(&sums);
        }
    }
    let failure_type = |(name, sums): (String, RetryTotals)| {
        FailureType::parse(&name).map(|failure_type| FailureTypeStats::new(failure_type, &sums))
    };
    Ok(RetryStats {
        scheduled: all.scheduled,
        succeeded_after_retry: all.succeeded_after_retry,
        exhausted: all.exhausted,
        final_: all.final_,
        deferred: all.deferred,
        success_rate: all.success_rate(),
        by_attempt: by_attempt.into_iter().map(|(attempt, sums)| AttemptStats::new(attempt, &sums)).collect(),
        by_kind: by_kind.into_iter().map(|(kind, sums)| KindStats::new(kind, &sums)).collect(),
        by_failure_type: by_failure_type.into_iter().filter_map(failure_type).collect(),
    })
}
