//! Turns between fair keys: many tasks of one tenant do not delay the few of another.

use serde_json::{Value, json};

use crate::support::Fixture;

fn task(name: &str, key: Option<&str>) -> Value {
    json!({"name": name, "kind": "k", "fair_key": key})
}

/// Claims one task after the other; returns their names in order.
async fn order(f: &Fixture, n: usize) -> Vec<String> {
    let mut names = Vec::new();
    for _ in 0..n {
        assert_eq!(f.claim().await, 1);
        let running = f.api.get("/task?status=Running").await.body;
        names.push(running[0]["name"].as_str().unwrap().to_owned());
        f.api.succeed(running[0]["id"].as_str().unwrap()).await;
    }
    names
}

/// Adds a rule that lets one task execute at a time.
fn alone(mut task: Value) -> Value {
    task["rules"] = json!([{"type": "Concurency", "max_concurency": 1, "matcher": {"kind": "k"}}]);
    task
}

#[tokio::test]
async fn fair_keys_take_turns() {
    let f = Fixture::new().await;
    f.api.create(&json!({"fair_key": "a", "tasks": vec![alone(json!({"name": "a", "kind": "k"})); 6]})).await;
    assert_eq!(order(&f, 2).await, ["a", "a"]);
    f.api.create(&json!(vec![alone(task("b", Some("b"))); 2])).await;
    f.api.create(&json!([alone(task("c", Some("c")))])).await;
    let turns = order(&f, 7).await;
    assert_eq!(turns.iter().filter(|name| *name == "a").count(), 4);
    let last_other = turns.iter().rposition(|name| name != "a").unwrap();
    assert!(last_other <= 5, "{turns:?}: the others are done long before the one with many");
    assert!(turns[..3].contains(&"b".to_owned()) && turns[..4].contains(&"c".to_owned()), "{turns:?}");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn an_idle_fair_key_saves_up_no_turns() {
    let f = Fixture::new().await;
    f.api.create(&json!(vec![alone(task("a", Some("a"))); 8])).await;
    order(&f, 8).await;
    // `a` has had eight turns; `b` does not get eight in a row for that.
    f.api.create(&json!(vec![alone(task("b", Some("b"))); 4])).await;
    f.api.create(&json!(vec![alone(task("a", Some("a"))); 4])).await;
    let turns = order(&f, 8).await;
    assert!(turns[..3].contains(&"a".to_owned()), "{turns:?}");
    assert!(turns[5..].contains(&"b".to_owned()), "{turns:?}");
}

#[tokio::test]
async fn tasks_without_a_fair_key_take_turns_as_one_key() {
    let f = Fixture::new().await;
    f.api.create(&json!([alone(task("b", Some("b")))])).await;
    order(&f, 1).await;
    f.api.create(&json!(vec![alone(task("none", None)); 6])).await;
    f.api.create(&json!(vec![alone(task("b", Some("b"))); 2])).await;
    let turns = order(&f, 8).await;
    assert!(turns.iter().rposition(|name| name == "b").unwrap() <= 4, "{turns:?}");
}

#[tokio::test]
async fn priority_comes_before_turns() {
    let f = Fixture::new().await;
    let mut urgent = alone(task("urgent", Some("a")));
    urgent["priority"] = json!(1);
    f.api.create(&json!(vec![alone(task("b", Some("b"))); 2])).await;
    f.api.create(&json!(vec![urgent; 3])).await;
    assert_eq!(order(&f, 5).await, ["urgent", "urgent", "urgent", "b", "b"]);
    // A task whose priority is raised later is the next one of its key.
    f.api.create(&json!(vec![alone(task("a", Some("a"))); 3])).await;
    let raised = f.api.create(&json!([alone(task("raised", Some("a")))])).await;
    f.api.patch(&format!("/task/{}", raised[0]), &json!({"priority": 1})).await;
    assert_eq!(order(&f, 2).await, ["raised", "a"]);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_retried_task_keeps_its_turn() {
    let f = Fixture::new().await;
    let mut first = alone(task("first", Some("a")));
    first["retry"] = json!({"max_retries": 1, "strategy": "immediate", "jitter_ms": 0});
    let first = f.api.create(&json!([first])).await.remove(0);
    f.api.create(&json!(vec![alone(task("a", Some("a"))); 3])).await;
    assert_eq!(f.claim().await, 1);
    f.api.fail(&first).await;
    f.release().await;
    assert_eq!(order(&f, 2).await, ["first", "a"]);
}

#[tokio::test]
async fn without_fair_keys_no_turns_are_stored() {
    let f = Fixture::new().await;
    f.api.create(&json!(vec![task("n", None); 5])).await;
    f.claim().await;
    let kept =
        "select (select count(*) from fair_turn) + (select count(*) from fair_clock) + (select max(turn) from task)";
    assert_eq!(f.db.number(kept).await, 0);
    let answer = f.api.post("/task", &json!([{"name": "n", "kind": "k", "fair_key": ""}])).await;
    assert_eq!(answer.status, 400);
}
