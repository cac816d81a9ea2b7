//! The guard of outgoing calls: allowed addresses, limits on answers, permits per host, and signatures.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use standardwebhooks::Webhook;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::support::instance::command;
use crate::support::{Database, Fixture, Instance, PATIENCE, Receiver, Reply, eventually};

const FIRST: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const SECOND: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";

fn action(url: &str) -> Value {
    json!({"kind": "Webhook", "params": {"url": url, "verb": "Post"}})
}

/// The task after its `on_start` was sent to this URL.
async fn start(f: &mut Fixture, url: &str) -> Value {
    let retry = json!({"max_retries": 3});
    let ids = f.api.create(&json!([{"name": "n", "kind": "k", "on_start": action(url), "retry": retry}])).await;
    f.start().await;
    f.api.task(&ids[0]).await
}

#[tokio::test]
async fn no_spelling_of_a_private_address_is_called() {
    let mut f = Fixture::with(&["--webhook-allow", "10.9.9.9"]).await;
    let receiver = Receiver::start().await;
    let port = receiver.url.rsplit(':').next().unwrap().to_owned();
    for host in
        ["127.0.0.1", "127.1", "2130706433", "0x7f.1", "0177.0.0.1", "[::ffff:127.0.0.1]", "[::1]", "0", "0.0.0.0"]
    {
        let task = start(&mut f, &format!("http://{host}:{port}/start")).await;
        assert_eq!((&task["status"], &task["failure_type"]), (&json!("Failure"), &json!("validation_error")), "{host}");
        assert_eq!(task["attempt"], 0, "it is final");
        let reason = task["failure_reason"].as_str().unwrap();
        assert!(reason.starts_with("on_start: ") && reason.ends_with(" is not an allowed address (WEBHOOK_ALLOW)"));
    }
    for host in ["localhost", "LOCALHOST"] {
        let task = start(&mut f, &format!("http://{host}:{port}/start")).await;
        assert_eq!((&task["status"], &task["failure_type"]), (&json!("Failure"), &json!("validation_error")), "{host}");
        let reason = task["failure_reason"].as_str().unwrap();
        assert!(reason.ends_with(" has no allowed address (WEBHOOK_ALLOW)"), "{reason}");
    }
    assert!(receiver.received().is_empty());
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn webhook_allow_permits_the_names_and_ranges_it_lists() {
    let receiver = Receiver::start().await;
    let by_name = receiver.url.replace("127.0.0.1", "localhost");
    let mapped = receiver.url.replace("127.0.0.1", "[::ffff:127.0.0.1]");
    let cases = [
        ("localhost", &by_name, "Running"),
        ("localhost", &receiver.url, "Failure"),
        ("127.0.0.0/8", &receiver.url, "Running"),
        ("127.0.0.0/8", &mapped, "Running"),
        // Of the addresses of a name, an allowed one is used.
        ("127.0.0.1", &by_name, "Running"),
        ("127.0.0.2", &receiver.url, "Failure"),
        ("host", &by_name, "Failure"),
    ];
    for (allow, url, status) in cases {
        let mut f = Fixture::with(&["--webhook-allow", allow]).await;
        assert_eq!(start(&mut f, url).await["status"], status, "{allow} {url}");
    }
}

#[tokio::test]
async fn a_notification_to_a_forbidden_address_is_kept_unsent() {
    let mut f = Fixture::with(&["--webhook-allow", ""]).await;
    let receiver = Receiver::start().await;
    let ids = f.api.create(&json!([{"name": "n", "kind": "k", "on_success": [receiver.action("/ok")]}])).await;
    f.claim().await;
    f.api.succeed(&ids[0]).await;
    assert_eq!(f.deliver().await, 1);
    let list = f.api.get("/webhook-deliveries").await.body;
    assert_eq!(list[0]["last_error"], "127.0.0.1 is not an allowed address (WEBHOOK_ALLOW)");
    assert_eq!(list[0]["status"], "pending", "the setting may be corrected before the attempts are used up");
    assert!(receiver.received().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loopback_is_forbidden_by_default_with_a_database_url() {
    let db = Database::new().await;
    let receiver = Receiver::start().await;
    let task = json!([{"name": "n", "kind": "k", "on_start": receiver.action("/start")}]);
    let closed = Instance::start(&db.url, &[("WEBHOOK_ALLOW", "")]);
    let ids = closed.api.create(&task).await;
    let failed = closed.api.wait_for(&ids[0], "Failure").await;
    assert_eq!(failed["failure_reason"], "on_start: 127.0.0.1 is not an allowed address (WEBHOOK_ALLOW)");
    assert!(receiver.received().is_empty());
    closed.kill();
    // A proxy that is set is not used: it would decide for itself where to connect.
    let proxy = Receiver::start().await;
    let names = ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"].map(|name| (name, proxy.url.as_str()));
    let open = Instance::start(&db.url, &[&names[..], &[("WEBHOOK_ALLOW", "127.0.0.1")]].concat());
    let ids = open.api.create(&task).await;
    open.api.wait_for(&ids[0], "Running").await;
    assert_eq!((receiver.received().len(), proxy.received().len()), (1, 0));
}

#[test]
fn bad_webhook_settings_are_refused_with_one_line_without_secrets() {
    let cases = [
        (("WEBHOOK_ALLOW", "*.example"), "reprise: WEBHOOK_ALLOW=*.example: must be host names, .suffixes"),
        (
            ("WEBHOOK_SIGNING_SECRETS", "whsec_hunter22!"),
            "reprise: WEBHOOK_SIGNING_SECRETS: must be secrets of the form",
        ),
        (("WEBHOOK_SIGNING_SECRETS_FILE", "/nowhere"), "reprise: WEBHOOK_SIGNING_SECRETS_FILE=/nowhere: must be a"),
        (("WEBHOOK_CONCURRENCY_PER_HOST", "0"), "reprise: WEBHOOK_CONCURRENCY_PER_HOST=0: must be a whole number"),
    ];
    for (setting, line) in cases {
        let output = command(&[setting]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.starts_with(line) && said.lines().count() == 1, "{said}");
        assert!(!said.contains("hunter"), "{said}");
    }
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let mut f = Fixture::new().await;
    let (receiver, elsewhere) = (Receiver::start().await, Receiver::start().await);
    for status in [301, 302, 303, 307, 308] {
        receiver.answer(Reply::status(status).header("location", &format!("{}/stolen", elsewhere.url)));
        let ids = f.api.create(&json!([{"name": "n", "kind": "k", "on_start": receiver.action("/start")}])).await;
        f.start().await;
        assert_eq!(f.api.task(&ids[0]).await["failure_type"], "unknown", "{status}");
    }
    assert!(elsewhere.received().is_empty());
}

/// A server that answers every call with these bytes again and again until it is hung up on.
async fn endless(
    head: &'static str,
    bytes: &'static [u8],
    times: usize,
    pause: Duration,
) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let written = Arc::new(AtomicUsize::new(0));
    let bytes = bytes.repeat(times);
    let count = Arc::clone(&written);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (count, bytes) = (Arc::clone(&count), bytes.clone());
            tokio::spawn(async move {
                let _ = stream.read(&mut [0; 4096]).await;
                let _ = stream.write_all(head.as_bytes()).await;
                while stream.write_all(&bytes).await.is_ok() {
                    count.fetch_add(bytes.len(), Ordering::SeqCst);
                    tokio::time::sleep(pause).await;
                }
            });
        }
    });
    (url, written)
}

