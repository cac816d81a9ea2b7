//! Requests that create tasks. Each task becomes a tree by itself, and the bodies of actions never do.

use std::collections::{BTreeSet, HashMap};

use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::RequestLimits;
use super::fields::Fields;
use super::input::{FieldInput, Input, Schemas, input, reference};
use super::limits::TASKS_PER_BATCH;
use super::new_action::{ActionList, texts};
use super::new_task::{NewTask, TaskInput};
use super::problems::{FieldProblem, ProblemCode};
use super::reading::{Place, Reading, Source};
use super::values::{MetadataInput, Text};
use crate::domain::json;
use crate::domain::webhook::Action;

/// The most lists of fields by which the tasks of one kind are compared. Each list costs a pass over all tasks of that
/// kind in the request.
pub const MAX_FIELD_LISTS: usize = 20;

input! {
    /// A batch of tasks with settings of the batch.
    pub struct BatchInput as "BatchInput" {
        /// The tasks, parents before children.
        tasks: TaskList,
        /// Webhooks called when every task of the batch has ended.
        on_batch_complete: Option<ActionList>,
        /// A label of the batch, a filter of `GET /batches`.
        scope: Option<Text<1, 255>>,
        /// Any JSON object of at most 64 KiB.
        metadata: Option<MetadataInput>,
        /// The `fair_key` of tasks without their own.
        fair_key: Option<Text<1, 255>>,
        /// Whether to cancel a task of the batch once a failure or cancellation leaves it without an alive child. The
        /// default is `DEAD_END_CANCEL`.
        dead_end_cancel: Option<bool>,
    }
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

impl NewBatch {
    /// Returns the fair key of a task, or an empty string if neither the task nor the batch has one.
    pub fn fair_key_of<'a>(&'a self, task: &'a NewTask) -> &'a str {
        task.fair_key.as_deref().or(self.fair_key.as_deref()).unwrap_or_default()
    }
}

/// The body of a request that creates tasks: an array of tasks, or an object with settings of the batch.
pub struct CreateTasks;

impl CreateTasks {
    pub fn define(schemas: &mut Schemas) {
        BatchInput::define(schemas);
        schemas.insert("TaskList".into(), {
            let mut list = TaskList::schema();
            list["description"] = json!("Tasks without settings of their batch, parents before children.");
            list
        });
        let schema = json!({
            "description": "A batch of tasks: an array of tasks, or an object with settings of the batch.",
            "oneOf": [reference("TaskList"), reference("BatchInput")],
        });
        schemas.insert("CreateTasks".into(), schema);
    }
}

/// Reads the body of a request that creates tasks. An empty body counts as `{}`.
pub fn read_batch(body: &[u8], limits: &RequestLimits) -> Result<NewBatch, Vec<FieldProblem>> {
    let mut reading = Reading::new(limits);
    let at = Place::named("");
    let body = if body.is_empty() { b"{}" } else { body };
    let input = match serde_json::from_slice::<&RawValue>(body) {
        Ok(text) if text.get().starts_with('[') => {
            let tasks = TaskList::read(Source::Text(text), at, &mut reading);
            tasks.map(|tasks| BatchInput { tasks, ..BatchInput::default() })
        }
        Ok(text) if text.get().starts_with('{') => read_object(text, at, &mut reading),
        Ok(_) => {
            reading.add(at, ProblemCode::WrongType, "must be an array of tasks or an object with `tasks`");
            None
        }
        Err(error) => {
            reading.add(at, ProblemCode::Malformed, format!("is not valid JSON: {error}"));
            None
        }
    };
    let batch = input.map(|input| NewBatch {
        tasks: input.tasks.0,
        on_batch_complete: input.on_batch_complete.map_or(Vec::new(), |list| list.actions),
        scope: input.scope.map(|scope| scope.0),
        metadata: input.metadata.and_then(|metadata| metadata.0),
        fair_key: input.fair_key.map(|key| key.0),
        dead_end_cancel: input.dead_end_cancel.unwrap_or(limits.dead_end_cancel),
        bytes: body.len(),
    });
    reading.problems.or(batch)
}

/// Reads the object form. Its fields besides tasks and actions become trees only if they are small.
fn read_object(text: &RawValue, at: Place, reading: &mut Reading) -> Option<BatchInput> {
    let mut fields = Fields::open(Source::Text(text), at, |_| true, reading)?;
    let most = reading.limits.task_bytes;
    if let Err(size) = fields.parse_texts(BatchInput::keeps_text, most, reading) {
        let message = format!(
            "the fields other than tasks and on_batch_complete must have at most {most} bytes, not {size} \
             (MAX_TASK_BYTES)"
        );
        reading.add(at, ProblemCode::TooLarge, message);
    }
    let batch = BatchInput::read_fields(fields, reading);
    let (count, most) =
        (batch.on_batch_complete.as_ref().map_or(0, |list| list.total), reading.limits.actions_per_task);
    if count > most {
        let message = format!("must have at most {most} actions, not {count}");
        reading.add(at.field("on_batch_complete"), ProblemCode::WrongCount, message);
    }
    Some(batch)
}

/// The tasks of a batch.
#[derive(Debug, Default)]
pub struct TaskList(pub Vec<NewTask>);

impl Input for TaskList {
    const KEEPS_TEXT: bool = true;

    fn read(source: Source, at: Place, reading: &mut Reading) -> Option<TaskList> {
        let most = reading.limits.tasks_per_batch;
        let (items, count) = texts(&source, most, at, reading)?;
        if count > most {
            let message = format!("must have at most {most} tasks, not {count} (MAX_TASKS_PER_BATCH)");
            reading.add(at, ProblemCode::WrongCount, message);
            return None;
        }
        let tasks = read_tasks(&items, at, reading);
        let links: usize = tasks.iter().map(|task| task.dependencies.len()).sum();
        let most = reading.limits.links_per_batch;
        if links > most {
            let message = format!("must have at most {most} dependencies in all, not {links} (MAX_LINKS_PER_BATCH)");
            reading.add(at, ProblemCode::WrongCount, message);
        }
        if let Some(kind) = kind_with_too_many_lists(&tasks) {
            let what = format!("dedupe_strategy must compare tasks of the kind \"{kind}\"");
            let message = format!("{what} by at most {MAX_FIELD_LISTS} different lists of fields");
            reading.add(at, ProblemCode::WrongCount, message);
        }
        Some(TaskList(tasks))
    }

    fn schema() -> Value {
        json!({"type": "array", "items": TaskInput::schema(), "x-limit": TASKS_PER_BATCH})
    }

    fn define(schemas: &mut Schemas) {
        TaskInput::define(schemas);
    }
}

fn read_tasks(items: &[&RawValue], at: Place, reading: &mut Reading) -> Vec<NewTask> {
    let mut tasks: Vec<NewTask> = Vec::with_capacity(items.len());
    let mut positions: HashMap<String, usize> = HashMap::new();
    for (i, item) in items.iter().enumerate() {
        let at = at.item(i);
        if item.get().len() > reading.limits.task_bytes && !fits(item, at, reading) {
            continue;
        }
        let Some(input) = TaskInput::read(Source::Text(item), at, reading) else { continue };
        let task = input.task(&positions, at, reading);
        if let Some(id) = &task.local_id
            && positions.insert(id.clone(), i).is_some()
        {
            reading.add(at.field("id"), ProblemCode::NotUnique, format!("\"{id}\" is used twice"));
        }
        if let Some(size) = stored_size_if_too_large(item, &task, reading.limits) {
            reading.add(at, ProblemCode::TooLarge, too_large(size, reading.limits));
        }
        for dependency in &task.dependencies {
            if let Some(parent) = tasks.get_mut(dependency.parent) {
                parent.has_children = true;
            }
        }
        tasks.push(task);
    }
    tasks
}

/// Whether the text of a task is small enough. A larger task is never parsed into a tree: only its actions are checked,
/// because one of them may be what is too large.
fn fits(text: &RawValue, at: Place, reading: &mut Reading) -> bool {
    let size = json::compact_len(text.get());
    if size <= reading.limits.task_bytes {
        return true;
    }
    reading.add(at, ProblemCode::TooLarge, too_large(size, reading.limits));
    if let Some(mut fields) =
        text.get().starts_with('{').then(|| Fields::open(Source::Text(text), at, |_| true, reading)).flatten()
    {
        Option::<Action>::take_from(&mut fields, "on_start", reading);
        for list in ["on_success", "on_failure", "on_retry"] {
            Option::<ActionList>::take_from(&mut fields, list, reading);
        }
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
#[path = "tests/new_batch.rs"]
mod tests;
