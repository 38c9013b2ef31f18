"""The supervisor's control socket: status, metrics, stop. Asked by the command line and the frontend."""

import os
import select
from collections.abc import Callable
from typing import Literal, Self

import msgspec
import zmq

from ipc.endpoints import bind, connect
from runtime.errors import DeadlineExceeded, Unavailable
from runtime.node.run_dir import NodeInfo

Question = Literal["status", "metrics", "stop"]
_MAX_ANSWER_BYTES = 8 << 20  # the metrics of 25 workers are a tenth of it


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker as the supervisor sees it; `pid` 0 means that no process runs."""

    name: str
    phase: str
    pid: int
    epoch: int
    restarts: int
    heartbeat_age_s: float
    resident_bytes: int
    device: str
    cores: tuple[int, ...]


class NodeStatus(msgspec.Struct, frozen=True):
    """A node and its workers."""

    info: NodeInfo
    stopping: bool
    workers: tuple[WorkerStatus, ...]

    @property
    def ready(self) -> bool:
        return all(worker.phase == "ready" for worker in self.workers)


class ControlServer:
    """The answering side, in the supervisor's loop."""

    def __init__(self, endpoint: str) -> None:
        self._socket = bind(zmq.ROUTER, endpoint, max_message_bytes=64)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def pending(self) -> bool:
        """Whether a question waits: ZeroMQ's fd is edge-triggered, so this is asked before sleeping on it."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def serve(self, status: Callable[[], NodeStatus], metrics: Callable[[], str], stop: Callable[[], None]) -> None:
        """Answer every question that waits; what is not a question is dropped."""
        while self.pending():
            frames = self._socket.recv_multipart()
            if len(frames) != 2:
                continue
            identity, question = frames
            match question:
                case b"status":
                    answer = msgspec.json.encode(status())
                case b"metrics":
                    answer = metrics().encode()
                case b"stop":
                    stop()
                    answer = b"{}"
                case _:
                    continue
            self._socket.send_multipart([identity, answer], flags=zmq.DONTWAIT)


def ask(endpoint: str, question: Question, timeout_s: float = 5.0) -> bytes:
    """Ask the supervisor at a control endpoint. Raises `Unavailable` if it does not answer in time."""
    with connect(zmq.DEALER, endpoint, max_message_bytes=_MAX_ANSWER_BYTES) as socket:
        socket.send(question.encode())
        if not socket.poll(int(timeout_s * 1000)):
            raise Unavailable(f"the node's supervisor does not answer after {timeout_s:.0f} s")
        return bytes(socket.recv())


def node_status(info: NodeInfo) -> NodeStatus:
    """The status of a running node."""
    return msgspec.json.decode(ask(info.control, "status"), type=NodeStatus)


def stop_node(info: NodeInfo, timeout_s: float) -> None:
    """Have a node drain and stop, and return when it is gone. Raises `DeadlineExceeded` after `timeout_s` seconds."""
    try:
        pidfd = os.pidfd_open(info.pid)
    except ProcessLookupError:
        return
    try:
        try:
            ask(info.control, "stop")
        except Unavailable:
            if not select.select([pidfd], [], [], 0)[0]:
                raise
            return  # it ended by itself before it could answer
        if not select.select([pidfd], [], [], timeout_s)[0]:
            raise DeadlineExceeded(f"node {info.name!r} (pid {info.pid}) still runs after {timeout_s:.0f} s")
    finally:
        os.close(pidfd)
