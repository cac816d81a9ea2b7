//! The claims that this instance holds from the claim until the answer is written: which tasks it may still call, and
//! until when.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::queue::QueuedCall;
use crate::store::tasks::lease::{ClaimId, Kept};
use crate::store::tasks::transitions::Claimed;

/// Claims confirmed by one query at most.
const CONFIRM_LIMIT: usize = 500;
/// A task that was claimed longer ago than this may have been canceled, so its claim is confirmed before the call.
const FRESH: Duration = Duration::from_millis(10);

/// The claims of this instance whose answers are not written yet. Clones share them.
#[derive(Clone, Default)]
pub(super) struct HeldClaims(Arc<Mutex<HashMap<Uuid, HeldClaim>>>);

#[derive(Clone, Copy)]
struct HeldClaim {
    /// The number of the claim.
    claim: i32,
    /// When the database last confirmed the claim.
    confirmed: Instant,
    /// When the lease ends at the earliest, by the clock of this machine.
    leased_until: Instant,
    /// Whether the call has begun. From then on, only its answer ends the claim.
    called: bool,
    /// Bytes of memory that the task takes.
    bytes: usize,
}

/// Whether this instance may call a claimed task.
pub(super) enum MayCall {
    Yes,
    /// The claim may still be held, but its lease is nearly over or another transaction has locked its row.
    NotYet,
    /// The claim was lost or canceled.
    No,
}

impl HeldClaims {
    fn map(&self) -> MutexGuard<'_, HashMap<Uuid, HeldClaim>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn len(&self) -> usize {
        self.map().len()
    }

    /// Returns the memory that all held tasks take.
    pub fn bytes(&self) -> usize {
        self.map().values().map(|held| held.bytes).sum()
    }

    /// Adds a task that this instance has claimed.
    pub fn add(&self, claimed: &Claimed, confirmed: Instant, leased_until: Instant) {
        let held = HeldClaim { claim: claimed.claim, confirmed, leased_until, called: false, bytes: claimed.bytes };
        self.map().insert(claimed.id, held);
    }

    /// Returns the claims to confirm before calling `batch`: none if all of the batch are fresh. Otherwise other
    /// uncalled claims come after those of the batch, the least recently confirmed first.
    pub fn to_confirm(&self, batch: &[QueuedCall]) -> Vec<ClaimId> {
        let map = self.map();
        let stale = |held: &HeldClaim| !held.called && held.confirmed.elapsed() > FRESH;
        if !batch.iter().any(|queued| map.get(&queued.claimed.id).is_some_and(stale)) {
            return Vec::new();
        }
        let in_batch: HashSet<Uuid> = batch.iter().map(|queued| queued.claimed.id).collect();
        let mut claims: Vec<(bool, Instant, Uuid, i32)> = map
            .iter()
            .filter(|(_, held)| stale(held))
            .map(|(id, held)| (!in_batch.contains(id), held.confirmed, *id, held.claim))
            .collect();
        claims.sort_unstable();
        claims.into_iter().take(CONFIRM_LIMIT).map(|(_, _, id, claim)| (id, claim)).collect()
    }

    /// Decides whether to call a task now, and marks it as called if so.
    pub fn begin_call(&self, claim: ClaimId, lease: Duration, busy: bool) -> MayCall {
        let mut map = self.map();
        let Some(held) = map.get_mut(&claim.0).filter(|held| held.claim == claim.1) else { return MayCall::No };
        held.called = !busy && Instant::now() + lease / 10 < held.leased_until;
        if held.called { MayCall::Yes } else { MayCall::NotYet }
    }

    pub fn all(&self) -> Vec<ClaimId> {
        self.map().iter().map(|(id, held)| (*id, held.claim)).collect()
    }

    /// Applies what the database answered about the claims `asked`. Claims that were kept are leased until
    /// `leased_until` at least, and `confirmed`, if given, is the time of their confirmation. Uncalled claims that were
    /// lost are removed.
    pub fn update(&self, asked: &[ClaimId], kept: &Kept, confirmed: Option<Instant>, leased_until: Instant) {
        let mut map = self.map();
        for claim in asked {
            match map.get_mut(&claim.0).filter(|held| held.claim == claim.1) {
                Some(held) if kept.ours.contains(claim) => {
                    held.confirmed = confirmed.unwrap_or(held.confirmed);
                    held.leased_until = held.leased_until.max(leased_until);
                }
                Some(held) if !held.called && !kept.busy.contains(claim) => {
                    map.remove(&claim.0);
                }
                _ => {}
            }
        }
    }

    /// Removes and returns the claims whose call has not begun.
    pub fn remove_uncalled(&self) -> Vec<ClaimId> {
        let mut map = self.map();
        let uncalled = map.iter().filter(|(_, held)| !held.called).map(|(id, held)| (*id, held.claim)).collect();
        map.retain(|_, held| held.called);
        uncalled
    }

    /// Removes claims whose answers are written.
    pub fn remove(&self, claims: impl Iterator<Item = ClaimId>) {
        let mut map = self.map();
        for (id, claim) in claims {
            if map.get(&id).is_some_and(|held| held.claim == claim) {
                map.remove(&id);
            }
        }
    }
}
