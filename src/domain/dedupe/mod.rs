//! Deduplication: which tasks of a request are new. A dependency on a task that is not new becomes one on the existing
//! task.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use uuid::Uuid;

use super::matcher;
use super::request::new_batch::compared_lists;
use super::request::new_task::NewTask;
use super::task::status::Status;

/// A stored task that a matcher of a new task finds. The new task is not created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExistingTask {
    pub id: Uuid,
    pub status: Status,
}

impl ExistingTask {
    /// Returns the newest alive task, or the newest of all if none is alive.
    pub fn best(found: impl Iterator<Item = ExistingTask>) -> Option<ExistingTask> {
        found.max_by_key(|task| (!task.status.is_terminal(), task.id))
    }
}

/// A task that a new task depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Parent {
    Existing(ExistingTask),
    /// A task of the same plan, by its index.
    New(usize),
}

/// A task to store.
#[derive(Debug)]
pub struct Planned<'a> {
    pub task: &'a NewTask,
    /// Position in the request.
    pub position: usize,
    /// Each parent, with whether its success is required.
    pub parents: BTreeMap<Parent, bool>,
    pub has_children: bool,
    /// The status after the whole plan is stored and its failures have propagated.
    pub status: Status,
}

impl Planned<'_> {
    /// Whether a required existing parent has ended badly. Then the task fails as soon as it is stored, and its
    /// children with it.
    pub fn is_lost(&self) -> bool {
        self.parents
            .iter()
            .any(|(parent, required)| *required && matches!(parent, Parent::Existing(t) if ended_badly(t.status)))
    }

    /// Returns the number of parents that have not ended when the task is stored. New parents that fail at once fail
    /// only after that.
    pub fn wait_count(&self) -> usize {
        let open = |parent: &&Parent| !matches!(parent, Parent::Existing(task) if task.status.is_terminal());
        self.parents.keys().filter(open).count()
    }

    /// Returns the status in which the task is stored.
    pub fn stored_as(&self) -> Status {
        if self.wait_count() > 0 || self.is_lost() { Status::Waiting } else { Status::Pending }
    }
}

fn ended_badly(status: Status) -> bool {
    status.outcome().is_some_and(|outcome| !outcome.is_success())
}

/// Plans which tasks of a request to store. `existing` holds, for each task, the stored task that its matchers found. A
/// task can also match an earlier task of the same request.
pub fn plan<'a>(tasks: &'a [NewTask], existing: &[Option<ExistingTask>]) -> Vec<Planned<'a>> {
    let mut planned_by_key = PlannedByKey::new(tasks);
    let mut planned: Vec<Planned> = Vec::with_capacity(tasks.len());
    // For each task of the request, the task that stands for it.
    let mut resolved: Vec<Parent> = Vec::with_capacity(tasks.len());
    for (position, task) in tasks.iter().enumerate() {
        let duplicate_of = match (planned_by_key.find(task), existing.get(position).copied().flatten()) {
            (Some((_, status)), Some(stored)) if status.is_terminal() && !stored.status.is_terminal() => {
                Some(Parent::Existing(stored))
            }
            (Some((index, _)), _) => Some(Parent::New(index)),
            (None, stored) => stored.map(Parent::Existing),
        };
        if let Some(original) = duplicate_of {
            resolved.push(original);
            continue;
        }
        let mut parents = BTreeMap::new();
        for dependency in &task.dependencies {
            // Two dependencies may resolve to the same task.
            *parents.entry(resolved[dependency.parent]).or_default() |= dependency.requires_success;
        }
        let (mut lost, mut open) = (false, false);
        for (parent, required) in &parents {
            let status = match parent {
                Parent::Existing(stored) => stored.status,
                Parent::New(index) => {
                    planned[*index].has_children = true;
                    planned[*index].status
                }
            };
            lost |= *required && ended_badly(status);
            open |= !status.is_terminal();
        }
        let status = match (lost, open) {
            (true, _) => Status::Failure,
            (false, true) => Status::Waiting,
            (false, false) => Status::Pending,
        };
        planned_by_key.add(task, planned.len(), status);
        resolved.push(Parent::New(planned.len()));
        planned.push(Planned { task, position, parents, has_children: false, status });
    }
    planned
}

/// The planned tasks by the keys that the matchers of later tasks of the request compare.
struct PlannedByKey<'a> {
    lists: HashMap<&'a str, BTreeSet<&'a [String]>>,
    /// The index of the newest task of each key and status.
    newest: HashMap<String, [Option<usize>; 9]>,
}

impl<'a> PlannedByKey<'a> {
    fn new(tasks: &'a [NewTask]) -> PlannedByKey<'a> {
        PlannedByKey { lists: compared_lists(tasks), newest: HashMap::new() }
    }

    fn add(&mut self, task: &NewTask, index: usize, status: Status) {
        for list in self.lists.get(task.kind.as_str()).into_iter().flatten() {
            if let Some(key) = matcher::key(&task.kind, list, task.metadata.as_ref()) {
                self.newest.entry(key).or_default()[status.index()] = Some(index);
            }
        }
    }

    /// Finds the newest alive task that a matcher of `task` accepts, or the newest of all if none is alive.
    fn find(&self, task: &NewTask) -> Option<(usize, Status)> {
        let fitting = task.dedupe_strategy.iter().filter_map(|matcher| {
            let key = matcher::key(&matcher.kind, &matcher.fields, task.metadata.as_ref())?;
            let newest = self.newest.get(&key)?;
            let fits = Status::ALL.into_iter().filter(|status| matcher.accepts(*status));
            fits.filter_map(|status| Some((newest[status.index()]?, status)))
                .max_by_key(|(index, status)| (!status.is_terminal(), *index))
        });
        fitting.max_by_key(|(index, status)| (!status.is_terminal(), *index))
    }
}

#[cfg(test)]
mod tests;
