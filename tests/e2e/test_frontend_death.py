"""A frontend that dies under load: later requests wait for the next frontend and are answered."""

import http.client
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import psutil

from runtime.testing.node import Node
from runtime.testing.waiting import eventually
from tests.e2e.load import prompts

ANSWER: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
SEARCH: dict[str, Any] = {"query": "the with statement", "collection": "docs", "k": 2}


def ask(node: Node, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Return status and body, over a new connection."""
    parts = urlsplit(node.info.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_requests_sent_after_a_frontends_death_are_answered_by_the_next_one(node: Node) -> None:
    bodies = [ANSWER | {"prompt": prompt, "retrieval": {"collection": "docs", "k": 1}} for prompt in prompts(8)]
    stop = threading.Event()

    def load(body: dict[str, Any]) -> None:
        while not stop.is_set():
            try:
                ask(node, "POST", "/v1/completions", body | {"max_tokens": 40})
            except OSError:
                return  # it was in the frontend that died

    with ThreadPoolExecutor(24) as threads:
        for body in bodies:
            threads.submit(load, body)
        eventually(lambda: node.metric("trinity_requests_in_flight") >= 4, 60, "requests in flight")
        pid = node.pid("frontend-0")
        os.kill(pid, signal.SIGKILL)
        stop.set()
        eventually(lambda: not psutil.pid_exists(pid), 60, "the frontend to be gone")
        asked = [("GET", "/health", None)] + [("POST", "/v1/completions", body) for body in bodies]
        asked += [("POST", "/v1/retrieval", SEARCH)] * 4
        answers = list(threads.map(lambda request: ask(node, *request), asked))
    assert [(status, text) for status, text in answers if status != 200] == []
    assert json.loads(answers[0][1]) == {"status": "ready", "missing": [], "unavailable": {}}
    assert {w.name: w.restarts for w in node.status().workers}["frontend-0"] >= 1
    node.wait_ready()
    node.wait_idle()
