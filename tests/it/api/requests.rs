//! Requests that create, find and list tasks, and the problem documents of wrong ones.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{Answer, Fixture, text};

fn details(answer: &Answer) -> Vec<String> {
    answer.body["details"].as_array().unwrap().iter().map(text).collect()
}

/// A problem document: the right status, no empty field, no SQL.
fn assert_problem(answer: &Answer, status: u16) {
    assert_eq!(answer.status, status, "{}", answer.body);
    assert_eq!(answer.headers["content-type"], "application/problem+json");
    for field in ["title", "detail", "error"] {
        assert!(answer.body[field].as_str().is_some_and(|text| !text.is_empty()), "{field}: {}", answer.body);
    }
    assert_eq!(answer.body["status"], status);
    assert!(answer.body["details"].is_array());
    let shown = answer.body.to_string().to_lowercase();
    assert!(!shown.contains("sql") && !shown.contains("select "), "{shown}");
}

#[tokio::test]
async fn an_array_and_an_object_of_tasks_both_create_a_batch() {
    let f = Fixture::new().await;
    let array =
        f.api.post("/task", &json!([{"name": "a", "kind": "k"}, {"name": "b", "kind": "l", "priority": 3}])).await;
    assert_eq!(array.status, 201);
    assert_eq!(
        (&array.body[0]["name"], &array.body[1]["name"], &array.body[1]["priority"]),
        (&json!("a"), &json!("b"), &json!(3))
    );
    let batch = array.headers["x-batch-id"].to_str().unwrap();
    assert_eq!(array.body[0]["batch_id"], batch);
    let object = f.api.post("/task", &json!({"tasks": [{"name": "c", "kind": "k"}], "scope": "x"})).await;
    assert_eq!(object.status, 201);
    for empty in [json!([]), json!({"tasks": []})] {
        let answer = f.api.post("/task", &empty).await;
        assert_eq!(answer.status, 204);
        assert!(answer.headers.contains_key("x-batch-id"));
    }
    let fields = [
        "id",
        "name",
        "kind",
        "status",
        "batch_id",
        "priority",
        "attempt",
        "run",
        "next_retry_at",
        "success",
        "failures",
        "expected_count",
        "created_at",
        "started_at",
        "ended_at",
        "dead_end_barrier",
    ];
    let summary = array.body[0].as_object().unwrap();
    assert_eq!(summary.len(), fields.len());
    assert!(fields.iter().all(|field| summary.contains_key(*field)));
    let details_of_task = f.api.task(&text(&array.body[0]["id"])).await;
    for field in fields {
        assert_eq!(details_of_task[field], summary[field], "{field}");
    }
    for field in
        ["timeout", "metadata", "actions", "last_updated", "failure_reason", "failure_type", "retry", "deferrals"]
    {
        assert!(details_of_task.get(field).is_some(), "{field}");
    }
    let batches = f.api.get("/batches").await.body;
    assert_eq!(batches.as_array().unwrap().len(), 2);
    assert_eq!((&batches[1]["total_tasks"], &batches[1]["kinds"]), (&json!(2), &json!(["k", "l"])));
    assert_eq!((&batches[0]["scope"], &batches[0]["status_counts"]["pending"]), (&json!("x"), &json!(1)));
}

#[tokio::test]
async fn a_refused_request_names_every_problem_of_every_task() {
    let f = Fixture::new().await;
    let answer = f
        .api
        .post(
            "/task",
            &json!([
                {"name": "", "kind": 7, "timeout": 0},
                {"name": "ok", "kind": "k"},
                {"kind": "k", "nmae": "typo", "dependencies": [{"id": "nobody"}], "retry": {"max_retries": 99},
                 "on_start": {"kind": "Webhook", "params": {"url": "ftp://x", "verb": "Fetch"}}},
            ]),
        )
        .await;
    assert_problem(&answer, 400);
    let found = details(&answer);
    for path in [
        "[0].name:",
        "[0].kind:",
        "[0].timeout:",
        "[2].name:",
        "[2].nmae:",
        "[2].dependencies[0].id:",
        "[2].retry.max_retries:",
        "[2].on_start.params.url:",
        "[2].on_start.params.verb:",
    ] {
        assert!(found.iter().any(|line| line.starts_with(path)), "{path} in {found:#?}");
    }
    assert!(!found.iter().any(|line| line.starts_with("[1]")));
    assert_eq!(f.db.number("select count(*) from task").await, 0, "all or nothing");
}

