//! Reads requests that create tasks and checks them against every limit.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use chrono::{DateTime, Utc};
use serde_json::Value;
use serde_json::value::RawValue;

use super::fields::Fields;
use super::new_action::{read_action, read_actions};
use super::new_policy::read_policy;
use super::problems::Problems;
use crate::domain::matcher::{DedupeMatcher, read_strategy};
use crate::domain::retry::policy::Policy;
use crate::domain::rules::{Rule, RuleTarget, read_rules};
use crate::domain::task::Flags;
use crate::domain::task::status::Status;
use crate::domain::webhook::{Action, Actions};
use crate::domain::{json, retry};

/// The most lists of fields by which the tasks of one kind are compared. Each list costs a pass over all tasks of that
/// kind in the request.
pub const MAX_FIELD_LISTS: usize = 20;

/// The limits of requests and the defaults for what they leave out, from the configuration.
#[derive(Clone, Copy, Debug)]
pub struct RequestLimits {
    pub tasks_per_batch: usize,
    pub dependencies_per_task: usize,
    pub links_per_batch: usize,
    pub actions_per_task: usize,
    pub metadata_bytes: usize,
    /// Bytes of one action: URL, headers and body.
    pub action_bytes: usize,
    /// Bytes of one task with all its actions.
    pub task_bytes: usize,
    pub retry: retry::RetryLimits,
    /// Whether to cancel dead ends in batches that do not say.
    pub dead_end_cancel: bool,
}

#[derive(Debug, PartialEq)]
pub struct NewBatch {
    pub tasks: Vec<NewTask>,
    pub on_batch_complete: Vec<Action>,
    pub scope: Option<String>,
    pub metadata: Option<Value>,
    /// The fair key of tasks that have none of their own.
    pub fair_key: Option<String>,
    pub dead_end_cancel: bool,
    /// Approximate number of bytes to store.
    pub bytes: usize,
}

