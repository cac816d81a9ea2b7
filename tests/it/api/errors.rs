//! Error answers for programs: each has a stable code, and conflicts say what would make the request work.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{Answer, Fixture};

fn assert_code(answer: &Answer, status: u16, code: &str) {
    assert_eq!((answer.status.as_u16(), &answer.body["code"]), (status, &json!(code)), "{}", answer.body);
    assert_eq!(answer.body["type"], json!(format!("/docs/errors.md#{code}")));
    assert_eq!(answer.body["status"], json!(status));
    assert_eq!(answer.body["error"], answer.body["detail"]);
}

#[tokio::test]
async fn an_invalid_request_lists_its_problems_with_path_code_and_message() {
    let f = Fixture::new().await;
    let answer = f.api.post("/task", &json!([{"name": "", "timeout": 0, "typo": 1}])).await;
    assert_code(&answer, 400, "validation");
    let problems: Vec<(&str, &str)> = answer.body["problems"]
        .as_array()
        .unwrap()
        .iter()
        .map(|problem| (problem["path"].as_str().unwrap(), problem["code"].as_str().unwrap()))
        .collect();
    let expected = [
        ("[0].name", "wrong_length"),
        ("[0].kind", "required"),
        ("[0].timeout", "out_of_range"),
        ("[0].typo", "unknown_field"),
    ];
    assert_eq!(problems, expected);
    assert_eq!(answer.body["details"][2], json!("[0].timeout: must be a whole number from 1 to 86400, not 0"));
    let answer = f.api.get("/task?page_size=x&nonsense=1").await;
    assert_code(&answer, 400, "validation");
    assert_eq!(answer.body["problems"][1]["code"], json!("unknown_parameter"));
}

#[tokio::test]
async fn what_does_not_exist_is_named_by_its_code() {
    let f = Fixture::new().await;
    let id = "01998b5e-7b6a-7c3e-9d55-3f2a1c0b4e77";
    assert_code(&f.api.get(&format!("/task/{id}")).await, 404, "task_not_found");
    assert_code(&f.api.get(&format!("/batch/{id}")).await, 404, "batch_not_found");
    assert_code(&f.api.get(&format!("/dag/{id}")).await, 404, "batch_not_found");
    assert_code(&f.api.post("/webhook-deliveries/1/redeliver", &json!({})).await, 404, "delivery_not_found");
    assert_code(&f.api.delete("/retry-policy/none").await, 404, "retry_policy_not_found");
    assert_code(&f.api.get("/nowhere").await, 404, "path_not_found");
    assert_code(&f.api.call(Method::PUT, "/batches", None).await, 405, "method_not_allowed");
    let page = f.api.get("/docs/errors.md").await;
    assert!(page.status.is_success() && page.body.as_str().unwrap().contains("task_not_found"));
}

#[tokio::test]
async fn a_conflict_says_what_would_make_the_request_work() {
    let f = Fixture::new().await;
    let created = f.api.post("/task", &json!([{"name": "n", "kind": "k", "timeout": 3600}])).await;
    let id = created.body[0]["id"].as_str().unwrap().to_owned();
    let task = format!("/task/{id}");
    let success = json!({"status": "Success"});
    assert_code(&f.api.patch(&task, &success).await, 409, "not_executing");
    f.claim().await;
    assert_code(&f.api.patch(&format!("/task/pause/{id}"), &json!({})).await, 409, "executing");
    assert_code(&f.api.patch(&task, &json!({"status": "Success", "run": 7})).await, 409, "run_not_reached");
    let stuck = f.api.post(&format!("{task}/retry"), &json!({})).await;
    assert_code(&stuck, 409, "not_stuck");
    let detail = stuck.body["detail"].as_str().unwrap();
    assert!(detail.contains("it counts as stuck from 2026-01-01T00:30"), "{detail}");
    assert_eq!((&stuck.body["current_status"], &stuck.body["current_run"]), (&json!("Running"), &json!(0)));
    assert!(f.api.patch(&task, &success).await.status.is_success());
    let failure = json!({"status": "Failure", "failure_reason": "no"});
    assert_code(&f.api.patch(&task, &failure).await, 409, "task_has_ended");
    assert_code(&f.api.post(&format!("{task}/retry"), &json!({})).await, 409, "not_failed");
}

