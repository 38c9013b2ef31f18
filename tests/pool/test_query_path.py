"""Tests of the path of a query from `SearchClient.search` into its pool: its length and its doorbell."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import zmq
from msgspec import structs

from gpu import GraphIndex
from ipc import RingClient, SearchSpec
from ipc.endpoints import connect
from runtime.errors import InvalidRequest
from runtime.node.run_dir import NodeInfo, RunDir
from runtime.pool.process import Timing
from runtime.retrieval.search.client import SearchClient
from runtime.testing.pool import InProcessPool, plan_of
from tests.pool.client_helpers import Vectors, attached, exact
from tests.pool.conftest import MakeClient, MakePool, MakeServed

_MOST_CALLS = 6
_A_MINUTE_NS, _AN_HOUR_NS = 60 * 10**9, 3600 * 10**9


class _Sent(Exception):
    """Raised where the first byte would be written to the ring."""


def test_a_search_reaches_the_ring_in_at_most_six_calls(collection: Path, serve: MakeServed, queries: Vectors) -> None:
    client = serve(collection).client
    client.search(queries[0], 5, collection="docs")
    (session,) = client.dispatcher.pools.clients()
    calls: list[str] = []

    def send_row(*_: Any) -> int:
        sys.setprofile(None)
        raise _Sent

    session.attachment.requests.send_row = send_row

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        begun = calls or frame.f_code is SearchClient.search.__code__
        if event == "call" and begun and frame.f_code is not send_row.__code__:
            calls.append(frame.f_code.co_qualname)

    try:
        sys.setprofile(profile)
        with pytest.raises(_Sent):
            client.search(queries[0], 5, collection="docs")
    finally:
        sys.setprofile(None)
    assert 0 < len(calls[1:]) <= _MOST_CALLS, calls


@contextlib.contextmanager
def left_to_itself(pool: InProcessPool) -> Iterator[None]:
    """Serve the pool in a thread that would enter Python by itself only once an hour."""
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            pool.step()

    thread = threading.Thread(target=serve)
    thread.start()
    with contextlib.closing(connect(zmq.DEALER, pool.endpoint, max_message_bytes=1 << 20)) as stranger:
        yield
        over.set()
        stranger.send(b"nonsense")  # answered in Python
        thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_woken_pool_answers_queries_without_entering_python(
    collection: Path, make_pool: MakePool, index: GraphIndex, queries: Vectors
) -> None:
    plan = plan_of(collection)
    sleepy = structs.replace(plan, workers=tuple(structs.replace(one, spin=False) for one in plan.workers))
    pool = make_pool(sleepy, timing=Timing(control_ns=_AN_HOUR_NS))
    found = []
    with left_to_itself(pool), RingClient(pool.endpoint, "test", timeout_ms=60_000.0) as client:
        before = pool.pool.control_runs
        for number in range(1000):
            client.submit(queries[number % len(queries)], SearchSpec("docs", 5, top_m=400))
            assert client.wait(60_000.0)
            found += [result.ids.tolist() for result in client.poll()]
        turns, rung = pool.pool.control_runs - before, client.attachment.requests.rung
    assert rung > 200, "the pool slept before many of them"
    assert turns < 20, "at most for doorbells rung after it woke by itself"
    wanted = exact(index, queries, 5)
    assert found == [wanted[number % len(queries)] for number in range(1000)]


def test_the_pool_and_its_clients_wake_each_other(
    collection: Path, make_pool: MakePool, make_client: MakeClient,
    index: GraphIndex, queries: Vectors, tmp_path: Path,
) -> None:  # fmt: skip
    plan = plan_of(collection)
    pool = make_pool(plan, "pool-0").start()
    held = RunDir.acquire(tmp_path / "run")
    held.write(NodeInfo("n", os.getpid(), "", "", (pool.endpoint,), ("docs",)))
    wanted = exact(index, queries, 5)
    with SearchClient.connect(tmp_path / "run", timeout_s=60) as connected:
        for client in (attached(make_client(plan)), connected):
            (session,) = client.dispatcher.pools.clients()
            session.spin.learn(_A_MINUTE_NS)
            session.spin.learn(_A_MINUTE_NS)  # it sleeps from here on
            found = [client.search(query, 5, collection="docs", top_m=400).ids.tolist() for query in queries]
            assert found == wanted
    held.release()


def test_cached_specs_distinguish_equal_values_of_different_types(
    collection: Path, serve: MakeServed, queries: Vectors
) -> None:
    client = serve(collection).client
    k: Any
    for k in (1, np.int64(1)):
        assert len(client.search(queries[0], k, collection="docs").ids) == 1
    for k in (True, 1.0):
        with pytest.raises(InvalidRequest, match="k must be an integer"):
            client.search(queries[0], k, collection="docs")
