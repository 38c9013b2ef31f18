"""The control socket answers status, metrics, changes and stop; invalid messages neither stop nor delay it."""

import contextlib
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from ipc.endpoints import connect, new_token, private_endpoint
from runtime.errors import CollectionError, DeadlineExceeded, InvalidRequest, Unavailable
from runtime.node.run_dir import NodeInfo
from runtime.node.supervisor.admin import (
    AdminServer,
    NodeStatus,
    ScaleReply,
    WorkerStatus,
    admin_request,
    reload_collections,
    scale_workers,
    stop_node,
)
from runtime.node.supervisor.reload import ReloadStatus


def info(endpoint: str, pid: int = 0) -> NodeInfo:
    return NodeInfo("n", pid or os.getpid(), "http://x", endpoint, (), ())


def worker(phase: str) -> WorkerStatus:
    return WorkerStatus("pool-0", phase, 7, 1, 0, 0.5, 1 << 20, "cpu", (0, 1))


class Node:
    """A control server and a thread that serves it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.stops = 0
        self.status = NodeStatus(info(endpoint), False, (worker("ready"),))
        self.reloads = [ReloadStatus(1, False)]
        self._done = threading.Event()
        self._server = AdminServer(endpoint)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.closing(self._server) as server:
            while not self._done.is_set():
                select.select([server], [], [], 0.01)
                server.serve(
                    {
                        "status": lambda _: msgspec.json.encode(self.status),
                        "metrics": lambda _: "metrics …\n".encode(),
                        "stop": self._stop,
                        "reload": self._reload,
                        "reloaded": self._reloaded,
                        "add": lambda what: msgspec.json.encode(ScaleReply((f"{what}-add",))),
                        "drain": lambda what: msgspec.json.encode(ScaleReply((f"{what}-drain",))),
                    }
                )

    def _reload(self, collection: str) -> bytes:
        unknown = ReloadStatus(0, True, error="no such collection")
        return msgspec.json.encode(unknown if collection == "none" else self.reloads[0])

    def _reloaded(self, _: str) -> bytes:
        self.reloads = self.reloads[1:] or self.reloads
        return msgspec.json.encode(self.reloads[0])

    def _stop(self, _: str) -> bytes:
        self.stop()
        return b"{}"

    def stop(self) -> None:
        self.stops += 1

    def close(self) -> None:
        self._done.set()
        self._thread.join(timeout=60)


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node(private_endpoint(new_token(), "control"))
    yield made
    made.close()


def test_a_change_returns_when_it_is_done(node: Node) -> None:
    moments = iter((0.0, 1.0, 6.0))
    with pytest.raises(Unavailable, match="decode-add cannot run"):
        scale_workers(info(node.endpoint), "add", "decode", timeout_s=60)
    assert scale_workers(info(node.endpoint), "drain", "decode-1", timeout_s=60) == ("decode-1-drain",)
    worker = msgspec.structs.replace(node.status.workers[0], name="decode-add", phase="starting")
    node.status = msgspec.structs.replace(node.status, workers=(worker,))
    with pytest.raises(DeadlineExceeded, match="add decode: not done within 5 s; it continues"):
        scale_workers(info(node.endpoint), "add", "decode", timeout_s=5, clock=lambda: next(moments))


GARBAGE = [[b""], [b"STATUS"], [b"status", b"more"], [b"\xff" * 64], [b"status\0"], [b"x" * 65], [b""] * 50]


def test_invalid_requests_are_dropped_and_the_next_one_is_answered(node: Node) -> None:
    for frames in GARBAGE:
        with connect(zmq.DEALER, node.endpoint, max_message_bytes=1 << 20) as socket:
            socket.send_multipart(frames)
            socket.setsockopt(zmq.LINGER, 1000)
    with connect(zmq.DEALER, node.endpoint, max_message_bytes=1 << 20) as socket:
        for frames in GARBAGE[:5]:
            socket.send_multipart(frames)
        socket.send(b"metrics")
        assert socket.poll(60_000)
        assert socket.recv_multipart() == [b"metrics \xe2\x80\xa6\n"]
        assert not socket.poll(0)
    assert node.stops == 0


def test_a_node_that_does_not_answer_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        admin_request(private_endpoint(new_token(), "control"), "status", timeout_s=0.01)


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    made = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield made
    made.kill()
    made.communicate(timeout=60)


def test_stop_sends_one_request_and_returns_when_the_process_is_gone(
    node: Node, process: "subprocess.Popen[bytes]"
) -> None:
    node.stop = process.kill  # type: ignore[method-assign]
    stop_node(info(node.endpoint, process.pid), timeout_s=30)
    assert process.wait(timeout=60) < 0


def test_a_node_that_does_not_stop_in_time_is_an_error(node: Node, process: "subprocess.Popen[bytes]") -> None:
    with pytest.raises(DeadlineExceeded, match=rf"pid {process.pid}\) still runs after 0 s"):
        stop_node(info(node.endpoint, process.pid), timeout_s=0.01)
    assert node.stops == 1


def test_a_reload_returns_when_every_pool_worker_serves_the_new_build(node: Node) -> None:
    node.reloads = [
        ReloadStatus(1, False),
        ReloadStatus(1, False, ("pool-0",)),
        ReloadStatus(1, True, ("pool-0", "pool-1")),
    ]
    assert reload_collections(info(node.endpoint), "docs", timeout_s=60) == ("pool-0", "pool-1")


def test_a_reload_that_a_worker_refuses_is_an_error_with_its_reason(node: Node) -> None:
    refused = "pool-0: collection docs: not reloaded: codes.npy is damaged"
    node.reloads = [ReloadStatus(1, False), ReloadStatus(1, True, (), refused)]
    with pytest.raises(CollectionError, match=r"pool-0: .*codes\.npy is damaged"):
        reload_collections(info(node.endpoint), "docs", timeout_s=60)


def test_a_reload_that_is_unknown_too_slow_or_superseded_ends(node: Node) -> None:
    with pytest.raises(InvalidRequest, match="no such collection"):
        reload_collections(info(node.endpoint), "none", timeout_s=60)
    times = iter((0.0, 1.0, 61.0))
    with pytest.raises(DeadlineExceeded, match="not reloaded within 60 s; workers that have reloaded: none"):
        reload_collections(info(node.endpoint), "", timeout_s=60, clock=lambda: next(times))
    node.reloads = [ReloadStatus(1, False), ReloadStatus(2, False)]
    with pytest.raises(InvalidRequest, match="another reload has replaced this one"):
        reload_collections(info(node.endpoint), "", timeout_s=60)