#[tokio::test]
async fn malformed_requests_get_a_problem_document() {
    let f = Fixture::with(&["--max-body-bytes", "20000", "--max-tasks-per-batch", "3"]).await;
    let deep = format!(
        "[{{\"name\": \"n\", \"kind\": \"k\", \"metadata\": {{\"a\": {}1{}}}}}]",
        "[".repeat(200),
        "]".repeat(200)
    );
    let nested = format!(
        "[{{\"name\": \"n\", \"kind\": \"k\", \"metadata\": {{\"a\": {}1{}}}}}]",
        "[".repeat(100),
        "]".repeat(100)
    );
    let raw = |body: &str| f.api.send(Method::POST, "/task", Some(body.to_owned()));
    for bad in [
        "{",
        "nonsense",
        "\"text\"",
        "17",
        "null",
        "[1]",
        "[null]",
        &deep,
        "[{\"name\": \"a\\u0000b\", \"kind\": \"k\"}]",
        "[{\"name\": \"n\", \"kind\": \"k\", \"metadata\": {\"a\\u0000\": 1}}]",
        "[{\"name\": \"n\", \"kind\": \"k\", \"priority\": 1e400}]",
    ] {
        assert_problem(&raw(bad).await.unwrap(), 400);
    }
    assert_eq!(raw(&nested).await.unwrap().status, 201, "a hundred levels are fine");
    let invalid = reqwest::Client::new()
        .post(format!("{}/task", f.api.base()))
        .body(vec![b'[', 0xff, 0xfe, b']'])
        .send()
        .await
        .unwrap();
    assert_eq!(invalid.status(), 400, "invalid UTF-8");
    assert_problem(&f.api.post("/task", &json!([{"name": "x".repeat(30_000), "kind": "k"}])).await, 413);
    let task = json!({"name": "n", "kind": "k"});
    let many = f.api.post("/task", &json!([task, task, task, task])).await;
    assert_problem(&many, 400);
    assert!(details(&many)[0].contains("at most 3 tasks"));

    let ids = f.api.create(&json!([task])).await;
    let path = format!("/task/{}", ids[0]);
    for body in [
        json!({"status": "Running"}),
        json!({"status": "Failure"}),
        json!({"statsu": "Success"}),
        json!([]),
        json!({"new_success": -1}),
        json!({"status": 1}),
        json!({"failure_reason": "why"}),
        json!({"priority": 2000}),
    ] {
        assert_problem(&f.api.patch(&path, &body).await, 400);
    }
    for body in [json!({"new_success": "1"}), json!({"x": 1}), json!([])] {
        assert_problem(&f.api.put(&path, &body).await, 400);
    }
    assert_problem(&f.api.patch(&format!("{path}?run=1"), &json!({"run": 2})).await, 400);
    assert_problem(&f.api.get("/task/not-a-uuid").await, 400);
    assert_problem(&f.api.get(&format!("/task/{}", uuid::Uuid::nil())).await, 404);
    assert_problem(&f.api.get("/nothing/here").await, 404);
    assert_problem(&f.api.call(Method::DELETE, "/batches", None).await, 405);
    for query in [
        "status=Done",
        "kindd=x",
        "page=-1",
        "page_size=0",
        "batch_id=7",
        "metadata=[1]",
        "metadata={",
        "created_after=now",
        "timeout=x",
        "cursor=1",
        "page=1&page=2",
        "kind=%00",
        "metadata=%7B%22a%22%3A%22%5Cu0000%22%7D",
    ] {
        assert_problem(&f.api.get(&format!("/task?{query}")).await, 400);
    }
    for query in ["status=lost", "cursor=x", "page=a"] {
        assert_problem(&f.api.get(&format!("/webhook-deliveries?{query}")).await, 400);
    }
}

