use std::collections::BTreeMap;

use serde_json::json;

use super::*;
use crate::domain::matcher::DedupeMatcher;
use crate::domain::request::new_action::read_answered_action;
use crate::domain::request::new_task::{Dependency, RetryChoice};
use crate::domain::retry::policy::Policy;
use crate::domain::sample::LIMITS;
use crate::domain::task::Flags;
use crate::domain::task::status::Status;
use crate::domain::webhook::{ActionKind, Actions, RESERVED_HEADERS, Verb, WebhookParams};

mod arbitrary;
mod new_action;

#[allow(clippy::needless_pass_by_value, reason = "called with `json!`")]
fn read(body: Value) -> Result<NewBatch, Vec<FieldProblem>> {
    read_batch(body.to_string().as_bytes(), &LIMITS)
}

fn problems(body: Value) -> Vec<FieldProblem> {
    read(body).expect_err("must be refused")
}

/// A task with its required fields and these.
fn task_with(more: Value) -> Value {
    let mut task = json!({"name": "n", "kind": "k"});
    if let (Value::Object(task), Value::Object(more)) = (&mut task, more) {
        task.extend(more);
    }
    task
}

fn read_one(more: Value) -> Result<NewTask, Vec<FieldProblem>> {
    read(json!([task_with(more)])).map(|mut batch| batch.tasks.remove(0))
}

/// Checks that each value of the field is refused for one reason, which names the field.
fn refuse_each(field: &str, values: impl IntoIterator<Item = Value>) {
    for value in values {
        let found = read_one(json!({field: value})).expect_err(&format!("{field} = {value} must be refused"));
        assert!(found.len() == 1 && found[0].starts_with(&format!("[0].{field}: ")), "{field} = {value}: {found:?}");
    }
}

fn accept_each(field: &str, values: impl IntoIterator<Item = Value>) {
    for value in values {
        let read = read_one(json!({field: value}));
        assert!(read.is_ok(), "{field} = {value}: {read:?}");
    }
}

fn webhook(url: &str) -> Value {
    json!({"kind": "Webhook", "params": {"url": url, "verb": "Post"}})
}

#[test]
fn names_and_kinds_must_not_be_blank() {
    for blank in [" ", "\t\n", "\u{a0}\u{2003}"] {
        let found = read_batch(json!([{"name": blank, "kind": blank}]).to_string().as_bytes(), &LIMITS).unwrap_err();
        assert_eq!(found, ["[0].name: must not be blank", "[0].kind: must not be blank"], "{blank:?}");
    }
    assert!(read_batch(json!([{"name": " a ", "kind": "b c"}]).to_string().as_bytes(), &LIMITS).is_ok());
}

#[test]
fn a_new_task_has_defaults_for_absent_and_null_fields() {
    let expected = NewTask {
        local_id: None,
        name: "n".into(),
        kind: "k".into(),
        timeout_secs: 60,
        metadata: None,
        priority: 0,
        actions: Actions::default(),
        dependencies: Vec::new(),
        has_children: false,
        dedupe_strategy: Vec::new(),
        expected_count: None,
        dead_end_barrier: false,
        retry: RetryChoice::OfKind,
        run_at: None,
        rules: Vec::new(),
        fair_key: None,
    };
    assert_eq!(read_one(json!({})).unwrap(), expected);
    let nulls = json!({
        "id": null, "timeout": null, "metadata": null, "priority": null, "on_start": null, "on_success": null,
        "on_failure": null, "on_retry": null, "dependencies": null, "expected_count": null, "dead_end_barrier": null,
        "run_at": null, "rules": null, "dedupe_strategy": null, "fair_key": null,
    });
    assert_eq!(read_one(nulls).unwrap(), expected, "null is absent");
}

