"""Two nodes behind a balancer under load: no request is lost when another version takes their places, one after the
other and on the same files; all are accounted for when one is killed. Both are gateways to a third."""

import os
import shutil
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from runtime.retrieval.collections.bulk_load import create
from runtime.testing.node import Node
from runtime.testing.waiting import eventually
from tests.e2e.conftest import GATEWAY
from tests.fleet.balancers import BALANCERS, balancing, free_port, program
from tests.fleet.load import Outcomes, load, more, takes_part

Start = Callable[[int], Node]

ROOT = Path(__file__).parents[2]
PACKAGES = ("runtime", "gpu", "ipc", "launchers", "dashboards")
NOTES = """
[[collections]]
name = "notes"
path = "notes-{number}"
"""


def other_version(copy: Path) -> Path:
    """A copy of the product, including compiled code, with another version number."""
    being_written = shutil.ignore_patterns("*.lock", "*.tmp*", "*.pyc.*")  # by other tests, which rename them
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=being_written)
    (copy / "trinity_runtime-99.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: trinity-runtime\nVersion: 99.0\n"
    (copy / "trinity_runtime-99.0.dist-info" / "METADATA").write_text(metadata)
    return copy


@pytest.fixture
def start(node: Node, collection: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts the node with a given number, always at the same port."""
    started: list[Node] = []
    ports = {number: free_port() for number in (1, 2)}
    for number in ports:
        create(tmp_path / f"notes-{number}", 128, embedder="hashing-128")

    def make(number: int) -> Node:
        config = tmp_path / f"node-{number}.toml"
        text = GATEWAY.format(url=node.info.url, collection=collection) + NOTES.format(number=number)
        for was, now in (
            ('"gateway"', f'"fleet-{number}"'),
            ('"run"', f'"run-{number}"'),
            ("port = 0", f"port = {ports[number]}"),
            ("drain_s = 5", "drain_s = 20"),
            ("drain_notice_s = 0", ""),  # the notice that nodes give as they are shipped
        ):
            text = text.replace(was, now)
        config.write_text(text)
        started.append(Node(config))
        return started[-1]

    yield make
    for one in started:
        one.process.kill()  # a stop would give the notice of a drain
        one.process.wait()


def is_free(url: str) -> bool:
    """Return whether no process listens on the port."""
    with socket.socket() as made:
        return made.connect_ex((urlsplit(url).hostname, urlsplit(url).port)) != 0


def _drained(node: Node) -> None:
    with httpx.Client(base_url=node.info.url, timeout=60, trust_env=False) as operator:
        assert operator.post("/drain").json()["draining"] is True
        node.wait(lambda: operator.get("/drain").json()["in_flight"] == 0, 60, "requests to end")


def _version(node: Node) -> str:
    line = next(line for line in node.metrics_text().splitlines() if line.startswith("trinity_node_info{"))
    return line.partition('version="')[2].partition('"')[0]


def _write(node: Node, text: str) -> None:
    body = {"documents": [{"id": "written", "text": text}]}
    with httpx.Client(base_url=node.info.url, trust_env=False, timeout=60) as http:
        assert http.put("/v1/collections/notes/documents", json=body).status_code == 200


@pytest.mark.timeout(600)
def test_replacing_nodes_by_another_version_loses_no_request_and_kills_are_accounted_for(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """All balancers that are installed are in front of the same two nodes. `--fleet-rounds` repeats the test; `-s`
    shows the outcomes."""
    program("haproxy")
    names = [name for name in BALANCERS if shutil.which(name)]
    with ThreadPoolExecutor() as both:
        first, second = both.map(start, (1, 2))
    before = _version(first)
    for node in (first, second):
        _write(node, "by the one before")
    other = other_version(tmp_path / "other")
    monkeypatch.chdir(other)  # where a process that starts there finds the product
    monkeypatch.setenv("PYTHONPATH", str(other))
    urls = [first.info.url, second.info.url]
    with ExitStack() as clients:
        fronts = [clients.enter_context(balancing(name, urls, tmp_path)) for name in names]
        loads = [clients.enter_context(load(url, clients=2)) for url in fronts]

        def more_of_each(count: int) -> None:
            for outcomes in loads:
                more(outcomes, count)

        def takes_part_in_all(node: Node) -> None:
            for outcomes in loads:
                takes_part(node, outcomes)

        more_of_each(20)
        for again in range(pytestconfig.getoption("--fleet-rounds")):
            if again:  # it was killed
                eventually(lambda: is_free(urls[1]), 60, "its frontend to end too")
                second = start(2)
                takes_part_in_all(second)
            lost = [len(outcomes.lost) for outcomes in loads]
            second.stop()  # as `trinity stop` does: it drains
            second = start(2)
            takes_part_in_all(second)
            _drained(first)
            first.stop()
            first = start(1)
            takes_part_in_all(first)
            more_of_each(20)
            for name, outcomes, before_it in zip(names, loads, lost, strict=True):
                assert outcomes.lost[before_it:] == [], name
            for node in (first, second):
                assert _version(node) == "99.0" != before
                query = {"query": "by the one before", "collection": "notes", "k": 1}
                assert node.post("/v1/retrieval", query)[1]["passages"][0]["id"] == "written"
                _write(node, "by the one after")
            print("none lost since the last kill; now another one")
            os.kill(second.process.pid, signal.SIGKILL)
            second.process.wait(timeout=60)
            more_of_each(40)
    for name, outcomes in zip(names, loads, strict=True):
        _accounted_for(outcomes, name)


def _accounted_for(outcomes: Outcomes, name: str) -> None:
    ends = Counter(("broke off" if one.begun else "told an error") if one.error else "whole" for one in outcomes.ended)
    print(f"{name}: {outcomes.sent} sent: {dict(ends)}")
    assert len(outcomes.ended) == outcomes.sent
    assert all(one.error for one in outcomes.lost)
    if name != "vllm-router":  # it gives up on an answer that has not begun: the client is told, and asks again
        assert [one for one in outcomes.lost if not one.begun] == []
