//! The tasks of requests.

use std::collections::{BTreeMap, HashMap};

use chrono::{DateTime, Utc};
use serde_json::{Value, json};

use super::input::{Given, Input, Schemas, input, reference};
use super::limits::DEPENDENCIES_PER_TASK;
use super::new_action::ActionList;
use super::new_matcher::DedupeStrategy;
use super::new_policy::PolicyInput;
use super::new_rule::RuleList;
use super::problems::ProblemCode;
use super::reading::{Place, Reading, Source};
use super::values::{Label, MAX_I32, MetadataInput, Text, Time, Whole, read_array};
use crate::domain::matcher::DedupeMatcher;
use crate::domain::retry::policy::Policy;
use crate::domain::rules::{Rule, RuleTarget};
use crate::domain::task::Flags;
use crate::domain::task::status::Status;
use crate::domain::webhook::{Action, Actions};

input! {
    /// A task to create.
    pub struct TaskInput as "TaskInput" {
        /// An id within the request, for `dependencies`.
        id: Option<Text<1, 255>>,
        /// A name for people; it must not be blank.
        name: Label<255>,
        /// The kind of work. Default policies, rules and statistics refer to it. It must not be blank.
        kind: Label<100>,
        /// Seconds without a heartbeat after which the run times out; 60 by default.
        timeout: Option<Whole<1, 86_400>>,
        /// Any JSON object of at most 64 KiB.
        metadata: Option<MetadataInput>,
        /// Tasks with a higher priority start first; 0 by default.
        priority: Option<Whole<-1000, 1000>>,
        /// The webhook that starts the task. Without it, a claimed task is Running at once.
        on_start: Option<Action>,
        /// Webhooks called when the task succeeds.
        on_success: Option<ActionList>,
        /// Webhooks called when the task fails for good.
        on_failure: Option<ActionList>,
        /// Webhooks called when a retry or a deferral is scheduled.
        on_retry: Option<ActionList>,
        /// Tasks that must end before this task starts.
        dependencies: Option<DependencyList>,
        /// If one of these matchers finds an existing task, this task is not created.
        dedupe_strategy: Option<DedupeStrategy>,
        /// The number of items that the task expects to process.
        expected_count: Option<Whole<0, MAX_I32>>,
        /// Whether the cancellation of dead ends stops at this task instead of continuing to its parents; false by
        /// default.
        dead_end_barrier: Option<bool>,
        /// The retry policy. If absent, the default policy of the kind applies, or the task is not retried; null turns
        /// retries off.
        retry: Given<PolicyInput>,
        /// The task does not start before this time.
        run_at: Option<Time>,
        /// Limits that the task must meet to start. All of them must pass.
        rules: Option<RuleList>,
        /// A key such as a tenant. Among tasks of equal priority, keys take turns.
        fair_key: Option<Text<1, 255>>,
    }
}

input! {
    /// A task that must end first.
    pub struct DependencyInput as "DependencyInput" {
        /// The `id` of a task that appears earlier in the request.
        id: Text<1, 255>,
        /// Whether the task fails if the named task does not succeed; true by default. If false, it starts in either
        /// case.
        requires_success: Option<bool>,
    }
}

#[derive(Debug, PartialEq)]
pub struct NewTask {
    /// The id that the request gave the task.
    pub local_id: Option<String>,
    pub name: String,
    pub kind: String,
    pub timeout_secs: i32,
    pub metadata: Option<Value>,
    pub priority: i16,
    pub actions: Actions,
    /// Dependencies on earlier tasks of the batch.
    pub dependencies: Vec<Dependency>,
    pub has_children: bool,
    /// The task is not created if one of these matchers finds an existing task.
    pub dedupe_strategy: Vec<DedupeMatcher>,
    pub expected_count: Option<i32>,
    pub dead_end_barrier: bool,
    pub retry: RetryChoice,
    pub run_at: Option<DateTime<Utc>>,
    pub rules: Vec<Rule>,
    pub fair_key: Option<String>,
}

/// Where the retry policy of a new task comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum RetryChoice {
    Own(Policy),
    /// Explicitly none, even if the kind has a default policy.
    OptOut,
    /// Not given: the default policy of the kind, if there is one.
    OfKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dependency {
    /// Position of the parent in the batch.
    pub parent: usize,
    pub requires_success: bool,
}

impl NewTask {
    /// Returns the flags of the task. `dead_end_cancel` is the setting of its batch.
    pub fn flags(&self, dead_end_cancel: bool) -> Flags {
        let tells_parents = dead_end_cancel && !self.dead_end_barrier && !self.dependencies.is_empty();
        let mut flags = Flags::default();
        flags.set(Flags::ON_START, self.actions.on_start.is_some());
        flags.set(Flags::ON_SUCCESS, !self.actions.on_success.is_empty());
        flags.set(Flags::ON_FAILURE, !self.actions.on_failure.is_empty());
        flags.set(Flags::ON_RETRY, !self.actions.on_retry.is_empty());
        flags.set(Flags::HAS_CHILDREN, self.has_children);
        flags.set(Flags::DEAD_END, dead_end_cancel);
        flags.set(Flags::TELLS_PARENTS, tells_parents);
        flags.set(Flags::HAS_RULES, !self.rules.is_empty());
        flags
    }