#[test]
fn all_fields_of_a_new_task_are_read() {
    let task = read_one(json!({
        "id": "local", "timeout": 5, "metadata": {"a": [1]}, "priority": -7, "on_start": webhook("http://w/s"),
        "on_success": [webhook("http://w/1"), webhook("http://w/2")], "on_failure": [webhook("https://w/f")],
        "on_retry": [webhook("http://w/r")],
        "expected_count": 9, "dead_end_barrier": true, "retry": {"max_retries": 2},
        "run_at": "2030-01-02T03:04:05+02:00", "dedupe_strategy": [{"status": "running", "fields": ["a"]}],
    }))
    .unwrap();
    assert_eq!((task.timeout_secs, task.priority, task.expected_count), (5, -7, Some(9)));
    assert_eq!(task.metadata, Some(json!({"a": [1]})));
    assert!(task.dead_end_barrier);
    let matcher = DedupeMatcher { kind: "k".into(), status: Some(Status::Running), fields: vec!["a".into()] };
    assert_eq!(task.dedupe_strategy, [matcher]);
    assert_eq!(task.run_at.unwrap().to_rfc3339(), "2030-01-02T01:04:05+00:00");
    assert!(matches!(&task.retry, RetryChoice::Own(policy) if policy.max_retries == 2), "{:?}", task.retry);
    let urls = |actions: &[Action]| actions.iter().map(|a| a.params.url.clone()).collect::<Vec<_>>();
    assert_eq!(urls(&task.actions.on_success), ["http://w/1", "http://w/2"]);
    assert_eq!(urls(&task.actions.on_failure), ["https://w/f"]);
    assert_eq!(urls(&task.actions.on_retry), ["http://w/r"]);
    assert_eq!(task.actions.on_start.as_ref().map(|a| a.params.url.as_str()), Some("http://w/s"));
    assert_eq!(task.actions.cancel, None);
    let flags = task.flags(false);
    assert!(flags.has(Flags::ON_START) && flags.has(Flags::ON_SUCCESS) && flags.has(Flags::ON_FAILURE));
    assert!(flags.has(Flags::ON_RETRY));
    assert!(!flags.has(Flags::HAS_CHILDREN));
}

#[test]
fn dead_end_cancel_defaults_to_the_configuration() {
    for configured in [false, true] {
        let limits = RequestLimits { dead_end_cancel: configured, ..LIMITS };
        let wanted = |body: Value| read_batch(body.to_string().as_bytes(), &limits).unwrap().dead_end_cancel;
        assert_eq!(wanted(json!([])), configured);
        for (given, expected) in [(json!(null), configured), (json!(true), true), (json!(false), false)] {
            assert_eq!(wanted(json!({"tasks": [], "dead_end_cancel": given})), expected);
        }
    }
    assert_eq!(problems(json!({"tasks": [], "dead_end_cancel": 1})).len(), 1);
    let tasks = json!([
        task_with(json!({"id": "a"})),
        task_with(json!({"dependencies": [{"id": "a"}]})),
        task_with(json!({"dependencies": [{"id": "a"}], "dead_end_barrier": true}))
    ]);
    let tasks = read(tasks).unwrap().tasks;
    let flags = |on: bool| -> Vec<(bool, bool)> {
        let flags = tasks.iter().map(|task| task.flags(on));
        flags.map(|flags| (flags.has(Flags::DEAD_END), flags.has(Flags::TELLS_PARENTS))).collect()
    };
    assert_eq!(flags(false), [(false, false); 3]);
    assert_eq!(
        flags(true),
        [(true, false), (true, true), (true, false)],
        "neither a root nor a barrier tells its parents"
    );
}

#[test]
fn a_new_task_has_its_own_policy_the_default_or_none() {
    assert_eq!(read_one(json!({})).unwrap().retry, RetryChoice::OfKind);
    assert_eq!(read_one(json!({"retry": null})).unwrap().retry, RetryChoice::OptOut);
    let own = read_one(json!({"retry": {"max_retries": 1, "strategy": "immediate"}})).unwrap().retry;
    assert!(matches!(&own, RetryChoice::Own(policy) if policy.max_retries == 1), "{own:?}");
    assert_eq!(read_one(json!({"retry": {}})).unwrap_err(), ["[0].retry.max_retries: is required"]);
}

#[test]
fn fields_of_a_new_task_have_limits() {
    let long = |count| json!("ä".repeat(count));
    for (field, most) in [("name", 255), ("kind", 100), ("id", 255)] {
        accept_each(field, [long(1), long(most)]);
        refuse_each(field, [json!(""), long(most + 1)]);
    }
    for (field, low, high) in [("timeout", 1, 86_400), ("priority", -1000, 1000), ("expected_count", 0, i32::MAX)] {
        accept_each(field, [json!(low), json!(high)]);
        let far = [json!(i64::MIN), json!(i64::MAX), json!(u64::MAX), json!(1.5), json!(1e300)];
        refuse_each(field, [json!(i64::from(low) - 1), json!(i64::from(high) + 1)].into_iter().chain(far));
    }
    accept_each("run_at", [json!("1970-01-01T00:00:00Z"), json!("9999-12-31T23:59:59.999999Z")]);
    let years = ["9999-12-31T23:59:59-01:00", "2030-01-01", "2030-13-01T00:00:00Z", "soon", ""];
    refuse_each("run_at", years.map(Value::from));
}