#[derive(Debug, PartialEq)]
pub struct NewTask {
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

impl NewBatch {
    /// Returns the fair key of a task, or an empty string if neither the task nor the batch has one.
    pub fn fair_key_of<'a>(&'a self, task: &'a NewTask) -> &'a str {
        task.fair_key.as_deref().or(self.fair_key.as_deref()).unwrap_or_default()
    }
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

/// Reads the body of a request that creates tasks. An empty body counts as `{}`.
pub fn read_batch(body: &[u8], limits: &RequestLimits) -> Result<NewBatch, Vec<String>> {
    let mut problems = Problems::default();
    let body = if body.is_empty() { b"{}" } else { body };
    let batch = match serde_json::from_slice::<&RawValue>(body) {
        Ok(text) if text.get().starts_with('[') => {
            let items = json::items(text.get(), limits.tasks_per_batch).ok();
            items.map(|items| NewBatch {
                tasks: read_tasks(&items, "", limits, &mut problems),
                on_batch_complete: Vec::new(),
                scope: None,
                metadata: None,
                fair_key: None,
                dead_end_cancel: limits.dead_end_cancel,
                bytes: body.len(),
            })
        }
        Ok(text) if text.get().starts_with('{') => read_object(text, limits, &mut problems),
        Ok(_) => {
            problems.add("", "must be an array of tasks or an object with `tasks`");
            None
        }
        Err(error) => {
            problems.add("", format!("is not valid JSON: {error}"));
            None
        }
    };
    problems.or(batch)
}

fn read_object(text: &RawValue, limits: &RequestLimits, problems: &mut Problems) -> Option<NewBatch> {
    let mut fields = Fields::open_text(text, "", |_| true, problems)?;
    fields.require("tasks", problems);
    let items = fields.texts("tasks", limits.tasks_per_batch, problems).unwrap_or_default();
    let most = (limits.actions_per_task, limits.action_bytes);
    let (on_batch_complete, actions) = read_actions(&mut fields, "on_batch_complete", most, problems);
    if actions > limits.actions_per_task {
        let most = limits.actions_per_task;
        problems.add("on_batch_complete", format!("must have at most {most} actions, not {actions}"));
    }
    if let Err(size) = fields.parse_texts(limits.task_bytes, problems) {
        let what = format!("must have at most {} bytes, not {size} (MAX_TASK_BYTES)", limits.task_bytes);
        problems.add("", format!("the fields other than tasks and on_batch_complete {what}"));
    }
    let batch = NewBatch {
        tasks: read_tasks(&items, "tasks", limits, problems),
        on_batch_complete,
        scope: fields.string("scope", 1..=255, problems),
        metadata: read_metadata(&mut fields, limits, problems),
        fair_key: fields.string("fair_key", 1..=255, problems),
        dead_end_cancel: fields.boolean("dead_end_cancel", problems).unwrap_or(limits.dead_end_cancel),
        bytes: text.get().len(),
    };
    fields.close(problems);
    Some(batch)
}

/// Reads the tasks of a batch. `items` are the first ones, at most as many as are allowed; `count` is the number of
/// all.
fn read_tasks(
    (items, count): &(Vec<&RawValue>, usize),
    path: &str,
    limits: &RequestLimits,
    problems: &mut Problems,
) -> Vec<NewTask> {
    if *count > limits.tasks_per_batch {
        let most = limits.tasks_per_batch;
        problems.add(path, format!("must have at most {most} tasks, not {count} (MAX_TASKS_PER_BATCH)"));
        return Vec::new();
    }
    let mut tasks: Vec<NewTask> = Vec::with_capacity(items.len());
    let mut positions: HashMap<String, usize> = HashMap::new();
    let mut links = 0;
    for (i, item) in items.iter().enumerate() {
        let path = format!("{path}[{i}]");
        if item.get().len() > limits.task_bytes && !fits(item, &path, limits, problems) {
            continue;
        }
        let Some(mut fields) = Fields::open_text(item, &*path, is_action, problems) else { continue };
        let id = fields.string("id", 1..=255, problems);
        let task = read_task(&mut fields, &positions, limits, problems);
        if let Some(id) = id
            && positions.insert(id.clone(), i).is_some()
        {
            problems.add(fields.path("id"), format!("\"{id}\" is used twice"));
        }
        if let Some(size) = stored_size_if_too_large(item, &task, limits) {
            problems.add(path, too_large(size, limits));
        }
        fields.close(problems);
        links += task.dependencies.len();
        for dependency in &task.dependencies {
            if let Some(parent) = tasks.get_mut(dependency.parent) {
                parent.has_children = true;
            }
        }
        tasks.push(task);
    }
    if links > limits.links_per_batch {
        let most = limits.links_per_batch;
        problems.add(path, format!("must have at most {most} dependencies in all, not {links} (MAX_LINKS_PER_BATCH)"));
    }
    if let Some(kind) = kind_with_too_many_lists(&tasks) {
        let what = format!("dedupe_strategy must compare tasks of the kind \"{kind}\"");
        problems.add(path, format!("{what} by at most {MAX_FIELD_LISTS} different lists of fields"));
    }
    tasks
}

fn is_action(name: &str) -> bool {
    ["on_start", "on_success", "on_failure", "on_retry"].contains(&name)
}

/// Whether the text of a task is small enough. A larger task is never parsed into a tree: only its actions are checked,
/// because one of them may be what is too large.
fn fits(text: &RawValue, path: &str, limits: &RequestLimits, problems: &mut Problems) -> bool {
    let size = json::compact_len(text.get());
    if size <= limits.task_bytes {
        return true;
    }
    problems.add(path, too_large(size, limits));
    if let Some(mut fields) =
        text.get().starts_with('{').then(|| Fields::open_text(text, path, |_| true, problems)).flatten()
    {
        read_task_actions(&mut fields, limits, problems);
    }
    false
}

fn too_large(size: usize, limits: &RequestLimits) -> String {
    format!("must have at most {} bytes, not {size} (MAX_TASK_BYTES)", limits.task_bytes)
}

/// Returns the size of a task that is too large because PostgreSQL writes out the numbers of its metadata.
fn stored_size_if_too_large(text: &RawValue, task: &NewTask, limits: &RequestLimits) -> Option<usize> {
    let metadata = task.metadata.as_ref()?;
    let stored = json::stored_len(metadata);
    if text.get().len() + stored <= limits.task_bytes {
        return None;
    }
    let size = json::compact_len(text.get()) + stored.saturating_sub(metadata.to_string().len());
    (size > limits.task_bytes).then_some(size)
}

/// Reads the actions of a task. Also returns the number of its notifications.
fn read_task_actions(fields: &mut Fields, limits: &RequestLimits, problems: &mut Problems) -> (Actions, usize) {
    let on_start = read_action(fields, "on_start", limits.action_bytes, problems);
    let most = (limits.actions_per_task, limits.action_bytes);
    let mut count = 0;
    let mut list = |name| {
        let (actions, all) = read_actions(fields, name, most, problems);
        count += all;
        actions
    };
    let (on_success, on_failure, on_retry) = (list("on_success"), list("on_failure"), list("on_retry"));
    (Actions { on_start, on_success, on_failure, on_retry, cancel: None }, count)
}

fn read_task(
    fields: &mut Fields,
    positions: &HashMap<String, usize>,
    limits: &RequestLimits,
    problems: &mut Problems,
) -> NewTask {
    let name = fields.required_text("name", 1..=255, problems).unwrap_or_default();
    let kind = fields.required_text("kind", 1..=100, problems).unwrap_or_default();
    let (actions, notifications) = read_task_actions(fields, limits, problems);
    let mut task = NewTask {
        name,
        rules: read_rules(fields, &kind, problems),
        kind,
        timeout_secs: fields.integer("timeout", 1..=86_400, problems).unwrap_or(60),
        metadata: read_metadata(fields, limits, problems),
        priority: fields.integer("priority", -1000..=1000, problems).unwrap_or(0),
        actions,
        dependencies: read_dependencies(fields, positions, limits, problems),
        has_children: false,
        dedupe_strategy: Vec::new(),
        expected_count: fields.integer("expected_count", 0..=i32::MAX, problems),
        dead_end_barrier: fields.boolean("dead_end_barrier", problems).unwrap_or(false),
        retry: read_retry(fields, limits, problems),
        run_at: fields.timestamp("run_at", problems),
        fair_key: fields.string("fair_key", 1..=255, problems),
    };
    task.dedupe_strategy = read_strategy(fields, &task.kind, task.metadata.as_ref(), problems);
    let target = RuleTarget { metadata: task.metadata.as_ref(), has_expected_count: task.expected_count.is_some() };
    for (i, rule) in task.rules.iter().enumerate() {
        if let Some(problem) = target.problem(rule) {
            problems.add(fields.path(&format!("rules[{i}]")), problem);
        }
    }
    if notifications > limits.actions_per_task {
        let most = limits.actions_per_task;
        problems.add(
            fields.path("on_success"),
            format!("with on_failure and on_retry, must have at most {most} actions in total, not {notifications}"),
        );
    }
    task
}

fn read_retry(fields: &mut Fields, limits: &RequestLimits, problems: &mut Problems) -> RetryChoice {
    if !fields.contains("retry") {
        return RetryChoice::OfKind;
    }
    let Some(value) = fields.take("retry") else { return RetryChoice::OptOut };
    read_policy(value, &fields.path("retry"), &limits.retry, problems).map_or(RetryChoice::OptOut, RetryChoice::Own)
}

fn read_dependencies(
    fields: &mut Fields,
    positions: &HashMap<String, usize>,
    limits: &RequestLimits,
    problems: &mut Problems,
) -> Vec<Dependency> {
    let path = fields.path("dependencies");
    let items = fields.array("dependencies", problems).unwrap_or_default();
    if items.len() > limits.dependencies_per_task {
        let most = limits.dependencies_per_task;
        problems
            .add(path, format!("must have at most {most} entries, not {} (MAX_DEPENDENCIES_PER_TASK)", items.len()));
        return Vec::new();
    }
    let mut dependencies: BTreeMap<usize, Dependency> = BTreeMap::new();
    for (i, item) in items.into_iter().enumerate() {
        let Some(mut fields) = Fields::open(item, format!("{path}[{i}]"), problems) else { continue };
        let id = fields.required_string("id", 1..=255, problems);
        let requires_success = fields.boolean("requires_success", problems).unwrap_or(true);
        if let Some(id) = id {
            match positions.get(&id) {
                None => problems.add(fields.path("id"), format!("no earlier task of the batch has the id \"{id}\"")),
                Some(&parent) => {
                    if dependencies.insert(parent, Dependency { parent, requires_success }).is_some() {
                        problems.add(fields.path("id"), format!("\"{id}\" is named twice"));
                    }
                }
            }
        }
        fields.close(problems);
    }
    dependencies.into_values().collect()
}

pub(in crate::domain) fn read_metadata(
    fields: &mut Fields,
    limits: &RequestLimits,
    problems: &mut Problems,
) -> Option<Value> {
    let metadata = fields.object("metadata", problems)?;
    let size = json::stored_len(&metadata);
    if size > limits.metadata_bytes {
        let most = limits.metadata_bytes;
        problems.add(fields.path("metadata"), format!("must have at most {most} bytes, not {size}"));
    }
    Some(metadata).filter(|m| m.as_object().is_some_and(|m| !m.is_empty()))
}

/// Returns the lists of fields by which matchers compare the tasks of each kind.
pub fn compared_lists(tasks: &[NewTask]) -> HashMap<&str, BTreeSet<&[String]>> {
    let mut lists: HashMap<&str, BTreeSet<&[String]>> = HashMap::new();
    for matcher in tasks.iter().flat_map(|task| &task.dedupe_strategy) {
        lists.entry(&matcher.kind).or_default().insert(&matcher.fields);
    }
    lists
}

/// Returns a kind whose tasks are compared by too many lists of fields.
fn kind_with_too_many_lists(tasks: &[NewTask]) -> Option<&str> {
    compared_lists(tasks).into_iter().filter(|(_, lists)| lists.len() > MAX_FIELD_LISTS).map(|(kind, _)| kind).min()
}

#[cfg(test)]
#[path = "tests/new_task.rs"]
mod tests;
