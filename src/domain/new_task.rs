//! Requests that create tasks, from JSON to values that obey every limit.

use std::collections::{BTreeMap, HashMap};

use chrono::{DateTime, Utc};
use serde_json::Value;

use super::dedupe::{self, MOST_LISTS};
use super::input::{Fields, Problems, refuse_nul};
use super::matcher::{Matcher, read_strategy};
use super::new_policy::read_policy;
use super::policy::Policy;
use super::retry;
use super::rules::{Bearer, Rule, read_rules};
use super::status::Status;
use super::task::Flags;
use super::webhook::{Action, ActionKind, Actions, RESERVED_HEADERS, Verb, WebhookParams};

/// What the configuration allows a request to hold, and what it means where a request is silent.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub tasks_per_batch: usize,
    pub dependencies_per_task: usize,
    pub links_per_batch: usize,
    pub actions_per_task: usize,
    pub metadata_bytes: usize,
    pub retry: retry::Limits,
    /// Whether batches that do not say so have their dead ends canceled.
    pub dead_end_cancel: bool,
}

#[derive(Debug, PartialEq)]
pub struct NewBatch {
    pub tasks: Vec<NewTask>,
    pub on_batch_complete: Vec<Action>,
    pub scope: Option<String>,
    pub metadata: Option<Value>,
    /// Of tasks that bring none.
    pub fair_key: Option<String>,
    pub dead_end_cancel: bool,
    /// About how much of it there is to store.
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
    /// Positions of earlier tasks of the batch.
    pub dependencies: Vec<Dependency>,
    pub has_children: bool,
    /// It is not created if one of these finds a task that is there already.
    pub dedupe_strategy: Vec<Matcher>,
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
    /// Explicitly none, even if the kind has one.
    OptOut,
    /// Not a word: the default of the kind, if there is one.
    OfKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dependency {
    pub parent: usize,
    pub requires_success: bool,
}

impl NewBatch {
    /// Empty for a task without one.
    pub fn fair_key_of<'a>(&'a self, task: &'a NewTask) -> &'a str {
        task.fair_key.as_deref().or(self.fair_key.as_deref()).unwrap_or_default()
    }
}

impl NewTask {
    /// `dead_end_cancel` is what its batch says.
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

pub fn read_batch(body: Value, limits: &Limits) -> Result<NewBatch, Vec<String>> {
    let mut problems = Problems::default();
    refuse_nul(&body, "", &mut problems);
    let batch = match body {
        Value::Array(items) => Some(NewBatch {
            tasks: read_tasks(items, "", limits, &mut problems),
            on_batch_complete: Vec::new(),
            scope: None,
            metadata: None,
            fair_key: None,
            dead_end_cancel: limits.dead_end_cancel,
            bytes: 0,
        }),
        Value::Object(_) => Fields::open(body, "", &mut problems).map(|mut fields| {
            fields.require("tasks", &mut problems);
            let items = fields.array("tasks", &mut problems).unwrap_or_default();
            let batch = NewBatch {
                tasks: read_tasks(items, "tasks", limits, &mut problems),
                on_batch_complete: read_actions(&mut fields, "on_batch_complete", &mut problems),
                scope: fields.string("scope", 1..=255, &mut problems),
                metadata: read_metadata(&mut fields, limits, &mut problems),
                fair_key: fields.string("fair_key", 1..=255, &mut problems),
                dead_end_cancel: fields.boolean("dead_end_cancel", &mut problems).unwrap_or(limits.dead_end_cancel),
                bytes: 0,
            };
            if batch.on_batch_complete.len() > limits.actions_per_task {
                problems.add("on_batch_complete", format!("must have at most {} actions", limits.actions_per_task));
            }
            fields.close(&mut problems);
            batch
        }),
        _ => {
            problems.add("", "must be an array of tasks or an object with `tasks`");
            None
        }
    };
    problems.or(batch)
}

/// An action as it may come back in the answer to `on_start`: `None` where there is none, or none that is valid.
pub fn read_answered_action(answer: &[u8]) -> Option<Action> {
    let value: Value = serde_json::from_slice(answer).ok()?;
    let mut problems = Problems::default();
    refuse_nul(&value, "", &mut problems);
    let action = read_action(value, "answer", &mut problems);
    problems.or(action).ok()
}

fn read_tasks(items: Vec<Value>, path: &str, limits: &Limits, problems: &mut Problems) -> Vec<NewTask> {
    if items.len() > limits.tasks_per_batch {
        let (most, count) = (limits.tasks_per_batch, items.len());
        problems.add(path, format!("must have at most {most} tasks, not {count} (MAX_TASKS_PER_BATCH)"));
        return Vec::new();
    }
    let mut tasks: Vec<NewTask> = Vec::with_capacity(items.len());
    let mut positions: HashMap<String, usize> = HashMap::new();
    let mut links = 0;
    for (i, item) in items.into_iter().enumerate() {
        let Some(mut fields) = Fields::open(item, format!("{path}[{i}]"), problems) else { continue };
        let id = fields.string("id", 1..=255, problems);
        let task = read_task(&mut fields, &positions, limits, problems);
        if let Some(id) = id
            && positions.insert(id.clone(), i).is_some()
        {
            problems.add(fields.path("id"), format!("\"{id}\" is used twice"));
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
    if let Some(kind) = dedupe::too_mixed(&tasks) {
        let what = format!("dedupe_strategy must compare tasks of the kind \"{kind}\"");
        problems.add(path, format!("{what} by at most {MOST_LISTS} different lists of fields"));
    }
    tasks
}

fn read_task(
    fields: &mut Fields,
    positions: &HashMap<String, usize>,
    limits: &Limits,
    problems: &mut Problems,
) -> NewTask {
    let name = fields.required_string("name", 1..=255, problems).unwrap_or_default();
    let kind = fields.required_string("kind", 1..=100, problems).unwrap_or_default();
    let mut task = NewTask {
        name,
        rules: read_rules(fields, &kind, problems),
        kind,
        timeout_secs: fields.integer("timeout", 1..=86_400, problems).unwrap_or(60),
        metadata: read_metadata(fields, limits, problems),
        priority: fields.integer("priority", -1000..=1000, problems).unwrap_or(0),
        actions: Actions {
            on_start: fields.take("on_start").and_then(|value| read_action(value, &fields.path("on_start"), problems)),
            on_success: read_actions(fields, "on_success", problems),
            on_failure: read_actions(fields, "on_failure", problems),
            on_retry: read_actions(fields, "on_retry", problems),
            cancel: None,
        },
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
    let bearer = Bearer { metadata: task.metadata.as_ref(), has_expected_count: task.expected_count.is_some() };
    for (i, rule) in task.rules.iter().enumerate() {
        if let Some(problem) = bearer.problem(rule) {
            problems.add(fields.path(&format!("rules[{i}]")), problem);
        }
    }
    let lists = [&task.actions.on_success, &task.actions.on_failure, &task.actions.on_retry];
    let actions: usize = lists.iter().map(|list| list.len()).sum();
    if actions > limits.actions_per_task {
        let most = limits.actions_per_task;
        problems.add(
            fields.path("on_success"),
            format!("and on_failure and on_retry must have at most {most} actions together"),
        );
    }
    task
}

fn read_retry(fields: &mut Fields, limits: &Limits, problems: &mut Problems) -> RetryChoice {
    if !fields.names("retry") {
        return RetryChoice::OfKind;
    }
    let Some(value) = fields.take("retry") else { return RetryChoice::OptOut };
    read_policy(value, &fields.path("retry"), &limits.retry, problems).map_or(RetryChoice::OptOut, RetryChoice::Own)
}

fn read_dependencies(
    fields: &mut Fields,
    positions: &HashMap<String, usize>,
    limits: &Limits,
    problems: &mut Problems,
) -> Vec<Dependency> {
    let path = fields.path("dependencies");
    let items = fields.array("dependencies", problems).unwrap_or_default();
    if items.len() > limits.dependencies_per_task {
        let most = limits.dependencies_per_task;
        problems.add(path, format!("must have at most {most} entries (MAX_DEPENDENCIES_PER_TASK)"));
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

pub(super) fn read_metadata(fields: &mut Fields, limits: &Limits, problems: &mut Problems) -> Option<Value> {
    let metadata = fields.object("metadata", problems)?;
    let size = metadata.to_string().len();
    if size > limits.metadata_bytes {
        let most = limits.metadata_bytes;
        problems.add(fields.path("metadata"), format!("must have at most {most} bytes, not {size}"));
    }
    Some(metadata).filter(|m| m.as_object().is_some_and(|m| !m.is_empty()))
}

fn read_actions(fields: &mut Fields, name: &str, problems: &mut Problems) -> Vec<Action> {
    let path = fields.path(name);
    let items = fields.array(name, problems).unwrap_or_default();
    let read = |(i, item)| read_action(item, &format!("{path}[{i}]"), problems);
    items.into_iter().enumerate().filter_map(read).collect()
}

fn read_action(value: Value, path: &str, problems: &mut Problems) -> Option<Action> {
    let mut fields = Fields::open(value, path, problems)?;
    fields.require("kind", problems);
    let kind = fields.choice("kind", &[("Webhook", ActionKind::Webhook)], problems);
    fields.require("params", problems);
    let params_path = fields.path("params");
    let params = fields.take("params").and_then(|value| read_params(value, &params_path, problems));
    fields.close(problems);
    Some(Action { kind: kind?, params: params? })
}

fn read_params(value: Value, path: &str, problems: &mut Problems) -> Option<WebhookParams> {
    let mut fields = Fields::open(value, path, problems)?;
    let url = fields.required_string("url", 1..=2048, problems);
    if let Some(problem) = url.as_deref().and_then(url_problem) {
        problems.add(fields.path("url"), problem);
    }
    let verbs = [
        ("Get", Verb::Get),
        ("Post", Verb::Post),
        ("Put", Verb::Put),
        ("Patch", Verb::Patch),
        ("Delete", Verb::Delete),
    ];
    fields.require("verb", problems);
    let verb = fields.choice("verb", &verbs, problems);
    let body = fields.take("body");
    let headers = fields.object("headers", problems);
    let mut checked = BTreeMap::new();
    if let Some(Value::Object(headers)) = headers {
        for (name, value) in headers {
            match header_problem(&name, &value) {
                Some(problem) => problems.add(fields.path(&format!("headers.{name}")), problem),
                None => {
                    checked.insert(name, value.as_str().unwrap_or_default().to_owned());
                }
            }
        }
    }
    fields.close(problems);
    Some(WebhookParams { url: url?, verb: verb?, body, headers: checked })
}

fn url_problem(text: &str) -> Option<String> {
    match url::Url::parse(text) {
        Err(error) => Some(format!("is not a URL: {error}")),
        Ok(url) if !matches!(url.scheme(), "http" | "https") => Some("must start with http:// or https://".into()),
        Ok(_) => None,
    }
}

fn header_problem(name: &str, value: &Value) -> Option<String> {
    let token = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
    if name.is_empty() || !name.chars().all(token) {
        return Some("is not a header name".into());
    }
    if RESERVED_HEADERS.contains(&name.to_ascii_lowercase().as_str()) {
        return Some("is set by the service itself".into());
    }
    match value.as_str() {
        None => Some("must be a string".into()),
        Some(text) if text.len() > 8192 => Some("must have at most 8192 bytes".into()),
        Some(text) if !text.chars().all(|c| c == ' ' || c == '\t' || c.is_ascii_graphic()) => {
            Some("must be visible ASCII".into())
        }
        Some(_) => None,
    }
}

#[cfg(test)]
#[path = "new_task_tests.rs"]
mod tests;
