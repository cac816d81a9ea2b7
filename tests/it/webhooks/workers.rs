//! docs/workers.md: its table of answers is compared with the source, and its two workers run against the service.
//! `tests/workers/run` installs what the workers need and runs the ignored tests.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use reprise::domain::retry::failure::FailureType;
use serde_json::{Value, json};
use standardwebhooks::Webhook;
use tokio::io::copy_bidirectional;

use crate::support::{Client, Database, Instance, Receiver, Reply, action, eventually};

const PAGE: &str = include_str!("../../../docs/workers.md");
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const OTHER_SECRET: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
const TASK: &str = "00000000-0000-7000-8000-000000000001";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Language {
    Python,
    TypeScript,
}

const LANGUAGES: [Language; 2] = [Language::Python, Language::TypeScript];

impl Language {
    fn code(self) -> &'static str {
        let fence = match self {
            Language::Python => "```python\n",
            Language::TypeScript => "```ts\n",
        };
        let blocks: Vec<&str> = PAGE.split(fence).skip(1).collect();
        let [block] = blocks.as_slice() else { panic!("one block of {self:?}, not {}", blocks.len()) };
        block.split("```").next().unwrap()
    }

    /// The command that runs the worker of the page, compiled once.
    fn command(self) -> Command {
        static COMPILED: OnceLock<PathBuf> = OnceLock::new();
        match self {
            Language::Python => {
                let mut command = Command::new("python3");
                command.args(["-c", self.code()]);
                command
            }
            Language::TypeScript => {
                let mut command = Command::new("node");
                command.arg(COMPILED.get_or_init(compile));
                command
            }
        }
    }
}

/// Compiles the TypeScript worker where its compiler and its types are installed.
fn compile() -> PathBuf {
    let tools = PathBuf::from(std::env::var("WORKER_TOOLS").expect("tests/workers/run sets WORKER_TOOLS"));
    let source = tools.join("worker.mts");
    std::fs::write(&source, Language::TypeScript.code()).unwrap();
    let mut tsc = Command::new(tools.join("node_modules/.bin/tsc"));
    tsc.args(["--strict", "--target", "es2022", "--module", "nodenext", "--types", "node"]).arg(&source);
    let output = tsc.current_dir(&tools).output().unwrap();
    assert!(output.status.success(), "tsc --strict: {}", String::from_utf8_lossy(&output.stdout));
    tools.join("worker.mjs")
}