    pub fn status(&self) -> Status {
        if self.dependencies.is_empty() { Status::Pending } else { Status::Waiting }
    }
}

impl TaskInput {
    /// Completes a task: checks what concerns more than one field. `positions` holds the ids of the earlier tasks.
    pub fn task(self, positions: &HashMap<String, usize>, at: Place, reading: &mut Reading) -> NewTask {
        let notifications = [&self.on_success, &self.on_failure, &self.on_retry];
        let count: usize = notifications.into_iter().flatten().map(|list| list.total).sum();
        let most = reading.limits.actions_per_task;
        if count > most {
            let message =
                format!("with on_failure and on_retry, must have at most {most} actions in total, not {count}");
            reading.add(at.field("on_success"), ProblemCode::WrongCount, message);
        }
        let kind = self.kind.0;
        let metadata = self.metadata.and_then(|metadata| metadata.0);
        let rules: Vec<Rule> = self.rules.unwrap_or_default().0.into_iter().map(|rule| rule.rule(&kind)).collect();
        let target = RuleTarget { metadata: metadata.as_ref(), has_expected_count: self.expected_count.is_some() };
        for (i, rule) in rules.iter().enumerate() {
            if let Some(problem) = target.problem(rule) {
                let list = at.field("rules");
                reading.add(list.item(i), ProblemCode::MissingMetadataField, problem);
            }
        }
        let dedupe = self.dedupe_strategy.unwrap_or_default().0.into_iter().enumerate().map(|(i, matcher)| {
            let list = at.field("dedupe_strategy");
            matcher.matcher(&kind, metadata.as_ref(), list.item(i), reading)
        });
        let dedupe_strategy = dedupe.collect();
        let actions = |list: Option<ActionList>| list.map_or(Vec::new(), |list| list.actions);
        NewTask {
            dependencies: self.dependencies.unwrap_or_default().resolve(positions, at.field("dependencies"), reading),
            local_id: self.id.map(|id| id.0),
            name: self.name.0,
            kind,
            timeout_secs: self.timeout.map_or(60, Whole::to),
            metadata,
            priority: self.priority.map_or(0, Whole::to),
            actions: Actions {
                on_start: self.on_start,
                on_success: actions(self.on_success),
                on_failure: actions(self.on_failure),
                on_retry: actions(self.on_retry),
                cancel: None,
            },
            has_children: false,
            dedupe_strategy,
            expected_count: self.expected_count.map(Whole::to),
            dead_end_barrier: self.dead_end_barrier.unwrap_or(false),
            retry: match self.retry {
                Given::Absent => RetryChoice::OfKind,
                Given::Null | Given::Invalid => RetryChoice::OptOut,
                Given::Value(PolicyInput(policy)) => RetryChoice::Own(policy),
            },
            run_at: self.run_at.map(|time| time.0),
            rules,
            fair_key: self.fair_key.map(|key| key.0),
        }
    }
}

/// The dependencies of a task, each with its position in the list.
#[derive(Debug, Default)]
pub struct DependencyList(Vec<(usize, DependencyInput)>);

impl Input for DependencyList {
    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<DependencyList> {
        let items = read_array(source, at, reading)?;
        let most = reading.limits.dependencies_per_task;
        if items.len() > most {
            let message = format!("must have at most {most} entries, not {} (MAX_DEPENDENCIES_PER_TASK)", items.len());
            reading.add(at, ProblemCode::WrongCount, message);
            return None;
        }
        let read = |(i, item)| Some((i, DependencyInput::read(Source::Tree(item), at.item(i), reading)?));
        Some(DependencyList(items.into_iter().enumerate().filter_map(read).collect()))
    }

    fn schema() -> Value {
        json!({"type": "array", "items": reference("DependencyInput"), "x-limit": DEPENDENCIES_PER_TASK})
    }

    fn define(schemas: &mut Schemas) {
        DependencyInput::define(schemas);
    }
}

impl DependencyList {
    /// Finds the tasks that the dependencies name.
    fn resolve(self, positions: &HashMap<String, usize>, at: Place, reading: &mut Reading) -> Vec<Dependency> {
        let mut dependencies: BTreeMap<usize, Dependency> = BTreeMap::new();
        for (i, dependency) in self.0 {
            let Text(id) = dependency.id;
            let entry = at.item(i);
            let place = entry.field("id");
            match positions.get(&id) {
                // An invalid id is empty and already has a problem.
                None if id.is_empty() => {}
                None => {
                    let message = format!("no earlier task of the batch has the id \"{id}\"");
                    reading.add(place, ProblemCode::UnknownDependency, message);
                }
                Some(&parent) => {
                    let requires_success = dependency.requires_success.unwrap_or(true);
                    if dependencies.insert(parent, Dependency { parent, requires_success }).is_some() {
                        reading.add(place, ProblemCode::NotUnique, format!("\"{id}\" is named twice"));
                    }
                }
            }
        }
        dependencies.into_values().collect()
    }
}
