"""Makes generated requests plausible: half of them get the id of a task or batch that exists, because the others only
ever see a 404, and bodies obey the rules that a schema cannot express."""

import json
import os
import urllib.request
import uuid
import zlib

import schemathesis
from hypothesis import strategies as st

URL, KEY = os.environ["FUZZ_URL"], os.environ["FUZZ_KEY"]


def create(body):
    request = urllib.request.Request(URL + "/task", json.dumps(body).encode(), {"Authorization": "Bearer " + KEY})
    with urllib.request.urlopen(request) as answer:
        return answer.headers["X-Batch-ID"], [task["id"] for task in json.load(answer)]


def existing():
    """Tasks that run, wait, are not due yet, and will be retried: some for each seed of the fuzzer to spoil."""
    retry = {"max_retries": 3, "strategy": "immediate"}
    rules = [{"type": "Concurency", "max_concurency": 2, "matcher": {"fields": ["a"]}}]
    batches, tasks = [], []
    for _ in range(20):
        batch, ids = create(
            {
                "scope": "fuzz",
                "tasks": [
                    {"id": "a", "name": "a", "kind": "k", "retry": retry, "metadata": {"a": 1}, "rules": rules},
                    {"name": "b", "kind": "k", "dependencies": [{"id": "a"}]},
                    {"name": "c", "kind": "k", "run_at": "2100-01-01T00:00:00Z"},
                ],
            }
        )
        batches.append(batch)
        tasks += ids
    return batches, tasks


BATCHES, TASKS = existing()


@schemathesis.hook
def map_path_parameters(context, path_parameters):
    path = context.operation.path if context.operation else ""
    for name in ("id", "batch_id"):
        value = (path_parameters or {}).get(name)
        if value is None or "webhook-deliveries" in path:
            continue
        number = zlib.crc32(str(value).encode())
        if number % 2 == 0:
            known = BATCHES if "batch" in path or "dag" in path else TASKS
            path_parameters[name] = known[number // 2 % len(known)]
    return path_parameters


# URLs of webhooks: a schema can ask for a URI, but not for http or https.
schemathesis.openapi.format(
    "uri", st.builds("http://127.0.0.1:{}/{}".format, st.integers(1, 65535), st.text("abcxyz/._~-", max_size=20))
)

# A query parameter that holds JSON.
schemathesis.openapi.format("json-object", st.dictionaries(st.text("abc", min_size=1), st.integers()).map(json.dumps))

RESERVED = {"host", "content-length", "transfer-encoding", "connection", "idempotency-key", "x-task-id", "x-task-trigger",
            "x-task-attempt", "traceparent", "webhook-id", "webhook-timestamp", "webhook-signature"}


def repair_action(action):
    headers = ((action or {}).get("params") or {}).get("headers")
    if isinstance(headers, dict):
        action["params"]["headers"] = {name: value for name, value in headers.items() if name.lower() not in RESERVED}


def repair_policy(policy):
    """The first delay must not exceed the longest one, and a status is in one list only."""
    if not isinstance(policy, dict):
        return
    first, longest = policy.get("initial_delay_secs"), policy.get("max_delay_secs")
    if first is not None and longest is not None and first > longest:
        policy["initial_delay_secs"] = longest
    elif longest is not None and first is None:
        policy["initial_delay_secs"] = 1
    no = policy.get("no_retry_on_status")
    if isinstance(no, list):
        policy["no_retry_on_status"] = [status for status in no if status not in (policy.get("retry_on_status") or [])]


def repair_tasks(tasks):
    """Ids are used once, dependencies name earlier tasks, and metadata has the fields that rules and matchers compare."""
    ids = set()
    for task in tasks if isinstance(tasks, list) else []:
        if not isinstance(task, dict):
            continue
        known = []
        for dependency in task.get("dependencies") or []:
            if isinstance(dependency, dict) and dependency.get("id") in ids and dependency["id"] not in known:
                known.append(dependency["id"])
        if "dependencies" in task:
            task["dependencies"] = [{"id": name} for name in known]
        if task.get("id") in ids:
            del task["id"]
        elif task.get("id") is not None:
            ids.add(task["id"])
        for matcher in (task.get("dedupe_strategy") or []) + [
            rule.get("matcher") for rule in task.get("rules") or [] if isinstance(rule, dict)
        ]:
            if isinstance(matcher, dict):
                matcher["fields"] = []
        if any(isinstance(rule, dict) and rule.get("type") == "Capacity" for rule in task.get("rules") or []):
            task["expected_count"] = task.get("expected_count") or 0
        # Each task has at most one notification of a kind: all of them together have a limit.
        for name in ("on_success", "on_failure", "on_retry"):
            if isinstance(task.get(name), list):
                task[name] = task[name][:3]
                for action in task[name]:
                    repair_action(action)
        repair_action(task.get("on_start"))
        repair_policy(task.get("retry"))


@schemathesis.hook
def before_call(context, case, *args):
    """Repairs bodies that match their schema. Bodies that are wrong on purpose stay wrong."""
    if str((case.query or {}).get("wait_secs", "")).isdecimal():
        case.query["wait_secs"] = min(int(case.query["wait_secs"]), 61) // 61 * 61  # nobody has time to wait
    meta = getattr(case, "meta", None)
    if meta is not None and not meta.generation.mode.is_positive:
        return
    body, query, headers = case.body, case.query or {}, case.headers or {}
    # Two ways to page exclude each other, page × page_size has a limit, and a key belongs to one body.
    if "page" in query:
        query.pop("cursor", None)
        query["page"] = int(query["page"]) % 1000
    for name in [name for name in headers if name.lower() == "idempotency-key"]:
        headers[name] = str(uuid.uuid4())
    if isinstance(body, dict) and "run" in query and "run" in body:
        body["run"] = query["run"]
    if case.operation.path == "/batch/{id}/rules" and isinstance(body, dict):
        for rule in body.get("rules") or []:
            rule["matcher"]["fields"] = []
    if case.operation.path == "/task" and isinstance(body, list):
        repair_tasks(body)
    elif case.operation.path == "/task" and isinstance(body, dict):
        repair_tasks(body.get("tasks"))
        for action in body.get("on_batch_complete") or []:
            repair_action(action)
    elif case.operation.path == "/retry-policy/{kind}":
        repair_policy(body)


def is_empty(value):
    """Whether a query parameter has no text once it is written: empty collections have none either."""
    if isinstance(value, (list, tuple, dict)):
        return all(is_empty(item) for item in value)
    return value is None or value == ""


@schemathesis.hook
def filter_case(context, case):
    """Drops requests with an empty query parameter: it counts as not given, whatever its schema says."""
    return not any(is_empty(value) for value in (case.query or {}).values())
