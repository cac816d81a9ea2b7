use std::cell::Cell;

use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use proptest::strategy::Strategy;
use proptest::test_runner::TestRunner;

use super::*;
use crate::domain::request::new_policy::read_default_policy;
use crate::domain::request::patch::{read_heartbeat, read_patch, read_retry_request};
use crate::domain::retry::failure::{FailureType, Trigger};
use crate::domain::retry::policy::Strategy as Growth;

/// Words that the readers know, as names and as values.
const WORDS: [&str; 53] = [
    "id",
    "name",
    "kind",
    "timeout",
    "metadata",
    "priority",
    "on_start",
    "on_success",
    "on_failure",
    "on_retry",
    "dependencies",
    "requires_success",
    "dedupe_strategy",
    "fields",
    "expected_count",
    "dead_end_barrier",
    "dead_end_cancel",
    "retry",
    "run_at",
    "max_retries",
    "strategy",
    "initial_delay_secs",
    "backoff_multiplier",
    "max_delay_secs",
    "jitter_ms",
    "delay_secs",
    "schedule",
    "secs",
    "hours",
    "days",
    "fixed_delay",
    "custom",
    "retry_on",
    "retry_on_status",
    "no_retry_on_status",
    "expires_after_secs",
    "explicit",
    "params",
    "url",
    "verb",
    "body",
    "headers",
    "tasks",
    "scope",
    "on_batch_complete",
    "status",
    "failure_reason",
    "failure_type",
    "retry_after_secs",
    "new_success",
    "run",
    "requested_by",
    "cascade",
];

fn leaf() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-3i64..12).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        select(&WORDS[..]).prop_map(Value::from),
        select(
            &["\0", "", "5xx", "429", "Webhook", "Post", "http://a/", "Failure", "success", "2030-01-01T00:00:00Z"][..]
        )
        .prop_map(Value::from),
    ]
}

fn key() -> impl Strategy<Value = String> {
    prop_oneof![9 => select(&WORDS[..]).prop_map(String::from), 1 => any::<String>()]
}