#[tokio::test]
async fn an_answer_is_read_up_to_a_size_and_a_time_limit() {
    // The time limit is far longer than the test waits: only the size limit can end these calls.
    let mut f = Fixture::with(&["--webhook-timeout-ms", "600000"]).await;
    let (url, written) = endless("HTTP/1.1 200 OK\r\n\r\n", b"x", 65_536, Duration::from_millis(1)).await;
    let task =
        tokio::time::timeout(PATIENCE, start(&mut f, &url)).await.expect("an endless body is not read to its end");
    assert_eq!(task["status"], "Running", "the receiver answered 2xx");
    assert!(written.load(Ordering::SeqCst) < 64 << 20);
    let (url, _) = endless("HTTP/1.1 200 OK\r\n", b"x: y\r\n", 10_000, Duration::ZERO).await;
    let task =
        tokio::time::timeout(PATIENCE, start(&mut f, &url)).await.expect("endless headers are not read to their end");
    assert_eq!(task["failure_type"], "network_error");

    // Receivers that send a byte now and then, and never come to an end, meet the time limit.
    let mut f = Fixture::with(&["--webhook-timeout-ms", "1500"]).await;
    let (url, _) = endless("HTTP/1.1 200 OK\r\n\r\n", b"x", 1, Duration::from_millis(50)).await;
    assert_eq!(start(&mut f, &url).await["failure_type"], "timeout");
    let (url, _) = endless("HTTP/1.1 200 OK\r\n", b"x: y\r\n", 1, Duration::from_millis(50)).await;
    let task = start(&mut f, &url).await;
    assert!(["timeout", "network_error"].contains(&task["failure_type"].as_str().unwrap()), "{task}");
}

