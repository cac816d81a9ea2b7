//! Operations on retries: manual retries, default policies, history, statistics.

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use super::{Conflict, Error, Resource, Result, Service, no_batch, no_task};
use crate::domain::graph::NoRevival;
use crate::domain::request::patch::RetryRequest;
use crate::domain::retry::policy::Policy;
use crate::domain::task::lifecycle::Transition;
use crate::domain::view::retry::RetryStats;
use crate::domain::view::{AttemptView, KindPolicy, RetriedBatch, RetriedTask, TaskDetails, TaskEvent};
use crate::store::graph::revive::{self, Targets};
use crate::store::ledger::{attempts, events, retry_stats};
use crate::store::page::Page;
use crate::store::tasks::details;
use crate::store::{self, Actor, Session, batches, policies};

/// The result of the transaction of a manual retry.
enum RetryResult {
    Task(Box<RetriedTask>),
    Batch(RetriedBatch),
    Refused(NoRevival),
    Missing,
}

impl Service {
    /// Executes a task again at once, whatever its retry policy says. A scheduled retry is dropped.
    pub async fn retry_task(&self, id: Uuid, request: &RetryRequest) -> Result<RetriedTask> {
        match self.store.alone(|session| self.retry_task_once(session, id, request)).await? {
            RetryResult::Task(retried) => Ok(*retried),
            RetryResult::Refused(why) => Err(self.refusal(id, why).await?),
            RetryResult::Batch(_) | RetryResult::Missing => Err(no_task(id)),
        }
    }

    /// Retries every task of the batch that failed by itself.
    pub async fn retry_batch(&self, id: Uuid, request: &RetryRequest) -> Result<RetriedBatch> {
        if !batches::batch_exists(&self.store, id).await? {
            return Err(no_batch(id));
        }
        match self.store.alone(|session| self.retry_batch_once(session, id, request)).await? {
            RetryResult::Batch(retried) => Ok(retried),
            RetryResult::Refused(why) => Err(self.refusal(id, why).await?),
            RetryResult::Task(_) | RetryResult::Missing => Err(no_batch(id)),
        }
    }

    async fn retry_task_once(&self, session: Session, id: Uuid, request: &RetryRequest) -> store::Result<RetryResult> {
        let mut tx = self.for_requester(request).begin(&session).await?;
        let decided = match revive::decide(&mut tx, &Targets::Named(id), request.cascade, self.stuck_after).await? {
            Ok(decided) => decided,
            Err(why) => {
                tx.rollback().await?;
                return Ok(RetryResult::Refused(why));
            }
        };
        decided.apply(&mut tx).await?;
        let task = details::task_in(&mut tx, id).await?;
        // A dry run makes every change, to answer exactly what would happen, and rolls it back.
        if request.dry_run {
            tx.rollback().await?;
        } else {
            tx.commit().await?;
        }
        let revived = ids(&decided.revival.revived);
        let retried = |task: TaskDetails| Box::new(RetriedTask { task, revived, dry_run: request.dry_run });
        Ok(task.map_or(RetryResult::Missing, |task| RetryResult::Task(retried(task))))
    }

    async fn retry_batch_once(&self, session: Session, id: Uuid, request: &RetryRequest) -> store::Result<RetryResult> {
        let mut tx = self.for_requester(request).begin(&session).await?;
        let failed = Targets::Failed(revive::failed_of_batch(&mut tx, id).await?);
        let decided = match revive::decide(&mut tx, &failed, request.cascade, self.stuck_after).await? {
            Ok(decided) => decided,
            Err(why) => {
                tx.rollback().await?;
                return Ok(RetryResult::Refused(why));
            }
        };
        decided.apply(&mut tx).await?;
        if request.dry_run {
            tx.rollback().await?;
        } else {
            tx.commit().await?;
        }
        let (retried, revived) = (ids(&decided.revival.retried), ids(&decided.revival.revived));
        Ok(RetryResult::Batch(RetriedBatch { batch_id: id, retried, revived, dry_run: request.dry_run }))
    }

    /// The service on behalf of the person that the request names, or else of the caller.
    fn for_requester(&self, request: &RetryRequest) -> Service {
        request.requested_by.clone().map_or_else(|| self.clone(), |name| self.on_behalf_of(Actor::Person(name)))
    }

    async fn refusal(&self, id: Uuid, why: NoRevival) -> Result<Error> {
        let (task, blocked_by) = match why {
            NoRevival::Refused(task) => (task, None),
            NoRevival::Blocked { task, parent } => (task, Some(parent)),
        };
        let Some(row) = details::task(&self.store, task).await? else { return Ok(no_task(id)) };
        let stuck_at = row.last_updated.0.checked_add_signed(self.stuck_after).unwrap_or(DateTime::<Utc>::MAX_UTC);
        Ok(Error::Conflict(Conflict::of_retry(task, row.basic.status, row.basic.run, blocked_by, stuck_at)))
    }

    pub async fn attempts(&self, id: Uuid, page: Page<i32>, limit: i64) -> Result<Vec<AttemptView>> {
        attempts::of_task(&self.store, id, page, limit).await?.ok_or_else(|| no_task(id))
    }

    pub async fn events(&self, id: Uuid, page: Page<i64>, limit: i64) -> Result<Vec<TaskEvent>> {
        events::of_task(&self.store, id, page, limit).await?.ok_or_else(|| no_task(id))
    }

    pub async fn retry_stats(&self, kind: Option<&str>, since: Option<DateTime<Utc>>) -> Result<RetryStats> {
        Ok(retry_stats::read(&self.store, kind, since).await?)
    }

    pub async fn policies(&self) -> Result<Vec<KindPolicy>> {
        Ok(policies::list(&self.store).await?)
    }

    pub async fn put_policy(&self, kind: &str, policy: &Policy) -> Result<KindPolicy> {
        Ok(policies::put(&self.store, kind, policy).await?)
    }

    pub async fn delete_policy(&self, kind: &str) -> Result<()> {
        let missing = || Error::NotFound { what: Resource::RetryPolicy, id: kind.to_owned() };
        policies::delete(&self.store, kind).await?.then_some(()).ok_or_else(missing)
    }
}

fn ids(transitions: &[Transition]) -> Vec<Uuid> {
    transitions.iter().map(|transition| transition.task().id).collect()
}

/// The time without a heartbeat after which an executing task may be retried manually.
pub(super) fn stuck_after(secs: u64) -> TimeDelta {
    TimeDelta::try_seconds(i64::try_from(secs).unwrap_or(i64::MAX)).unwrap_or(TimeDelta::MAX)
}