#[tokio::test]
async fn a_reused_idempotency_key_has_its_code() {
    let f = Fixture::new().await;
    let body = |name: &str| json!([{"name": name, "kind": "k"}]);
    let post = async |name: &str| f.api.post_with("/task", &[("idempotency-key", "once")], &body(name)).await;
    assert!(post("a").await.status.is_success());
    assert_code(&post("b").await, 422, "idempotency_key_reused");
}

/// Replaces the id of the examples.
fn with_id(text: &str, id: &str) -> String {
    text.replace("01998b5e-7b6a-7c3e-9d55-3f2a1c0b4e77", id)
}

#[tokio::test]
async fn the_examples_of_the_description_are_accepted() {
    let f = Fixture::new().await;
    let document: Value = serde_json::from_str(include_str!("../../../openapi/openapi.json")).unwrap();
    let mut sent = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let id = operation["operationId"].as_str().unwrap();
            let examples = operation["requestBody"]["content"]["application/json"]["examples"].as_object();
            let bodies: Vec<Option<Value>> = match examples {
                Some(examples) => examples.values().map(|example| Some(example["value"].clone())).collect(),
                None => vec![None],
            };
            for body in bodies {
                // Each example gets a task of its own, which runs and has a failed sibling to retry.
                let tasks = json!([{"name": "n", "kind": "import", "timeout": 3600, "retry": {"max_retries": 3}}]);
                let created = f.api.post("/task", &tasks).await;
                let task = created.body[0]["id"].as_str().unwrap().to_owned();
                let batch = created.body[0]["batch_id"].as_str().unwrap().to_owned();
                f.claim().await;
                if id == "retryTask" {
                    let failure =
                        json!({"status": "Failure", "failure_reason": "no", "failure_type": "validation_error"});
                    f.api.patch(&format!("/task/{task}"), &failure).await;
                }
                if id == "pauseTask" || id == "resumeTask" {
                    let failure = json!({"status": "Failure", "failure_reason": "no"});
                    f.api.patch(&format!("/task/{task}"), &failure).await;
                }
                if id == "deleteRetryPolicy" || id == "getRetryPolicy" {
                    f.api.put("/retry-policy/import", &json!({"max_retries": 1})).await;
                }
                let uses_batch = path.contains("batch") || path.contains("dag");
                let own = if uses_batch { &batch } else { &task };
                let mut url = path.clone();
                let mut query = Vec::new();
                for parameter in operation["parameters"].as_array().into_iter().flatten() {
                    let name = parameter["name"].as_str().unwrap();
                    let Some(example) = parameter.get("example") else { continue };
                    let text = example.as_str().map_or_else(|| example.to_string(), str::to_owned);
                    let text = if name == "batch_id" { with_id(&text, &batch) } else { with_id(&text, own) };
                    match parameter["in"].as_str().unwrap() {
                        "path" => url = url.replace(&format!("{{{name}}}"), &text),
                        "query" => query.push((name.to_owned(), text)),
                        _ => {}
                    }
                }
                let query: String = url::form_urlencoded::Serializer::new(String::new()).extend_pairs(&query).finish();
                let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
                let answer = f.api.call(method, &format!("{url}?{query}"), body.as_ref()).await;
                // The example of a notification names one that does not exist here.
                let expected =
                    if id == "redeliver" { answer.status.as_u16() == 404 } else { answer.status.is_success() };
                assert!(expected, "{id} {url}?{query} {body:?}: {} {}", answer.status, answer.body);
                sent += 1;
            }
        }
    }
    assert!(sent > 30, "only {sent} examples");
}
