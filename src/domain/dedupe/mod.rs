//! Which tasks of a request are new, and on what those depend that named one that is not.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use uuid::Uuid;

use super::matcher;
use super::request::new_task::{NewTask, compared_lists};
use super::task::status::Status;

/// A task that is there already, and that a new one would only repeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExistingTask {
    pub id: Uuid,
    pub status: Status,
}

impl ExistingTask {
    /// Of several, one that is alive, and the newest of those.
    pub fn best(twins: impl Iterator<Item = ExistingTask>) -> Option<ExistingTask> {
        twins.max_by_key(|twin| (!twin.status.is_terminal(), twin.id))
    }
}

/// What a new task depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Parent {
    Existing(ExistingTask),
    /// By its place in the plan.
    New(usize),
}

/// A task that is to be stored.
#[derive(Debug)]
pub struct Planned<'a> {
    pub task: &'a NewTask,
    /// In the request.
    pub position: usize,
    /// With whether their success is required.
    pub parents: BTreeMap<Parent, bool>,
    pub has_children: bool,
    /// As it will be when all is stored.
    pub status: Status,
}

impl Planned<'_> {
    /// A parent that was there had ended badly: the task falls as soon as it is stored, and others with it.
    pub fn is_lost(&self) -> bool {
        self.parents
            .iter()
            .any(|(parent, required)| *required && matches!(parent, Parent::Existing(t) if bad(t.status)))
    }

    /// Parents that have not ended when it is stored; those that fall with the new tasks fall after that.
    pub fn wait_count(&self) -> usize {
        let open = |parent: &&Parent| !matches!(parent, Parent::Existing(twin) if twin.status.is_terminal());
        self.parents.keys().filter(open).count()
    }

    /// In which status it is stored.
    pub fn stored_as(&self) -> Status {
        if self.wait_count() > 0 || self.is_lost() { Status::Waiting } else { Status::Pending }
    }
}

fn bad(status: Status) -> bool {
    status.outcome().is_some_and(|outcome| !outcome.is_success())
}

/// `twins`: for each task what was there already, as far as anybody looked. Tasks of the request count for those
/// after them.
pub fn plan<'a>(tasks: &'a [NewTask], twins: &[Option<ExistingTask>]) -> Vec<Planned<'a>> {
    let mut here = Here::new(tasks);
    let mut planned: Vec<Planned> = Vec::with_capacity(tasks.len());
    let mut became: Vec<Parent> = Vec::with_capacity(tasks.len());
    for (position, task) in tasks.iter().enumerate() {
        let twin = match (here.twin_of(task), twins.get(position).copied().flatten()) {
            (Some((_, status)), Some(twin)) if status.is_terminal() && !twin.status.is_terminal() => {
                Some(Parent::Existing(twin))
            }
            (Some((at, _)), _) => Some(Parent::New(at)),
            (None, twin) => twin.map(Parent::Existing),
        };
        if let Some(twin) = twin {
            became.push(twin);
            continue;
        }
        let mut parents = BTreeMap::new();
        for dependency in &task.dependencies {
            // Two of them may have become the same task.
            *parents.entry(became[dependency.parent]).or_default() |= dependency.requires_success;
        }
        let (mut lost, mut open) = (false, false);
        for (parent, required) in &parents {
            let status = match parent {
                Parent::Existing(twin) => twin.status,
                Parent::New(at) => {
                    planned[*at].has_children = true;
                    planned[*at].status
                }
            };
            lost |= *required && bad(status);
            open |= !status.is_terminal();
        }
        let status = match (lost, open) {
            (true, _) => Status::Failure,
            (false, true) => Status::Waiting,
            (false, false) => Status::Pending,
        };
        here.add(task, planned.len(), status);
        became.push(Parent::New(planned.len()));
        planned.push(Planned { task, position, parents, has_children: false, status });
    }
    planned
}

/// The new tasks of a request, by whatever others of it may be compared by.
struct Here<'a> {
    lists: HashMap<&'a str, BTreeSet<&'a [String]>>,
    newest: HashMap<String, [Option<usize>; 9]>,
}

impl<'a> Here<'a> {
    fn new(tasks: &'a [NewTask]) -> Here<'a> {
        Here { lists: compared_lists(tasks), newest: HashMap::new() }
    }

    fn add(&mut self, task: &NewTask, at: usize, status: Status) {
        for list in self.lists.get(task.kind.as_str()).into_iter().flatten() {
            if let Some(key) = matcher::key(&task.kind, list, task.metadata.as_ref()) {
                self.newest.entry(key).or_default()[status.index()] = Some(at);
            }
        }
    }

    fn twin_of(&self, task: &NewTask) -> Option<(usize, Status)> {
        let fitting = task.dedupe_strategy.iter().filter_map(|matcher| {
            let key = matcher::key(&matcher.kind, &matcher.fields, task.metadata.as_ref())?;
            let newest = self.newest.get(&key)?;
            let fits = Status::ALL.into_iter().filter(|status| matcher.accepts(*status));
            fits.filter_map(|status| Some((newest[status.index()]?, status)))
                .max_by_key(|(at, status)| (!status.is_terminal(), *at))
        });
        fitting.max_by_key(|(at, status)| (!status.is_terminal(), *at))
    }
}

#[cfg(test)]
mod tests;
