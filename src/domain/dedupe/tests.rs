use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::domain::matcher::values;
use crate::domain::request::new_task::{MOST_LISTS, read_batch};
use crate::domain::sample::LIMITS;

use Status::{Canceled, Failure, Pending, Running, Success, Waiting};

#[allow(clippy::needless_pass_by_value, reason = "called with `json!`")]
fn read(body: Value) -> Vec<NewTask> {
    read_batch(body.to_string().as_bytes(), &LIMITS).unwrap().tasks
}

/// A task of which there is one for each `n`.
fn one(id: &str, n: i32, needs: &[(&str, bool)]) -> Value {
    let mut task = plain(id, n, needs);
    task["dedupe_strategy"] = json!([{"fields": ["n"]}]);
    task
}

/// The same, but it is created whatever there is.
fn plain(id: &str, n: i32, needs: &[(&str, bool)]) -> Value {
    let needs: Vec<Value> =
        needs.iter().map(|(id, required)| json!({"id": id, "requires_success": required})).collect();
    json!({"id": id, "name": id, "kind": "k", "metadata": {"n": n}, "dependencies": needs})
}

fn twin(n: u128, status: Status) -> ExistingTask {
    ExistingTask { id: Uuid::from_u128(n), status }
}

/// Name, status and parents.
type Shown = (String, Status, Vec<(Parent, bool)>);

/// What is to be stored.
fn shown(planned: &[Planned]) -> Vec<Shown> {
    let one = |p: &Planned| (p.task.name.clone(), p.status, p.parents.iter().map(|(p, r)| (*p, *r)).collect());
    planned.iter().map(one).collect()
}