/// A worker of the page as a process.
struct Worker {
    language: Language,
    child: Child,
    url: String,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Worker {
    async fn start(language: Language, reprise: &str, secret: &str) -> Worker {
        for _ in 0..5 {
            if let Some(worker) = Worker::try_start(language, reprise, secret).await {
                return worker;
            }
        }
        panic!("the {language:?} worker does not start");
    }

    /// None if it ended before it listened: another process may have taken its port.
    async fn try_start(language: Language, reprise: &str, secret: &str) -> Option<Worker> {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = language.command();
        command.env_clear();
        for name in ["PATH", "HOME"] {
            command.envs(std::env::var_os(name).map(|value| (name, value)));
        }
        command.envs([("PORT", port.to_string().as_str()), ("REPRISE_URL", reprise), ("SECRET", secret)]);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let (lines, out) = (Arc::new(Mutex::new(Vec::new())), BufReader::new(child.stdout.take().unwrap()));
        let heard = Arc::clone(&lines);
        std::thread::spawn(move || out.lines().map_while(Result::ok).for_each(|line| heard.lock().unwrap().push(line)));
        let mut worker = Worker { language, child, url: format!("http://127.0.0.1:{port}"), lines };
        let listens = eventually("a worker to listen", async || {
            if worker.child.try_wait().unwrap().is_some() {
                return Some(false);
            }
            TcpStream::connect(("127.0.0.1", port)).is_ok().then_some(true)
        });
        listens.await.then_some(worker)
    }

    fn on_start(&self, job: &Value) -> Value {
        json!({"kind": "Webhook", "params": {"url": format!("{}/start?a=b", self.url), "verb": "Post", "body": job}})
    }

    /// Calls the worker as Reprise does, about `run` of a task of the service at `reprise`.
    async fn call(&self, reprise: &str, trigger: &str, run: u32, job: &Value) -> u16 {
        let id = format!("{TASK}:{trigger}:success:{run}");
        self.send(&id, &handle(reprise, run), now(), SECRET, job).await
    }

    async fn send(&self, id: &str, handle: &str, at: i64, secret: &str, job: &Value) -> u16 {
        let body = job.to_string();
        let signature = Webhook::new(secret).unwrap().sign(id, at, body.as_bytes()).unwrap();
        let headers = [("webhook-id", id), ("webhook-timestamp", &at.to_string()), ("webhook-signature", &signature)];
        let query: String = url::form_urlencoded::byte_serialize(handle.as_bytes()).collect();
        let answer = Client::new(&self.url).post_with(&format!("/?handle={query}"), &headers, job).await;
        if answer.status == 200 {
            assert_eq!(answer.body, json!({"kind": "Webhook", "params": {"url": self.url, "verb": "Post"}}));
        }
        answer.status.as_u16()
    }

    /// Waits until the worker says that it stopped this run.
    async fn stopped(&self, run: &str) {
        let line = format!("stopped {run}");
        eventually(&format!("{:?}: {line}", self.language), async || {
            self.lines.lock().unwrap().contains(&line).then_some(())
        })
        .await;
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn handle(reprise: &str, run: u32) -> String {
    format!("{reprise}/task/{TASK}?run={run}&token=0123")
}

fn now() -> i64 {
    i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()).unwrap()
}

/// A service that signs its calls, and one worker of each language.
async fn service_and_workers(secret: &str) -> (Instance, Vec<Worker>) {
    let db = Database::new().await;
    let instance = Instance::start(&db.url, &[("WEBHOOK_SIGNING_SECRETS", SECRET)]);
    let base = instance.api.base().to_owned();
    let workers = join_all(LANGUAGES.map(|language| Worker::start(language, &base, secret))).await;
    (instance, workers)
}

async fn attempts(api: &Client, id: &str) -> Vec<Value> {
    api.get(&format!("/task/{id}/attempts")).await.body.as_array().unwrap().clone()
}

/// Statuses in the first column of the table of answers, with the failure type and whether it is retried.
fn table_of_answers() -> HashMap<String, (String, bool)> {
    let table = PAGE.split("| answer | failure type | retried |").nth(1).unwrap();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let mut found = HashMap::new();
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [answer, failure_type, retried] = cells[..] else { panic!("three cells: {row}") };
        let retried = match retried {
            "yes" => true,
            "no" => false,
            other => panic!("yes or no, not {other}"),
        };
        for status in answer.split('`').skip(1).step_by(2) {
            found.insert(status.to_owned(), (failure_type.trim_matches('`').to_owned(), retried));
        }
    }
    found
}

#[test]
fn the_table_of_answers_is_true() {
    let table = table_of_answers();
    for status in 300..600 {
        let exact = table.get(&status.to_string());
        let Some((failure_type, retried)) = exact.or_else(|| table.get(&format!("{}xx", status / 100))) else {
            panic!("{status} is not in the table")
        };
        let actual = FailureType::of_http_status(status);
        assert_eq!((failure_type.as_str(), *retried), (actual.as_str(), !actual.is_final()), "{status}");
    }
}

#[test]
fn the_workers_are_short() {
    for language in LANGUAGES {
        let lines = language.code().lines().filter(|line| !line.trim().is_empty()).count();
        assert!((20..=45).contains(&lines), "{language:?}: {lines} lines");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "needs python3 and node; .ci/run runs it"]
async fn a_worker_starts_a_task_keeps_it_alive_and_reports_success() {
    let (instance, workers) = service_and_workers(SECRET).await;
    let api = &instance.api;
    join_all(workers.iter().map(async |worker| {
        // It works for longer than its timeout.
        let job = json!({"steps": 16, "step_secs": 0.3});
        let task = json!([{"name": "n", "kind": "k", "timeout": 3, "on_start": worker.on_start(&job)}]);
        let id = &api.create(&task).await[0];
        let running = api.wait_for(id, "Running").await;
        assert_eq!(action(&running, "Cancel")["params"]["url"], worker.url, "{running}");
        api.wait_for(id, "Success").await;
        let attempts = attempts(api, id).await;
        assert_eq!(attempts.len(), 1, "{:?}: {attempts:?}", worker.language);
        let date = |name: &str| attempts[0][name].as_str().unwrap().parse::<chrono::DateTime<chrono::Utc>>().unwrap();
        let took = date("ended_at") - date("started_at");
        assert!(took > chrono::TimeDelta::seconds(3), "{:?}: it was kept alive: {took}", worker.language);
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "needs python3 and node; .ci/run runs it"]
async fn a_failing_worker_reports_failure_and_is_retried() {
    let (instance, workers) = service_and_workers(SECRET).await;
    let api = &instance.api;
    join_all(workers.iter().map(async |worker| {
        let job = json!({"step_secs": 0, "error": "no such image"});
        let retry = json!({"max_retries": 1, "strategy": "immediate", "jitter_ms": 0});
        let task = json!([{"name": "n", "kind": "k", "retry": retry, "on_start": worker.on_start(&job)}]);
        let id = &api.create(&task).await[0];
        api.wait_for(id, "Failure").await;
        let attempts = attempts(api, id).await;
        let outcomes: Vec<&Value> = attempts.iter().map(|attempt| &attempt["outcome"]).collect();
        assert_eq!(outcomes, ["retried", "failed"], "{:?}: {attempts:?}", worker.language);
        for attempt in &attempts {
            assert!(attempt["error"].as_str().unwrap().contains("no such image"), "{attempt}");
            assert_eq!(attempt["failure_type"], "server_error");
        }
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "needs python3 and node; .ci/run runs it"]
async fn a_worker_stops_a_canceled_task() {
    let (instance, workers) = service_and_workers(SECRET).await;
    let api = &instance.api;
    join_all(workers.iter().map(async |worker| {
        let job = json!({"steps": 100_000, "step_secs": 0.1});
        let id = &api.create(&json!([{"name": "n", "kind": "k", "on_start": worker.on_start(&job)}])).await[0];
        api.wait_for(id, "Running").await;
        assert_eq!(api.delete(&format!("/task/{id}")).await.status, 200);
        worker.stopped(&format!("{}/task/{id}?run=0", api.base())).await;
        eventually("the cancel call to be answered", async || {
            let deliveries = api.get(&format!("/webhook-deliveries?task_id={id}")).await.body;
            assert_eq!(deliveries[0]["trigger"], "cancel", "{deliveries}");
            (deliveries[0]["status"] == "success").then_some(())
        })
        .await;
        assert_eq!(api.status(id).await, "Canceled");
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "needs python3 and node; .ci/run runs it"]
async fn a_worker_refuses_a_wrong_signature() {
    let (instance, workers) = service_and_workers(OTHER_SECRET).await;
    let api = &instance.api;
    join_all(workers.iter().map(async |worker| {
        let retry = json!({"max_retries": 3});
        let task = json!([{"name": "n", "kind": "k", "retry": retry, "on_start": worker.on_start(&json!({}))}]);
        let id = &api.create(&task).await[0];
        let task = api.wait_for(id, "Failure").await;
        assert_eq!(task["failure_type"], "authentication_error", "{:?}: {task}", worker.language);
        assert_eq!(attempts(api, id).await[0]["http_status"], 401);
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "needs python3 and node; .ci/run runs it"]
async fn a_worker_refuses_calls_that_are_unsigned_old_or_about_another_service() {
    let service = Receiver::start().await;
    join_all(LANGUAGES.map(async |language| {
        let worker = Worker::start(language, &service.url, SECRET).await;
        let (job, id) = (json!({"step_secs": 0}), format!("{TASK}:start:success:0"));
        let ours = handle(&service.url, 0);
        let unsigned = Client::new(&worker.url).post(&format!("/?handle={ours}"), &job).await;
        assert_eq!(unsigned.status, 401, "{language:?}");
        for wrong_time in [now() - 400, now() + 400] {
            assert_eq!(worker.send(&id, &ours, wrong_time, SECRET, &job).await, 401, "{language:?}");
        }
        assert_eq!(worker.send(&id, &ours, now(), OTHER_SECRET, &job).await, 401, "{language:?}");
        for wrong_handle in [handle("http://127.0.0.1:1", 0), handle(&service.url, 1), String::new()] {
            assert_eq!(worker.send(&id, &wrong_handle, now(), SECRET, &job).await, 400, "{language:?}");
        }
        assert_eq!(worker.send(&id, &ours, now(), SECRET, &job).await, 200, "{language:?}");
    }))
    .await;
}

/// Passes connections on to `target`, but for the first `lost` ones, which it closes.
async fn unreliable(target: &str, lost: usize) -> String {
    let address = target.trim_start_matches("http://").to_owned();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        for _ in 0..lost {
            drop(listener.accept().await.unwrap());
        }
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = tokio::net::TcpStream::connect(&address).await.unwrap();
            tokio::spawn(async move { copy_bidirectional(&mut client, &mut server).await });
        }
    });
    url
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "needs python3 and node; .ci/run runs it"]
async fn a_worker_repeats_its_report_and_ignores_a_repeated_start() {
    join_all(LANGUAGES.map(async |language| {
        let service = Receiver::start().await;
        let patches = Arc::new(Mutex::new(0));
        service.answer_with(move |call| {
            let mut patches = patches.lock().unwrap();
            *patches += usize::from(call.method == "PATCH");
            let reply = if call.method == "PATCH" && *patches <= 2 { Reply::status(503) } else { Reply::ok() };
            async move { reply }
        });
        // The heartbeat and the first report get no answer, the next two reports a 503.
        let reprise = unreliable(&service.url, 2).await;
        let worker = Worker::start(language, &reprise, SECRET).await;
        let job = json!({"step_secs": 0});
        assert_eq!(worker.call(&reprise, "start", 0, &job).await, 200);
        assert_eq!(worker.call(&reprise, "start", 0, &job).await, 200);
        let reports = || -> Vec<Value> {
            let calls = service.at(&format!("/task/{TASK}"));
            calls.into_iter().filter(|call| call.method == "PATCH").map(|call| call.body).collect()
        };
        eventually("the report to be taken", async || (reports().len() == 3).then_some(())).await;
        assert_eq!(worker.call(&reprise, "start", 0, &job).await, 200);
        // When the next run has ended, a second execution of the first one would have, too.
        assert_eq!(worker.call(&reprise, "start", 1, &json!({"step_secs": 1})).await, 200);
        eventually("the next run to end", async || (reports().len() >= 4).then_some(())).await;
        assert_eq!(reports(), vec![json!({"status": "Success"}); 4], "{language:?}");
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "needs python3 and node; .ci/run runs it"]
async fn a_worker_stops_on_409_and_on_a_cancel_call() {
    join_all(LANGUAGES.map(async |language| {
        let service = Receiver::start().await;
        let worker = Worker::start(language, &service.url, SECRET).await;
        let endless = json!({"steps": 1_000_000, "step_secs": 0.01});
        let heartbeats = || service.received().len();

        assert_eq!(worker.call(&service.url, "start", 0, &endless).await, 200);
        eventually("heartbeats", async || (heartbeats() > 2).then_some(())).await;
        service.answer(Reply::status(503));
        let before = heartbeats();
        eventually("it to go on after 503", async || (heartbeats() > before + 2).then_some(())).await;
        service.answer(Reply::status(409));
        worker.stopped(&format!("{}/task/{TASK}?run=0", service.url)).await;

        service.answer(Reply::ok());
        assert_eq!(worker.call(&service.url, "start", 1, &endless).await, 200);
        let before = heartbeats();
        eventually("heartbeats", async || (heartbeats() > before + 2).then_some(())).await;
        assert_eq!(worker.call(&service.url, "cancel", 1, &json!({"reprise": {}})).await, 200);
        worker.stopped(&format!("{}/task/{TASK}?run=1", service.url)).await;
        assert!(service.received().iter().all(|call| call.method == "PUT"), "{language:?}: it reports nothing");
    }))
    .await;
}

#[test]
fn the_page_links_to_pages_that_exist() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let links = PAGE.split("](").skip(1).map(|rest| rest.split(')').next().unwrap());
    for link in links.filter(|link| !link.starts_with("https://")) {
        let (page, anchor) = link.split_once('#').unwrap_or((link, ""));
        let text = match page {
            "" => PAGE.to_owned(),
            page => std::fs::read_to_string(docs.join(page)).unwrap_or_else(|_| panic!("{link}")),
        };
        let anchors = text.lines().filter(|line| line.starts_with('#')).map(|line| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect::<String>()
        });
        assert!(anchor.is_empty() || anchors.into_iter().any(|found| found == anchor), "{link}");
    }
}
