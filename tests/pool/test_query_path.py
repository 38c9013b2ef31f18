"""The way of one query from `SearchClient.search` into its pool: how short it is, and over which doorbell."""

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import numpy as np
import pytest

from gpu import GraphIndex
from ipc import SearchSpec
from ipc.ring.doorbell import EventfdBell, ZmqSleeper
from ipc.session.messages import DOORBELLS
from runtime.errors import InvalidRequest
from runtime.node.config import Doorbell
from runtime.node.metrics.columns import PoolMetrics
from runtime.node.run_dir import NodeInfo, RunDir
from runtime.pool.loop import IDLE
from runtime.retrieval.search.client import SearchClient
from runtime.testing.pool import plan_of
from tests.pool.conftest import MakeClient, MakePool
from tests.pool.pools import Vectors, attached, exact

_MOST_CALLS = 6
_A_MINUTE_NS = 60 * 10**9


class _Sent(Exception):
    """The first byte would be in the ring now."""


def test_a_search_is_at_most_six_calls_from_the_ring(
    collection: Path, make_pool: MakePool, make_client: MakeClient, queries: Vectors
) -> None:
    plan = plan_of(collection)
    make_pool(plan, "pool-0").start()
    client = attached(make_client(plan))
    client.search(queries[0], 5, collection="docs")
    (session,) = client.dispatcher.clients()
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


def test_a_query_that_wakes_a_pool_is_answered_before_the_sleep_returns_to_python(
    make_pool: MakePool, index: GraphIndex, queries: Vectors
) -> None:
    pool = make_pool()
    loop, server = pool.pool.loop, pool.server

    def sleep() -> None:
        while not pool.metric(PoolMetrics.LATENCY):  # it may be woken for something else
            server.housekeep(time.monotonic_ns())
            assert loop.sleep(server.fileno(), _A_MINUTE_NS, _A_MINUTE_NS, 0) == IDLE

    with pool.attach() as client:
        thread = threading.Thread(target=sleep)
        thread.start()
        client.submit(queries[0], SearchSpec("docs", 5, top_m=400))
        assert client.wait(60_000.0)
        (result,) = client.poll()
        thread.join(timeout=60)
    assert result.ids.tolist() == exact(index, queries[:1], 5)[0]
    assert pool.metric(PoolMetrics.LATENCY) == 1


@pytest.mark.parametrize(("doorbell", "kind"), [("eventfd", EventfdBell), ("zeromq", ZmqSleeper)])
def test_the_pool_and_its_clients_wake_each_other_as_configured(
    doorbell: str, kind: type, collection: Path, make_pool: MakePool, make_client: MakeClient,
    index: GraphIndex, queries: Vectors, tmp_path: Path,
) -> None:  # fmt: skip
    plan = plan_of(collection, doorbell=doorbell)
    pool = make_pool(plan, "pool-0").start()
    held = RunDir.acquire(tmp_path / "run")
    held.write(NodeInfo("n", os.getpid(), "", "", (pool.endpoint,), ("docs",), doorbell=plan.config.pool.doorbell))
    wanted = exact(index, queries, 5)
    with SearchClient.connect(tmp_path / "run", timeout_s=60) as connected:
        for client in (attached(make_client(plan)), connected):
            (session,) = client.dispatcher.clients()
            assert type(session.attachment.sleeper) is kind
            session.spin.learn(_A_MINUTE_NS)
            session.spin.learn(_A_MINUTE_NS)  # from now on it sleeps
            found = [client.search(query, 5, collection="docs", top_m=400).ids.tolist() for query in queries]
            assert found == wanted
    held.release()


def test_the_configuration_names_every_doorbell_that_there_is() -> None:
    assert get_args(Doorbell) == DOORBELLS


def test_what_was_asked_once_with_a_number_is_not_asked_with_what_only_equals_it(
    collection: Path, make_pool: MakePool, make_client: MakeClient, queries: Vectors
) -> None:
    plan = plan_of(collection)
    make_pool(plan, "pool-0").start()
    client = attached(make_client(plan))
    asked: Any
    for asked in (1, np.int64(1)):
        assert len(client.search(queries[0], asked, collection="docs").ids) == 1
    for asked in (True, 1.0):
        with pytest.raises(InvalidRequest, match="k must be an integer"):
            client.search(queries[0], asked, collection="docs")