#[tokio::test]
async fn lists_are_filtered_and_paged() {
    let f = Fixture::new().await;
    let first = f
        .api
        .post(
            "/task",
            &json!([
                {"name": "one", "kind": "a", "timeout": 5, "metadata": {"x": 1, "deep": {"y": [1, 2]}}},
                {"name": "two", "kind": "a", "metadata": {"x": 2}}, {"name": "three", "kind": "b"},
            ]),
        )
        .await;
    let batch = first.headers["x-batch-id"].to_str().unwrap().to_owned();
    f.advance(60);
    f.api.create(&json!((0..7).map(|i| json!({"name": format!("n{i}"), "kind": "c"})).collect::<Vec<_>>())).await;
    let names = async |query: &str| -> Vec<String> {
        let answer = f.api.get(&format!("/task?{query}")).await;
        assert_eq!(answer.status, 200, "{query}: {}", answer.body);
        answer.body.as_array().unwrap().iter().map(|task| text(&task["name"])).collect()
    };
    assert_eq!(names("kind=a").await, ["two", "one"], "newest first");
    assert_eq!(names("name=three").await, ["three"]);
    assert_eq!(names(&format!("batch_id={batch}&kind=a&status=pending,waiting")).await, ["two", "one"]);
    assert_eq!(names("timeout=5").await, ["one"]);
    assert_eq!(names("metadata=%7B%22deep%22%3A%7B%22y%22%3A%5B2%5D%7D%7D").await, ["one"]);
    assert_eq!(names("metadata={}&kind=b").await, ["three"]);
    assert_eq!(names("created_before=2026-01-01T00:00:30Z").await.len(), 3);
    assert_eq!(names("created_after=2026-01-01T00:00:30%2B00:00").await.len(), 7);
    assert_eq!(names("status=RUNNING").await, Vec::<String>::new());
    for name in ["one", "three"] {
        let task = f.api.get(&format!("/task?name={name}")).await.body[0]["id"].as_str().unwrap().to_owned();
        assert_eq!(f.api.delete(&format!("/task/{task}")).await.status, 200);
    }
    assert_eq!(names("kind=a&status=Canceled").await, ["one"]);
    assert_eq!(names("status=canceled,pending,canceled&page_size=100&kind=a").await, ["two", "one"]);
    assert_eq!(names("status=canceled,pending,pending").await.len(), 10);
    assert_eq!(names("kind=c&status=Canceled,Failure").await, Vec::<String>::new());
    assert_eq!(names("page_size=4").await, ["n6", "n5", "n4", "n3"]);
    assert_eq!(names("page_size=4&page=1").await, ["n2", "n1", "n0", "three"]);
    assert_eq!(names("page_size=100000").await.len(), 10, "clamped, not refused");

    let (mut seen, mut query) = (Vec::new(), "page_size=3".to_owned());
    loop {
        let answer = f.api.get(&format!("/task?{query}")).await;
        seen.extend(answer.body.as_array().unwrap().iter().map(|task| text(&task["name"])));
        let Some(cursor) = answer.headers.get("x-next-cursor") else { break };
        query = format!("page_size=3&cursor={}", cursor.to_str().unwrap());
    }
    assert_eq!(seen.len(), 10);
    assert_eq!((seen[0].as_str(), seen[9].as_str()), ("n6", "one"));
    assert_eq!(f.api.get("/batches?page_size=1&page=1").await.body[0]["batch_id"], json!(batch));

    let scoped = |scope: &str, number: u8| json!({"scope": scope, "metadata": {"n": number, "x": [1, 2]}, "tasks": [{"name": "s", "kind": "k"}]});
    for (scope, number) in [("red", 1), ("red", 2), ("blue", 2)] {
        assert_eq!(f.api.post("/task", &scoped(scope, number)).await.status, 201);
    }
    let found = async |query: &str| -> usize {
        let answer = f.api.get(&format!("/batches?{query}")).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.body.as_array().unwrap().len()
    };
    assert_eq!((found("scope=red").await, found("scope=green").await), (2, 0));
    assert_eq!(found("metadata=%7B%22n%22%3A2%7D").await, 2);
    assert_eq!(found("scope=red&metadata=%7B%22n%22%3A2%2C%22x%22%3A%5B2%5D%7D").await, 1);
    assert_eq!(found("metadata={}").await, 5);
    assert_eq!(f.api.get("/batches?metadata=7").await.status, 400);
}

