//! The claims that this instance holds: which tasks it may still call, and until when.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::queue::QueuedCall;
use crate::store::tasks::lease::{ClaimId, Kept};
use crate::store::tasks::transitions::Claimed;

/// Claims looked at again together at most.
const ASKED: usize = 500;
/// A claim that is older than this may have been canceled meanwhile: it is looked at again before the call.
const FRESH: Duration = Duration::from_millis(10);

/// What was claimed here and has no written result yet.
#[derive(Clone, Default)]
pub(super) struct HeldClaims(Arc<Mutex<HashMap<Uuid, HeldClaim>>>);

#[derive(Clone, Copy)]
struct HeldClaim {
    /// The number of the claim.
    claim: i32,
    /// When it was last known to be ours.
    known: Instant,
    /// Until when it is so at least, by the clock of this machine.
    until: Instant,
    /// Its webhook has been called: from here on only the answer ends it.
    called: bool,
    /// How much of it is held in memory.
    bytes: usize,
}

impl HeldClaims {
    fn map(&self) -> MutexGuard<'_, HashMap<Uuid, HeldClaim>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn len(&self) -> usize {
        self.map().len()
    }

    pub fn bytes(&self) -> usize {
        self.map().values().map(|holding| holding.bytes).sum()
    }

    pub fn take(&self, claimed: &Claimed, known: Instant, until: Instant) {
        let holding = HeldClaim { claim: claimed.claim, known, until, called: false, bytes: claimed.bytes };
        self.map().insert(claimed.id, holding);
    }

    /// If it is not certain that all of these are still ours: which to ask about. With them go others that are still to
    /// be called, those first that have not been asked about for longest.
    pub fn doubtful(&self, batch: &[QueuedCall]) -> Vec<ClaimId> {
        let map = self.map();
        let old = |holding: &HeldClaim| !holding.called && holding.known.elapsed() > FRESH;
        if !batch.iter().any(|queued| map.get(&queued.claimed.id).is_some_and(old)) {
            return Vec::new();
        }
        let soon: HashSet<Uuid> = batch.iter().map(|queued| queued.claimed.id).collect();
        let mut doubtful: Vec<(bool, Instant, Uuid, i32)> =
            map.iter().filter(|(_, h)| old(h)).map(|(id, h)| (!soon.contains(id), h.known, *id, h.claim)).collect();
        doubtful.sort_unstable();
        doubtful.into_iter().take(ASKED).map(|(_, _, id, claim)| (id, claim)).collect()
    }

    /// `None`: it is no longer ours to call. `Some(false)`: it may be, but its lease is nearly over, or somebody else holds
    /// it.
    pub fn about_to_call(&self, claim: ClaimId, lease: Duration, busy: bool) -> Option<bool> {
        let mut map = self.map();
        let holding = map.get_mut(&claim.0).filter(|holding| holding.claim == claim.1)?;
        holding.called = !busy && Instant::now() + lease / 10 < holding.until;
        Some(holding.called)
    }

    pub fn all(&self) -> Vec<ClaimId> {
        self.map().iter().map(|(id, holding)| (*id, holding.claim)).collect()
    }

    /// Of those that were `asked` about, only those that were kept are still ours, `until` then at least; what is not,
    /// and is not called yet, is dropped. Those that are about to be called were ours `at` that time.
    pub fn keep(&self, asked: &[ClaimId], kept: &Kept, at: Option<Instant>, until: Instant) {
        let mut map = self.map();
        for claim in asked {
            match map.get_mut(&claim.0).filter(|holding| holding.claim == claim.1) {
                Some(holding) if kept.ours.contains(claim) => {
                    holding.known = at.unwrap_or(holding.known);
                    holding.until = holding.until.max(until);
                }
                Some(holding) if !holding.called && !kept.busy.contains(claim) => {
                    map.remove(&claim.0);
                }
                _ => {}
            }
        }
    }

    pub fn drop_uncalled(&self) -> Vec<ClaimId> {
        let mut map = self.map();
        let uncalled = map.iter().filter(|(_, h)| !h.called).map(|(id, h)| (*id, h.claim)).collect();
        map.retain(|_, h| h.called);
        uncalled
    }

    pub fn done(&self, claims: impl Iterator<Item = ClaimId>) {
        let mut map = self.map();
        for (id, claim) in claims {
            if map.get(&id).is_some_and(|holding| holding.claim == claim) {
                map.remove(&id);
            }
        }
    }
}
