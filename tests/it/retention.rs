//! What is old and finished goes, whole; nothing else does.

use serde_json::json;

use crate::support::{Fixture, Receiver, Reply};

#[tokio::test]
async fn only_old_finished_and_told_batches_are_deleted() {
    let mut f = Fixture::with(&["--webhook-max-attempts", "1"]).await;
    let receiver = Receiver::start().await;
    receiver.answer(Reply::status(500));
    let done = f
        .api
        .create(&json!([{"id": "a", "name": "a", "kind": "k", "retry": {"max_retries": 1}},
                                    {"name": "b", "kind": "k", "dependencies": [{"id": "a"}]}]))
        .await;
    let untold = f.api.create(&json!([{"name": "c", "kind": "k", "on_success": [receiver.action("/x")]}])).await;
    let alive = f.api.create(&json!([{"name": "d", "kind": "k", "timeout": 86_400}, {"name": "e", "kind": "k"}])).await;
    f.claim().await;
    f.api.fail(&done[0]).await;
    f.advance(10);
    f.release().await;
    f.claim().await;
    f.api.succeed(&done[0]).await;
    f.claim().await;
    f.api.succeed(&done[1]).await;
    f.api.succeed(&untold[0]).await;
    f.api.succeed(&alive[1]).await;

    f.advance(6 * 86_400);
    assert_eq!(f.clean_up(7).await, 0, "not old enough");
    f.advance(2 * 86_400);
    assert_eq!(f.clean_up(7).await, 2);
    assert_eq!(f.clean_up(7).await, 0);
    assert_eq!(f.api.get(&format!("/task/{}", done[0])).await.status, 404);
    for id in [&untold[0], &alive[0], &alive[1]] {
        assert_eq!(f.api.get(&format!("/task/{id}")).await.status, 200);
    }
    for table in [
        "link",
        "attempt where task_id not in (select id from task)",
        "task_spec where id not in (select id from task)",
    ] {
        assert_eq!(f.db.number(&format!("select count(*) from {table}")).await, 0, "{table}");
    }
    f.db.assert_books_balance().await;

    f.deliver().await;
    assert_eq!(f.clean_up(7).await, 1, "given up is told");
    assert_eq!(f.db.number("select count(*) from outbox").await, 0);
    f.db.assert_books_balance().await;
}