fn any_json() -> impl Strategy<Value = Value> {
    leaf().prop_recursive(5, 60, 8, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::btree_map(key(), inner, 0..8).prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// A mostly valid task: fields at and past their limits, and now and then any value.
fn plausible_task() -> impl Strategy<Value = Value> {
    let fragments = vec![
        json!({"id": "a"}),
        json!({"id": "b"}),
        json!({"timeout": 1}),
        json!({"timeout": 86_400}),
        json!({"timeout": 0}),
        json!({"priority": -1000}),
        json!({"priority": 1001}),
        json!({"metadata": {"a": [1, {"b": null}]}}),
        json!({"dependencies": [{"id": "a"}]}),
        json!({"dependencies": [{"id": "b", "requires_success": false}]}),
        json!({"dependencies": [{"id": "a"}, {"id": "b"}]}),
        json!({"metadata": {"a": 1}, "dedupe_strategy": [{"kind": "k", "status": "pending", "fields": ["a"]}]}),
        json!({"dedupe_strategy": [{}, {"fields": ["a"]}]}),
        json!({"expected_count": 0}),
        json!({"dead_end_barrier": true}),
        json!({"run_at": "2030-01-01T00:00:00Z"}),
        json!({"retry": {"max_retries": 10}}),
        json!({"retry": {"max_retries": 1, "initial_delay_secs": 400}}),
        json!({"retry": {"max_retries": 2, "max_delay_secs": 1, "backoff_multiplier": 1, "retry_on": ["timeout"]}}),
        json!({"retry": {"max_retries": 2, "max_delay_secs": 1, "initial_delay_secs": 2}}),
        json!({"retry": {"max_retries": 3, "strategy": "immediate", "retry_on_status": ["4xx"], "jitter_ms": 0}}),
        json!({"retry": {"max_retries": 3, "strategy": "fixed_delay", "delay_secs": 3600, "expires_after_secs": 1}}),
        json!({"retry": {"max_retries": 3, "strategy": "fixed_delay", "schedule": [{"secs": 1}]}}),
        json!({"retry": {"max_retries": 3, "strategy": "custom", "schedule": [{"secs": 1}, {"days": 30}]}}),
        json!({"retry": {"max_retries": 3, "strategy": "custom", "schedule": [{"days": 31}]}}),
        json!({"retry": {"max_retries": 3, "retry_on_status": ["5xx"], "no_retry_on_status": ["5xx"]}}),
        json!({"retry": null}),
        json!({"on_start": webhook("https://w/start")}),
        json!({"on_success": [webhook("http://w/")]}),
        json!({"on_failure": [webhook("gopher://w/")]}),
    ];
    let count = fragments.len();
    let anything = prop::option::weighted(0.1, (key(), any_json()));
    (subsequence(fragments, 0..count / 3), anything).prop_map(|(fragments, anything)| {
        let mut task = fragments.into_iter().fold(json!({}), |mut task, fragment| {
            if let (Value::Object(task), Value::Object(fragment)) = (&mut task, fragment) {
                task.extend(fragment);
            }
            task
        });
        if let Some((name, value)) = anything {
            task[name] = value;
        }
        task_with(task)
    })
}

fn check_action(action: &Action) {
    let params = &action.params;
    let url = url::Url::parse(&params.url).unwrap();
    assert!(matches!(url.scheme(), "http" | "https"));
    for (name, value) in &params.headers {
        assert!(!RESERVED_HEADERS.contains(&name.to_lowercase().as_str()));
        assert!(!name.is_empty() && name.is_ascii() && !value.contains(['\r', '\n', '\0']));
    }
}

fn check_policy(policy: &Policy) {
    assert!((1..=LIMITS.retry.max_retries).contains(&policy.max_retries));
    let longest = LIMITS.retry.max_delay_secs;
    match &policy.strategy {
        Growth::Immediate => {}
        Growth::ExponentialBackoff { initial_delay_secs, backoff_multiplier, max_delay_secs } => {
            assert!(1 <= *initial_delay_secs && initial_delay_secs <= max_delay_secs && *max_delay_secs <= longest);
            assert!(backoff_multiplier.is_finite() && *backoff_multiplier >= 1.0);
        }
        Growth::FixedDelay { delay_secs } => assert!((1..=longest).contains(delay_secs)),
        Growth::Custom { schedule } => {
            assert!((1..=1000).contains(&schedule.len()));
            let longest = LIMITS.retry.max_schedule_delay_secs;
            assert!(schedule.iter().all(|delay| (1..=longest).contains(&delay.secs())));
        }
    }
    assert!(policy.jitter_ms <= 3_600_000);
    assert!(!policy.retry_on.is_empty() && policy.retry_on.len() <= Trigger::ALL.len());
    assert!(policy.retry_on_status.iter().all(|pattern| !policy.no_retry_on_status.contains(pattern)));
    assert!(policy.expires_after_secs.is_none_or(|secs| secs >= 1));
    let stored = serde_json::to_value(policy).unwrap();
    assert_eq!(serde_json::from_value::<Policy>(stored).unwrap(), *policy, "a stored policy is read back");
}

fn check_batch(batch: &NewBatch) {
    assert!(batch.tasks.len() <= LIMITS.tasks_per_batch);
    assert!(batch.scope.as_ref().is_none_or(|s| (1..=255).contains(&s.chars().count())));
    batch.on_batch_complete.iter().for_each(check_action);
    let mut parents = Vec::new();
    for (i, task) in batch.tasks.iter().enumerate() {
        assert!((1..=255).contains(&task.name.chars().count()) && !task.name.contains('\0'));
        assert!((1..=100).contains(&task.kind.chars().count()) && !task.kind.contains('\0'));
        assert!((1..=86_400).contains(&task.timeout_secs) && (-1000..=1000).contains(&task.priority));
        assert!(task.expected_count.is_none_or(|count| count >= 0));
        assert!(task.metadata.as_ref().is_none_or(|m| m.is_object() && m.to_string().len() <= LIMITS.metadata_bytes));
        assert!(task.dependencies.len() <= LIMITS.dependencies_per_task);
        assert!(task.dependencies.is_sorted_by(|a, b| a.parent < b.parent), "each parent once");
        assert!(task.dependencies.iter().all(|d| d.parent < i), "parents come first");
        for matcher in &task.dedupe_strategy {
            assert!((1..=100).contains(&matcher.kind.chars().count()));
            assert!(matcher.fields.is_sorted_by(|a, b| a < b), "each field once");
            assert!(matcher.fields.iter().all(|name| task.metadata.as_ref().unwrap().get(name).is_some()));
        }
        parents.extend(task.dependencies.iter().map(|d| d.parent));
        if let RetryChoice::Own(policy) = &task.retry {
            check_policy(policy);
        }
        let actions = &task.actions;
        let ends = actions.on_success.iter().chain(&actions.on_failure).chain(&actions.on_retry);
        actions.on_start.iter().chain(ends).for_each(check_action);
    }
    for (i, task) in batch.tasks.iter().enumerate() {
        assert_eq!(task.has_children, parents.contains(&i));
    }
}

fn check_problems(problems: &[FieldProblem]) {
    assert!(!problems.is_empty(), "a refusal has a reason");
    assert!(problems.iter().all(|problem| !problem.message.is_empty()), "{problems:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn any_json_is_accepted_within_the_limits_or_refused(body in any_json()) {
        match read(body.clone()) {
            Ok(batch) => check_batch(&batch),
            Err(problems) => check_problems(&problems),
        }
        match read_patch(body.clone(), &LIMITS) {
            Ok(patch) => {
                prop_assert!(patch.progress.success >= 0 && patch.progress.failures >= 0);
                prop_assert!(patch.priority.is_none_or(|p| (-1000..=1000).contains(&p)));
                prop_assert!(patch.run.is_none_or(|run| run >= 0) && patch.expected_count.is_none_or(|c| c >= 0));
                if let Some(Err(failure)) = patch.result {
                    prop_assert!(!failure.reason.is_empty() && failure.failure_type != FailureType::Dependency);
                    prop_assert!(failure.retry_after.is_none() || !failure.failure_type.is_final());
                }
            }
            Err(problems) => check_problems(&problems),
        }
        match read_heartbeat(body.clone()) {
            Ok(progress) => prop_assert!(progress.success >= 0 && progress.failures >= 0),
            Err(problems) => check_problems(&problems),
        }
        match read_default_policy(body.clone(), &LIMITS) {
            Ok(policy) => check_policy(&policy),
            Err(problems) => check_problems(&problems),
        }
        match read_retry_request(body.clone()) {
            Ok(request) => prop_assert!(request.requested_by.is_none_or(|by| (1..=255).contains(&by.chars().count()))),
            Err(problems) => check_problems(&problems),
        }
        if let Ok(Some(action)) = read_answered_action(body.to_string().as_bytes()) {
            check_action(&action);
        }
    }

    #[test]
    fn any_bytes_can_be_an_answer(answer in prop::collection::vec(any::<u8>(), 0..64)) {
        if let Ok(Some(action)) = read_answered_action(&answer) {
            check_action(&action);
        }
    }
}

#[test]
fn plausible_batches_obey_the_limits_or_are_refused() {
    let (accepted, refused) = (Cell::new(0), Cell::new(0));
    let mut runner = TestRunner::new(ProptestConfig::with_cases(1500));
    let batches = prop::collection::vec(plausible_task(), 0..4).prop_map(Value::from);
    let outcome = runner.run(&batches, |body| {
        match read(body) {
            Ok(batch) => {
                check_batch(&batch);
                accepted.set(accepted.get() + batch.tasks.len());
            }
            Err(problems) => {
                check_problems(&problems);
                refused.set(refused.get() + 1);
            }
        }
        Ok(())
    });
    outcome.unwrap();
    assert!(accepted.get() > 100 && refused.get() > 100, "{accepted:?} tasks accepted, {refused:?} batches refused");
}