#[test]
fn without_a_strategy_everything_is_new() {
    let tasks =
        read(json!([plain("a", 1, &[]), plain("b", 1, &[("a", true)]), plain("c", 1, &[("a", false), ("b", true)])]));
    let planned = plan(&tasks, &[]);
    let (a, b) = (Parent::New(0), Parent::New(1));
    let expected = [
        ("a".into(), Pending, vec![]),
        ("b".into(), Waiting, vec![(a, true)]),
        ("c".into(), Waiting, vec![(a, false), (b, true)]),
    ];
    assert_eq!(shown(&planned), expected);
    assert_eq!(planned.iter().map(|p| p.has_children).collect::<Vec<_>>(), [true, true, false]);
    assert_eq!(planned.iter().map(Planned::wait_count).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(planned.iter().all(|p| p.stored_as() == p.task.status() && !p.is_lost()));
}

#[test]
fn children_of_what_was_there_go_by_its_status() {
    let cases = [
        (Running, [Waiting, Waiting], 1, false),
        (Status::RetryPending, [Waiting, Waiting], 1, false),
        (Success, [Pending, Pending], 0, false),
        (Failure, [Failure, Pending], 0, true),
        (Canceled, [Failure, Pending], 0, true),
    ];
    let tasks = read(json!([one("a", 1, &[]), plain("b", 2, &[("a", true)]), plain("c", 3, &[("a", false)])]));
    for (status, expected, open, lost) in cases {
        let there = twin(7, status);
        let planned = plan(&tasks, &[Some(there), None, None]);
        let parent = Parent::Existing(there);
        assert_eq!(
            shown(&planned),
            [("b".into(), expected[0], vec![(parent, true)]), ("c".into(), expected[1], vec![(parent, false)])]
        );
        assert_eq!((planned[0].position, planned[1].position), (1, 2));
        assert_eq!((planned[0].wait_count(), planned[1].wait_count()), (open, open), "{status:?}");
        assert_eq!((planned[0].is_lost(), planned[1].is_lost()), (lost, false), "{status:?}");
        assert_eq!(planned[0].stored_as(), if status == Success { Pending } else { Waiting });
    }
}

#[test]
fn a_fall_goes_on_to_the_children_of_the_new_tasks() {
    let tasks = read(json!([
        one("a", 1, &[]),
        plain("b", 2, &[("a", true)]),
        plain("c", 3, &[("b", true)]),
        plain("d", 4, &[("c", false)]),
        plain("e", 5, &[("c", false), ("d", true)]),
    ]));
    let planned = plan(&tasks, &[Some(twin(7, Failure))]);
    let statuses: Vec<Status> = planned.iter().map(|p| p.status).collect();
    assert_eq!(statuses, [Failure, Failure, Pending, Waiting]);
    // They are stored as if nothing had happened yet, and only one of them begins to fall.
    assert_eq!(planned.iter().map(Planned::wait_count).collect::<Vec<_>>(), [0, 1, 1, 2]);
    assert_eq!(planned.iter().map(Planned::is_lost).collect::<Vec<_>>(), [true, false, false, false]);
    assert!(planned.iter().all(|p| p.stored_as() == Waiting));
}

#[test]
fn tasks_of_the_request_count_for_those_after_them() {
    let tasks = read(json!([
        plain("a", 1, &[]),
        one("a2", 1, &[]),
        plain("b", 2, &[("a2", true)]),
        one("c", 3, &[]),
        plain("c2", 3, &[]),
        one("c3", 3, &[("b", true)]),
        plain("d", 4, &[("c3", false), ("c2", true), ("a", false)]),
        plain("e", 5, &[("a", false), ("a2", true)]),
    ]));
    let planned = plan(&tasks, &[]);
    let new = Parent::New;
    let expected = [
        ("a".into(), Pending, vec![]),
        ("b".into(), Waiting, vec![(new(0), true)]),
        ("c".into(), Pending, vec![]),
        ("c2".into(), Pending, vec![]),
        // The newest of them; what two dependencies have become is needed as either needs it.
        ("d".into(), Waiting, vec![(new(0), false), (new(3), true)]),
        ("e".into(), Waiting, vec![(new(0), true)]),
    ];
    assert_eq!(shown(&planned), expected);
    assert_eq!(planned.iter().map(|p| p.has_children).collect::<Vec<_>>(), [true, false, false, true, false, false]);
}

#[test]
fn two_dependencies_on_the_same_task_are_one() {
    let tasks = read(json!([one("a", 1, &[]), one("b", 1, &[]), plain("c", 2, &[("a", false), ("b", true)])]));
    let there = twin(7, Running);
    let planned = plan(&tasks, &[Some(there), Some(there), None]);
    assert_eq!(shown(&planned), [("c".into(), Waiting, vec![(Parent::Existing(there), true)])]);
    assert_eq!(planned[0].wait_count(), 1);
}

#[test]
fn what_is_alive_is_preferred_then_what_is_new() {
    let found = [twin(1, Success), twin(3, Running), twin(2, Waiting), twin(4, Failure)];
    assert_eq!(ExistingTask::best(found.into_iter()), Some(twin(3, Running)));
    assert_eq!(ExistingTask::best([twin(1, Success), twin(4, Failure)].into_iter()), Some(twin(4, Failure)));
    assert_eq!(ExistingTask::best([].into_iter()), None);

    let strategy = json!([{"status": "Failure"}, {"status": "Success"}, {}]);
    let mut tasks =
        json!([one("x", 1, &[]), plain("a", 2, &[("x", true)]), plain("b", 2, &[]), plain("c", 3, &[("b", true)])]);
    tasks[2]["dedupe_strategy"] = strategy;
    let tasks = read(tasks);
    // `a` falls at once, because of what `x` is; `b` finds it, and another one.
    let chosen = |there: Option<ExistingTask>| {
        let planned = plan(&tasks, &[Some(twin(9, Failure)), None, there, None]);
        planned.last().unwrap().parents.keys().next().copied().unwrap()
    };
    assert_eq!(chosen(None), Parent::New(0));
    assert_eq!(chosen(Some(twin(5, Success))), Parent::New(0));
    assert_eq!(chosen(Some(twin(5, Running))), Parent::Existing(twin(5, Running)));
}

#[test]
fn a_request_compares_by_so_many_lists_at_most() {
    let metadata: Value = (0..8).map(|n| (format!("f{n}"), json!(n))).collect::<serde_json::Map<_, _>>().into();
    let list =
        |bits: usize| -> Vec<String> { (0..8).filter(|n| bits >> n & 1 == 1).map(|n| format!("f{n}")).collect() };
    let tasks = |count: usize| {
        let task = |chunk: &[usize]| {
            let strategy: Vec<Value> = chunk.iter().map(|bits| json!({"fields": list(*bits)})).collect();
            json!({"name": "n", "kind": "k", "metadata": metadata, "dedupe_strategy": strategy})
        };
        (0..count).collect::<Vec<_>>().chunks(10).map(task).collect::<Vec<_>>()
    };
    assert!(read_batch(json!(tasks(MOST_LISTS)).to_string().as_bytes(), &LIMITS).is_ok());
    let mut other_kind = tasks(MOST_LISTS);
    other_kind.push(json!({"name": "n", "kind": "j", "metadata": metadata, "dedupe_strategy": [{"fields": ["f7"]}]}));
    assert!(read_batch(json!(other_kind).to_string().as_bytes(), &LIMITS).is_ok());
    assert_eq!(
        read_batch(json!({"tasks": tasks(MOST_LISTS + 1)}).to_string().as_bytes(), &LIMITS).unwrap_err(),
        ["tasks: dedupe_strategy must compare tasks of the kind \"k\" by at most 20 different lists of fields"]
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Against the plainest rule: look at every earlier task that was created.
    #[test]
    fn within_a_request_a_task_is_skipped_if_and_only_if_a_matcher_finds_one(
        raw in prop::collection::vec(
            (0..2usize, 0..2i32, 0..2i32, prop::collection::vec((0..3usize, 0..3usize, 0..4usize), 0..3), any::<bool>()),
            1..12,
        )
    ) {
        let kinds = ["j", "k"];
        let statuses = [Value::Null, json!("Pending"), json!("Waiting")];
        let lists = [json!([]), json!(["a"]), json!(["b"]), json!(["b", "a"])];
        let body: Vec<Value> = raw.iter().enumerate().map(|(i, (kind, a, b, matchers, child))| {
            let strategy: Vec<Value> = matchers.iter().map(|(kind, status, list)| {
                json!({"kind": kinds.get(*kind), "status": statuses[*status], "fields": lists[*list]})
            }).collect();
            let needs = if *child && i > 0 { json!([{"id": (i - 1).to_string()}]) } else { json!([]) };
            json!({"id": i.to_string(), "name": "n", "kind": kinds[*kind], "metadata": {"a": a, "b": b},
                   "dependencies": needs, "dedupe_strategy": strategy})
        }).collect();
        let tasks = read(json!(body));
        let planned = plan(&tasks, &[]);
        let created: Vec<usize> = planned.iter().map(|p| p.position).collect();
        for (i, task) in tasks.iter().enumerate() {
            let skipped = planned.iter().filter(|p| p.position < i).any(|earlier| {
                task.dedupe_strategy.iter().any(|m| {
                    m.kind == earlier.task.kind && m.accepts(earlier.status)
                        && values(&m.fields, task.metadata.as_ref()) == values(&m.fields, earlier.task.metadata.as_ref())
                })
            });
            prop_assert_eq!(created.contains(&i), !skipped, "{}", i);
        }
        for (at, task) in planned.iter().enumerate() {
            prop_assert!(task.parents.keys().all(|p| matches!(p, Parent::New(n) if *n < at)));
            prop_assert_eq!(task.status, task.stored_as());
        }
    }
}