#[tokio::test]
async fn headers_and_urls_cannot_inject_into_a_request() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    let params = |headers: Value| {
        json!([{"name": "n", "kind": "k", "on_start": {"kind": "Webhook", "params": {
            "url": format!("{}/start", receiver.url), "verb": "Post", "headers": headers}}}])
    };
    for headers in [
        json!({"x-a": "b\r\nx-evil: 1"}),
        json!({"x-a": "b\nx-evil: 1"}),
        json!({"x-a\r\nx-evil": "1"}),
        json!({"x-a: b\r\nx-evil": "1"}),
        json!({"x-a": "b\u{0}"}),
        json!({"": "b"}),
        json!({"Host": "elsewhere"}),
        json!({"Transfer-Encoding": "chunked"}),
        json!({"webhook-signature": "v1,forged"}),
        json!({"Idempotency-Key": "forged"}),
    ] {
        assert_eq!(f.api.post("/task", &params(headers.clone())).await.status, 400, "{headers}");
    }
    for path in ["/start HTTP/1.1\r\nx-evil: 1\r\n\r\n", "/start\r\nx-evil: 1", "/start?a=\r\nx-evil: 1"] {
        let task = start(&mut f, &format!("{}{path}", receiver.url)).await;
        assert_eq!(task["status"], "Running", "{task}");
    }
    // Nor can the cancel action in the answer of a worker.
    let cancel = json!({"kind": "Webhook", "params": {
        "url": format!("{}/cancel", receiver.url), "verb": "Post", "headers": {"x-a": "b\r\nx-evil: 1"}}});
    receiver.answer(Reply { body: cancel, ..Reply::ok() });
    let task = start(&mut f, &format!("{}/start", receiver.url)).await;
    assert_eq!(task["status"], "Running");
    f.api.delete(&format!("/task/{}", task["id"].as_str().unwrap())).await;
    f.deliver().await;
    let calls = receiver.received();
    assert_eq!(calls.len(), 4, "one request each");
    assert!(calls.iter().all(|call| call.headers.get("x-evil").is_none()));
}

#[tokio::test]
async fn a_receiver_at_its_limit_does_not_delay_other_receivers() {
    let mut f = Fixture::with(&["--webhook-concurrency", "4", "--webhook-concurrency-per-host", "2"]).await;
    let (slow, quick) = (Receiver::start().await, Receiver::start().await);
    let gate = Arc::new(Semaphore::new(0));
    let closed = Arc::clone(&gate);
    slow.answer_with(move |_| {
        let gate = Arc::clone(&closed);
        async move {
            gate.acquire().await.unwrap().forget();
            Reply::ok()
        }
    });
    // More calls to the slow receiver than the service may hold, and all of them before the quick one.
    let mut tasks: Vec<Value> =
        (0..12).map(|_| json!({"name": "n", "kind": "k", "on_start": slow.action("/start")})).collect();
    tasks.push(json!({"name": "n", "kind": "k", "on_start": quick.action("/start")}));
    let ids = f.api.create(&json!(tasks)).await;
    eventually("the quick one to be called", async || {
        f.claim().await;
        (quick.received().len() == 1).then_some(())
    })
    .await;
    assert_eq!(slow.received().len(), 2, "no more than its host permits");
    f.write_answers().await;
    assert_eq!(f.api.status(&ids[12]).await, "Running");
    // Waiting tasks keep their claims.
    f.advance(20);
    f.keeper().renew().await.unwrap();
    f.advance(20);
    assert_eq!(f.expire().await, 0);
    // A task that is canceled while it waits is not called.
    let called: Vec<String> = slow.received().iter().map(|call| call.header("x-task-id").to_owned()).collect();
    let waiting = ids[..12].iter().find(|id| !called.contains(id)).unwrap();
    assert_eq!(f.api.delete(&format!("/task/{waiting}")).await.status, 200);
    gate.add_permits(100);
    eventually("the others to run", async || {
        let running = f.db.number("select count(*) from task where status = 'running'").await;
        if running < 12 {
            f.write_answers().await;
        }
        (running == 12).then_some(())
    })
    .await;
    assert_eq!(slow.received().len(), 11, "each was called once");
    f.db.assert_counters_match().await;
}