#[tokio::test]
async fn a_batch_shows_the_sums_of_its_tasks_counters() {
    let f = Fixture::new().await;
    let answer = f
        .api
        .post("/task", &json!([{"name": "a", "kind": "k", "expected_count": 10}, {"name": "b", "kind": "k"}]))
        .await;
    let batch = answer.headers["x-batch-id"].to_str().unwrap().to_owned();
    for task in answer.body.as_array().unwrap() {
        f.api.put(&format!("/task/{}", text(&task["id"])), &json!({"new_success": 2, "new_failures": 1})).await;
    }
    let shown = f.api.get(&format!("/batch/{batch}")).await.body;
    assert_eq!(
        (&shown["total_success"], &shown["total_failures"], &shown["total_expected"]),
        (&json!(4), &json!(2), &json!(10))
    );
    assert_eq!((&shown["total_tasks"], &shown["completed_at"]), (&json!(2), &Value::Null));
    assert_eq!(f.api.get(&format!("/batch/{}", uuid::Uuid::now_v7())).await.status, 404);
}

#[tokio::test]
async fn pages_beyond_row_100000_are_refused() {
    let f = Fixture::new().await;
    let id = f.api.create(&json!([{"name": "n", "kind": "k"}])).await.remove(0);
    let lists = [
        "/task".into(),
        "/batches".into(),
        "/webhook-deliveries".into(),
        format!("/task/{id}/attempts"),
        format!("/task/{id}/events"),
    ];
    for list in lists {
        for (page, size) in [(1000, 100), (100_000, 1), (2000, 50)] {
            assert_eq!(f.api.get(&format!("{list}?page={page}&page_size={size}")).await.status, 200, "{list}");
            let answer = f.api.get(&format!("{list}?page={}&page_size={size}", page + 1)).await;
            assert_problem(&answer, 400);
            let detail = answer.body["detail"].as_str().unwrap();
            assert!(detail.starts_with("page: ") && detail.contains("100000") && detail.contains("cursor"), "{detail}");
        }
        assert_problem(&f.api.get(&format!("{list}?page=2001")).await, 400);
    }
}

#[tokio::test]
async fn names_of_matcher_fields_have_at_most_255_characters() {
    let f = Fixture::new().await;
    let task = |name: &str| {
        let matcher = json!({"kind": "k", "status": "Running", "fields": [name]});
        json!({"name": "n", "kind": "k", "metadata": {name: 1},
               "rules": [{"type": "Concurency", "max_concurency": 1, "matcher": matcher}],
               "dedupe_strategy": [{"fields": [name]}]})
    };
    let long = "é".repeat(9000);
    let answer = f.api.post("/task", &json!([task(&long)])).await;
    assert_problem(&answer, 400);
    let details: Vec<&str> = answer.body["details"].as_array().unwrap().iter().map(|d| d.as_str().unwrap()).collect();
    let line = |path: &str| format!("[0].{path}.fields[0]: must have at most 255 characters, not 9000");
    assert_eq!(details, [line("dedupe_strategy[0]"), line("rules[0].matcher")]);
    f.api.create(&json!([task(&"é".repeat(255))])).await;
}

#[tokio::test]
async fn an_empty_filter_value_means_no_filter() {
    let f = Fixture::new().await;
    let ids = f.api.create(&json!([{"name": "n", "kind": "k"}])).await;
    let query = "status=&kind=&name=&batch_id=&metadata=&timeout=&created_after=&created_before=&page=&cursor=";
    let listed = f.api.get(&format!("/task?{query}")).await;
    assert_eq!((listed.status.as_u16(), &listed.body[0]["id"]), (200, &json!(ids[0])), "{}", listed.body);
    assert_eq!(f.api.get("/batches?scope=&metadata=").await.body.as_array().map(Vec::len), Some(1));
    assert_eq!(f.api.get("/webhook-deliveries?status=&task_id=").await.status, 200);
    assert_eq!(f.api.get("/task?typo=").await.status, 400);
    let blank = f.api.put("/retry-policy/%20", &json!({"max_retries": 1})).await;
    assert_eq!((blank.status.as_u16(), &blank.body["details"]), (400, &json!(["kind: must not be blank"])));
}