#[test]
fn metadata_is_an_object_of_at_most_64_kib() {
    let sized = |bytes: usize| json!({"m": "x".repeat(bytes - r#"{"m":""}"#.len())});
    accept_each("metadata", [json!({}), json!({"a": null}), sized(65_536)]);
    refuse_each("metadata", [sized(65_537), json!([]), json!("{}"), json!(1), json!(false)]);
    assert_eq!(read_one(json!({"metadata": {}})).unwrap().metadata, None);
    let found = problems(json!({"tasks": [], "metadata": sized(65_537)}));
    assert_eq!(found, ["metadata: must have at most 65536 bytes, not 65537"]);
}

#[test]
fn wrong_types_are_refused_in_every_field_of_a_task() {
    let samples = [
        ("boolean", json!(true)),
        ("number", json!(7)),
        ("string", json!("x")),
        ("array", json!([])),
        ("object", json!({})),
    ];
    let fields = [
        ("id", "string"),
        ("name", "string"),
        ("kind", "string"),
        ("timeout", "number"),
        ("metadata", "object"),
        ("priority", "number"),
        ("on_start", "object"),
        ("on_success", "array"),
        ("on_failure", "array"),
        ("on_retry", "array"),
        ("dependencies", "array"),
        ("dedupe_strategy", "array"),
        ("expected_count", "number"),
        ("dead_end_barrier", "boolean"),
        ("retry", "object"),
        ("run_at", "none of them"),
    ];
    for (field, right) in fields {
        refuse_each(field, samples.iter().filter(|(kind, _)| *kind != right).map(|(_, value)| value.clone()));
    }
    for list in ["on_success", "on_failure", "on_retry", "dependencies", "dedupe_strategy"] {
        for item in [json!(null), json!(1), json!("x"), json!([])] {
            let found = read_one(json!({list: [item]})).unwrap_err();
            assert!(found.len() == 1 && found[0].starts_with(&format!("[0].{list}[0]: ")), "{found:?}");
        }
    }
}

#[test]
fn a_task_requires_name_and_kind() {
    assert_eq!(problems(json!([{}])), ["[0].name: is required", "[0].kind: is required"]);
    assert_eq!(problems(json!([{"name": null, "kind": "k"}])), ["[0].name: is required"]);
}

#[test]
fn a_batch_is_an_array_or_an_object() {
    assert_eq!(read(json!([])).unwrap().tasks, []);
    let batch = read(json!({
        "tasks": [task_with(json!({}))], "scope": "s", "metadata": {"a": 1}, "on_batch_complete": [webhook("http://b/")],
    }))
    .unwrap();
    assert_eq!((batch.tasks.len(), batch.scope.as_deref()), (1, Some("s")));
    assert_eq!((batch.on_batch_complete.len(), batch.metadata), (1, Some(json!({"a": 1}))));
    for body in [json!(null), json!(1), json!("x"), json!(true)] {
        assert_eq!(problems(body), ["body: must be an array of tasks or an object with `tasks`"]);
    }
    assert_eq!(problems(json!({})), ["tasks: is required"]);
    assert_eq!(problems(json!({"tasks": null})), ["tasks: is required"]);
    assert_eq!(problems(json!({"tasks": {}})), ["tasks: must be an array, not an object"]);
    assert_eq!(
        problems(json!([7, null])),
        ["[0]: must be an object, not a number", "[1]: must be an object, not null"]
    );
    for (field, values) in [
        ("scope", vec![json!(""), json!("x".repeat(256)), json!(1), json!([])]),
        ("on_batch_complete", vec![json!({}), json!("x"), json!(vec![webhook("http://b/"); 5])]),
        ("metadata", vec![json!([]), json!("x")]),
    ] {
        for value in values {
            let found = problems(json!({"tasks": [], field: value}));
            assert!(found.len() == 1 && found[0].starts_with(&format!("{field}: ")), "{found:?}");
        }
    }
}

#[test]
fn the_size_of_a_batch_is_limited() {
    let tasks = |count| json!(vec![task_with(json!({})); count]);
    assert_eq!(read(tasks(12)).unwrap().tasks.len(), 12);
    assert!(problems(tasks(13))[0].starts_with("body: must have at most 12 tasks, not 13"));
    assert!(problems(json!({"tasks": tasks(13)}))[0].starts_with("tasks: must have at most 12 tasks, not 13"));

    let hooks = |count| json!(vec![webhook("http://w/"); count]);
    accept_each("on_success", [hooks(4)]);
    refuse_each("on_success", [hooks(5)]);
    assert!(read_one(json!({"on_success": hooks(2), "on_failure": hooks(2)})).is_ok());
    assert_eq!(read_one(json!({"on_success": hooks(2), "on_failure": hooks(3)})).unwrap_err().len(), 1);
    assert!(read_one(json!({"on_success": hooks(1), "on_failure": hooks(1), "on_retry": hooks(2)})).is_ok());
    let found = read_one(json!({"on_failure": hooks(2), "on_retry": hooks(3)})).unwrap_err();
    assert_eq!(found, ["[0].on_success: with on_failure and on_retry, must have at most 4 actions in total, not 5"]);
}

#[test]
fn unknown_fields_are_refused_at_every_level() {
    let action = |typo: &str, inner: &str| json!({"kind": "Webhook", typo: 1, "params": {"url": "http://w/", "verb": "Get", inner: 1}});
    let cases = [
        (json!([{"name": "n", "kind": "k", "nmae": 1}]), vec!["[0].nmae"]),
        (json!([{"name": "n", "kind": "k", "typo": null}]), vec!["[0].typo"]),
        (json!({"tasks": [], "scpoe": "x"}), vec!["scpoe"]),
        (json!({"tasks": [task_with(json!({"typo": {}}))]}), vec!["tasks[0].typo"]),
        (json!([task_with(json!({"on_start": action("a", "b")}))]), vec!["[0].on_start.params.b", "[0].on_start.a"]),
        (
            json!([task_with(json!({"on_failure": [webhook("http://w/"), action("a", "b")]}))]),
            vec!["[0].on_failure[1].params.b", "[0].on_failure[1].a"],
        ),
        (
            json!({"tasks": [], "on_batch_complete": [action("a", "b")]}),
            vec!["on_batch_complete[0].params.b", "on_batch_complete[0].a"],
        ),
        (json!([task_with(json!({"dedupe_strategy": [{}, {"field": []}]}))]), vec!["[0].dedupe_strategy[1].field"]),
        (json!([task_with(json!({"retry": {"max_retries": 1, "delay": 1}}))]), vec!["[0].retry.delay"]),
        (
            json!([task_with(json!({"id": "a"})), task_with(json!({"dependencies": [{"id": "a", "required": true}]}))]),
            vec!["[1].dependencies[0].required"],
        ),
    ];
    for (body, paths) in cases {
        let expected: Vec<String> = paths.iter().map(|path| format!("{path}: unknown field")).collect();
        assert_eq!(problems(body), expected);
    }
}

#[test]
fn dependencies_name_earlier_tasks_of_the_batch_once() {
    let on = |ids: &[&str]| json!(ids.iter().map(|id| json!({"id": id})).collect::<Vec<_>>());
    let task = |id: &str, ids: &[&str]| task_with(json!({"id": id, "dependencies": on(ids)}));
    let batch = read(json!([task("a", &[]), task("b", &["a"]), task("c", &["b", "a"])])).unwrap();
    let parents = |n: usize| batch.tasks[n].dependencies.iter().map(|d| d.parent).collect::<Vec<_>>();
    assert_eq!((parents(0), parents(1), parents(2)), (vec![], vec![0], vec![0, 1]));
    assert!(batch.tasks.iter().flat_map(|t| &t.dependencies).all(|d| d.requires_success), "the default");
    assert_eq!(batch.tasks.iter().map(|t| t.has_children).collect::<Vec<_>>(), [true, true, false]);
    assert_eq!(
        batch.tasks.iter().map(NewTask::status).collect::<Vec<_>>(),
        [Status::Pending, Status::Waiting, Status::Waiting]
    );

    let missing = "no earlier task of the batch has the id";
    let refused = [
        (json!([task("a", &["b"]), task("b", &[])]), format!("[0].dependencies[0].id: {missing} \"b\"")),
        (json!([task("a", &["a"])]), format!("[0].dependencies[0].id: {missing} \"a\"")),
        (json!([task("a", &[]), task("b", &["a", "z"])]), format!("[1].dependencies[1].id: {missing} \"z\"")),
        (json!([task("a", &[]), task("b", &["a", "a"])]), "[1].dependencies[1].id: \"a\" is named twice".into()),
        (json!([task("a", &[]), task("a", &[])]), "[1].id: \"a\" is used twice".into()),
        (
            json!([task_with(json!({"dependencies": on(&["", "x"])}))]),
            "[0].dependencies[0].id: must have 1 to 255 characters, not 0".into(),
        ),
        (json!([task_with(json!({"dependencies": [{}]}))]), "[0].dependencies[0].id: is required".into()),
        (
            json!([task("a", &[]), task("b", &["a", "a", "a", "a"])]),
            "[1].dependencies: must have at most 3 entries, not 4 (MAX_DEPENDENCIES_PER_TASK)".into(),
        ),
    ];
    for (body, expected) in refused {
        assert_eq!(problems(body)[0], expected);
    }

    let loose = json!([task("a", &[]), task_with(json!({"dependencies": [{"id": "a", "requires_success": false}]}))]);
    assert_eq!(read(loose).unwrap().tasks[1].dependencies, [Dependency { parent: 0, requires_success: false }]);
    let wrong = json!([task("a", &[]), task_with(json!({"dependencies": [{"id": "a", "requires_success": "no"}]}))]);
    assert_eq!(problems(wrong), ["[1].dependencies[0].requires_success: must be true or false, not a string"]);
}

#[test]
fn nul_is_refused_anywhere_in_a_batch() {
    let action = json!({"kind": "Webhook", "params": {"url": "http://w/", "verb": "Put", "body": [{"x": "\0"}]}});
    let cases = [
        (json!([task_with(json!({"name": "a\0b"}))]), "[0].name"),
        (json!([task_with(json!({"kind": "\0"}))]), "[0].kind"),
        (json!([task_with(json!({"id": "\0"}))]), "[0].id"),
        (json!([task_with(json!({"metadata": {"a": {"b": ["", "\0"]}}}))]), "[0].metadata.a.b[1]"),
        (json!([task_with(json!({"metadata": {"a": {"b\0": 1}}}))]), "[0].metadata.a"),
        (json!([task_with(json!({"on_start": action}))]), "[0].on_start.params.body[0].x"),
        (json!([task_with(json!({"on_success": [webhook("http://w/\0")]}))]), "[0].on_success[0].params.url"),
        (json!([task_with(json!({"dedupe_strategy": [{"fields": ["\0"]}]}))]), "[0].dedupe_strategy[0].fields[0]"),
        (json!({"tasks": [], "scope": "\0"}), "scope"),
        (json!({"tasks": [], "metadata": {"a": "\0"}}), "metadata.a"),
        (json!({"tasks": [task_with(json!({"name": "\0"}))]}), "tasks[0].name"),
    ];
    for (body, path) in cases {
        let found = problems(body);
        let named = |problem: &FieldProblem| problem.path == path && problem.message.contains("NUL");
        assert!(found.iter().any(named), "{path}: {found:?}");
    }
}

#[test]
fn all_problems_of_all_tasks_are_reported_at_once() {
    let found = problems(json!({
        "tasks": [
            {"id": "a", "name": "", "kind": "k", "timeout": 0},
            "not a task",
            {"id": "a", "kind": "k", "name": "n", "retry": {"max_retries": 99, "retry_on": []}, "typo": 1},
            {"name": "n", "kind": "k", "dependencies": [{"id": "z"}],
             "on_start": {"kind": "Mail", "params": {"url": "ftp://x/", "headers": {"Host": "x"}}}},
        ],
        "scope": 5,
    }));
    let mut paths: Vec<&str> = found.iter().map(|problem| problem.path.as_str()).collect();
    paths.sort_unstable();
    let expected = [
        "scope",
        "tasks[0].name",
        "tasks[0].timeout",
        "tasks[1]",
        "tasks[2].id",
        "tasks[2].retry.max_retries",
        "tasks[2].retry.retry_on",
        "tasks[2].typo",
        "tasks[3].dependencies[0].id",
        "tasks[3].on_start.kind",
        "tasks[3].on_start.params.headers.Host",
        "tasks[3].on_start.params.url",
        "tasks[3].on_start.params.verb",
    ];
    assert_eq!(paths, expected, "{found:?}");
}
