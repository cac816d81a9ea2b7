use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::domain::matcher::values;
use crate::domain::request::new_batch::{MAX_FIELD_LISTS, read_batch};
use crate::domain::sample::LIMITS;

use Status::{Canceled, Failure, Pending, Running, Success, Waiting};

#[allow(clippy::needless_pass_by_value, reason = "called with `json!`")]
fn read(body: Value) -> Vec<NewTask> {
    read_batch(body.to_string().as_bytes(), &LIMITS).unwrap().tasks
}

/// A task that is created once for each `n`.
fn unique(id: &str, n: i32, needs: &[(&str, bool)]) -> Value {
    let mut task = plain(id, n, needs);
    task["dedupe_strategy"] = json!([{"fields": ["n"]}]);
    task
}

/// A task without a dedupe strategy.
fn plain(id: &str, n: i32, needs: &[(&str, bool)]) -> Value {
    let needs: Vec<Value> =
        needs.iter().map(|(id, required)| json!({"id": id, "requires_success": required})).collect();
    json!({"id": id, "name": id, "kind": "k", "metadata": {"n": n}, "dependencies": needs})
}

fn existing(n: u128, status: Status) -> ExistingTask {
    ExistingTask { id: Uuid::from_u128(n), status }
}

/// Name, status and parents.
type Shown = (String, Status, Vec<(Parent, bool)>);

/// Shows the planned tasks.
fn shown(planned: &[Planned]) -> Vec<Shown> {
    let one = |p: &Planned| (p.task.name.clone(), p.status, p.parents.iter().map(|(p, r)| (*p, *r)).collect());
    planned.iter().map(one).collect()
}

#[test]
fn tasks_without_a_dedupe_strategy_are_all_new() {
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
fn children_of_an_existing_task_depend_on_its_status() {
    let cases = [
        (Running, [Waiting, Waiting], 1, false),
        (Status::RetryPending, [Waiting, Waiting], 1, false),
        (Success, [Pending, Pending], 0, false),
        (Failure, [Failure, Pending], 0, true),
        (Canceled, [Failure, Pending], 0, true),
    ];
    let tasks = read(json!([unique("a", 1, &[]), plain("b", 2, &[("a", true)]), plain("c", 3, &[("a", false)])]));
    for (status, expected, open, lost) in cases {
        let stored = existing(7, status);
        let planned = plan(&tasks, &[Some(stored), None, None]);
        let parent = Parent::Existing(stored);
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
fn a_failed_existing_parent_fails_new_descendants() {
    let tasks = read(json!([
        unique("a", 1, &[]),
        plain("b", 2, &[("a", true)]),
        plain("c", 3, &[("b", true)]),
        plain("d", 4, &[("c", false)]),
        plain("e", 5, &[("c", false), ("d", true)]),
    ]));
    let planned = plan(&tasks, &[Some(existing(7, Failure))]);
    let statuses: Vec<Status> = planned.iter().map(|p| p.status).collect();
    assert_eq!(statuses, [Failure, Failure, Pending, Waiting]);
    // They are stored as if the parent had not failed yet, and only one of them fails first.
    assert_eq!(planned.iter().map(Planned::wait_count).collect::<Vec<_>>(), [0, 1, 1, 2]);
    assert_eq!(planned.iter().map(Planned::is_lost).collect::<Vec<_>>(), [true, false, false, false]);
    assert!(planned.iter().all(|p| p.stored_as() == Waiting));
}

#[test]
fn a_task_can_duplicate_an_earlier_task_of_its_request() {
    let tasks = read(json!([
        plain("a", 1, &[]),
        unique("a2", 1, &[]),
        plain("b", 2, &[("a2", true)]),
        unique("c", 3, &[]),
        plain("c2", 3, &[]),
        unique("c3", 3, &[("b", true)]),
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
        // `c3` resolves to the newest match. Of two dependencies on one task, the stricter one counts.
        ("d".into(), Waiting, vec![(new(0), false), (new(3), true)]),
        ("e".into(), Waiting, vec![(new(0), true)]),
    ];
    assert_eq!(shown(&planned), expected);
    assert_eq!(planned.iter().map(|p| p.has_children).collect::<Vec<_>>(), [true, false, false, true, false, false]);
}

#[test]
fn two_dependencies_on_the_same_existing_task_become_one() {
    let tasks = read(json!([unique("a", 1, &[]), unique("b", 1, &[]), plain("c", 2, &[("a", false), ("b", true)])]));
    let stored = existing(7, Running);
    let planned = plan(&tasks, &[Some(stored), Some(stored), None]);
    assert_eq!(shown(&planned), [("c".into(), Waiting, vec![(Parent::Existing(stored), true)])]);
    assert_eq!(planned[0].wait_count(), 1);
}

#[test]
fn the_newest_alive_match_is_preferred() {
    let found = [existing(1, Success), existing(3, Running), existing(2, Waiting), existing(4, Failure)];
    assert_eq!(ExistingTask::best(found.into_iter()), Some(existing(3, Running)));
    assert_eq!(
        ExistingTask::best([existing(1, Success), existing(4, Failure)].into_iter()),
        Some(existing(4, Failure))
    );
    assert_eq!(ExistingTask::best([].into_iter()), None);

    let strategy = json!([{"status": "Failure"}, {"status": "Success"}, {}]);
    let mut tasks =
        json!([unique("x", 1, &[]), plain("a", 2, &[("x", true)]), plain("b", 2, &[]), plain("c", 3, &[("b", true)])]);
    tasks[2]["dedupe_strategy"] = strategy;
    let tasks = read(tasks);
    // `a` fails at once, because `x` has failed; `b` matches `a` and a stored task.
    let chosen = |stored: Option<ExistingTask>| {
        let planned = plan(&tasks, &[Some(existing(9, Failure)), None, stored, None]);
        planned.last().unwrap().parents.keys().next().copied().unwrap()
    };
    assert_eq!(chosen(None), Parent::New(0));
    assert_eq!(chosen(Some(existing(5, Success))), Parent::New(0));
    assert_eq!(chosen(Some(existing(5, Running))), Parent::Existing(existing(5, Running)));
}

#[test]
fn a_request_compares_tasks_of_a_kind_by_at_most_20_field_lists() {
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
    assert!(read_batch(json!(tasks(MAX_FIELD_LISTS)).to_string().as_bytes(), &LIMITS).is_ok());
    let mut other_kind = tasks(MAX_FIELD_LISTS);
    other_kind.push(json!({"name": "n", "kind": "j", "metadata": metadata, "dedupe_strategy": [{"fields": ["f7"]}]}));
    assert!(read_batch(json!(other_kind).to_string().as_bytes(), &LIMITS).is_ok());
    assert_eq!(
        read_batch(json!({"tasks": tasks(MAX_FIELD_LISTS + 1)}).to_string().as_bytes(), &LIMITS).unwrap_err(),
        ["tasks: dedupe_strategy must compare tasks of the kind \"k\" by at most 20 different lists of fields"]
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Compares the plan with the plainest rule: look at every earlier task that was created.
    #[test]
    fn a_task_is_skipped_exactly_when_a_matcher_finds_an_earlier_one(
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