#[tokio::test]
async fn a_notification_that_gets_no_host_permit_is_put_back_uncounted() {
    let mut f = Fixture::with(&["--webhook-concurrency-per-host", "1"]).await;
    let receiver = Receiver::start().await;
    let gate = Arc::new(Semaphore::new(0));
    let closed = Arc::clone(&gate);
    receiver.answer_with(move |_| {
        let gate = Arc::clone(&closed);
        async move {
            gate.acquire().await.unwrap().forget();
            Reply::ok()
        }
    });
    let hooks = [receiver.action("/a"), receiver.action("/b")];
    let ids = f.api.create(&json!([{"name": "n", "kind": "k", "on_success": hooks}])).await;
    f.claim().await;
    f.api.succeed(&ids[0]).await;
    // The first result is that of the notification that waited for a permit: the other call is not answered yet.
    assert_eq!(f.begin_delivery().await, 2);
    eventually("the other notification to be sent", async || (receiver.received().len() == 1).then_some(())).await;
    gate.add_permits(2);
    f.write_delivery_results().await;
    let waiting = f.api.get("/webhook-deliveries?status=pending").await.body;
    assert_eq!((waiting.as_array().unwrap().len(), &waiting[0]["attempts"]), (1, &json!(0)), "it was not sent");
    assert_eq!(receiver.received().len(), 1, "one at a time");
    f.advance(30);
    assert_eq!(f.deliver().await, 1);
    assert_eq!(f.db.number("select count(*) from outbox where status = 'success' and attempts = 1").await, 2);
}

#[tokio::test]
async fn calls_are_signed_with_every_secret() {
    let secrets = format!("{FIRST},{SECOND}");
    let mut f = Fixture::with(&["--webhook-signing-secrets", &secrets]).await;
    let receiver = Receiver::start().await;
    let with_body = json!({"kind": "Webhook", "params": {"url": format!("{}/body", receiver.url), "verb": "Put",
        "body": {"z": 1, "a": "\u{e9} \u{1f600}", "n": 1.0}}});
    let ids = f
        .api
        .create(&json!([
            {"name": "n", "kind": "k", "on_start": with_body},
            {"name": "n", "kind": "k", "on_start": receiver.action("/none")},
            {"name": "n", "kind": "k", "on_success": [receiver.action("/told")]},
        ]))
        .await;
    f.start().await;
    f.api.succeed(&ids[2]).await;
    f.deliver().await;
    eventually("three calls", async || (receiver.received().len() == 3).then_some(())).await;
    for call in receiver.received() {
        assert_eq!(call.header("webhook-id"), call.key());
        assert_eq!(call.raw == b"{}", call.path == "/none");
        for secret in [FIRST, SECOND] {
            Webhook::new(secret).unwrap().verify(&call.raw, &call.headers).unwrap();
        }
        assert!(Webhook::new(FIRST).unwrap().verify(b"tampered", &call.headers).is_err());
    }
}

#[tokio::test]
async fn without_a_secret_calls_carry_no_signature() {
    let mut f = Fixture::new().await;
    let receiver = Receiver::start().await;
    start(&mut f, &receiver.url).await;
    let call = receiver.received().pop().unwrap();
    for name in ["webhook-id", "webhook-timestamp", "webhook-signature"] {
        assert!(call.headers.get(name).is_none(), "{name}");
    }
}
