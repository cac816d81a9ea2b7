//! Idempotency keys: a repeated request takes effect once.

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::{Answer, Fixture};

async fn post(f: &Fixture, key: &str, body: &Value) -> Answer {
    f.api.post_with("/task", &[("Idempotency-Key", key)], body).await
}

#[tokio::test]
async fn a_repeated_idempotency_key_gets_the_first_answer() {
    let f = Fixture::new().await;
    let body =
        json!([{"id": "a", "name": "n", "kind": "k"}, {"name": "m", "kind": "k", "dependencies": [{"id": "a"}]}]);
    let first = post(&f, "one", &body).await;
    assert_eq!(first.status, 201);
    f.claim().await;
    f.advance(60);
    let again = post(&f, "one", &body).await;
    assert_eq!((again.status, &again.body), (first.status, &first.body), "as it was answered, not as it is now");
    assert_eq!(again.headers["x-batch-id"], first.headers["x-batch-id"]);
    let reordered =
        json!([{"kind": "k", "name": "n", "id": "a"}, {"kind": "k", "name": "m", "dependencies": [{"id": "a"}]}]);
    assert_eq!(post(&f, "one", &reordered).await.body, first.body, "the order of fields does not matter");
    assert_eq!(f.db.number("select count(*) from task").await, 2);

    let other = post(&f, "one", &json!([{"name": "x", "kind": "k"}])).await;
    assert_eq!(
        (other.status.as_u16(), &other.headers["content-type"]),
        (422, &"application/problem+json".parse().unwrap())
    );
    assert_ne!(post(&f, "two", &body).await.body, first.body, "another key is another request");
    let bad = json!([{"name": "x"}]);
    assert_eq!(post(&f, "three", &bad).await.status, 400);
    assert_eq!(post(&f, "three", &body).await.status, 201, "a refused request uses up no key");
    assert_eq!(post(&f, &"k".repeat(256), &body).await.status, 400);
    let nothing = post(&f, "four", &json!([])).await;
    assert_eq!(nothing.status, 204);
    assert_eq!(post(&f, "four", &json!([])).await.headers["x-batch-id"], nothing.headers["x-batch-id"]);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn an_idempotency_key_expires_after_its_ttl() {
    let f = Fixture::with(&["--idempotency-ttl-secs", "100"]).await;
    let body = json!([{"name": "n", "kind": "k"}]);
    let first = post(&f, "one", &body).await;
    f.advance(101);
    let later = post(&f, "one", &json!([{"name": "other", "kind": "k"}])).await;
    assert_eq!(later.status, 201, "free again, for another body too");
    assert_ne!(later.headers["x-batch-id"], first.headers["x-batch-id"]);
    f.advance(86_401);
    assert_eq!(f.clean_up(0).await, 1);
    assert_eq!(f.db.number("select count(*) from idempotency").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_requests_with_one_idempotency_key_create_one_batch() {
    let f = Fixture::new().await;
    for round in 0..5 {
        let posts = (0..20).map(|_| {
            let (api, key) = (f.api.clone(), format!("key {round}"));
            tokio::spawn(async move {
                api.post_with("/task", &[("Idempotency-Key", &key)], &json!([{"name": "n", "kind": "k"}])).await
            })
        });
        let answers: Vec<Answer> = join_all(posts).await.into_iter().map(Result::unwrap).collect();
        assert!(answers.iter().all(|a| a.status == 201 && a.body == answers[0].body));
    }
    assert_eq!(f.db.number("select count(*) from task").await, 5);
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn idempotency_keys_are_separate_for_each_caller() {
    let keys = "one:key-of-number-one,two:key-of-number-two,one:the-next-key-of-one";
    let f = Fixture::with(&["--api-keys", keys]).await;
    let post = async |key: &str, name: &str| {
        f.api.key(key).post_with("/task", &[("Idempotency-Key", "same")], &json!([{"name": name, "kind": "k"}])).await
    };
    let first = post("key-of-number-one", "a").await;
    assert_eq!(first.status, 201);
    assert_eq!(post("key-of-number-two", "b").await.status, 201);
    assert_eq!(post("the-next-key-of-one", "a").await.body, first.body, "the same caller with a new key");
    assert_eq!(post("key-of-number-one", "b").await.status, 422);
    assert_eq!(f.db.number("select count(*) from task").await, 2);
}
