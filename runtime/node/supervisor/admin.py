"""The supervisor's control socket: status, metrics, stop, restart, changes of workers.

Asked by the command line and the frontend.
"""

import os
import select
import time
from collections.abc import Callable
from typing import Self, cast

import msgspec
import zmq

from ipc.endpoints import bind, connect
from runtime.errors import CollectionError, DeadlineExceeded, InvalidRequest, TrinityError, Unavailable
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import FrontendMetrics
from runtime.node.run_dir import NodeInfo
from runtime.node.supervisor.reload import Reload
from runtime.node.supervisor.scaling import Verb

_WRITTEN = (
    FrontendMetrics.LIVE_DOCUMENTS, FrontendMetrics.LIVE_SEGMENTS, FrontendMetrics.LIVE_GROWING,
    FrontendMetrics.LIVE_TOMBSTONES, FrontendMetrics.LIVE_LOG_BYTES, FrontendMetrics.LIVE_BUILDING,
)  # fmt: skip
_MAX_QUESTION_BYTES = 128
_LOOK_S = 0.1
_MAX_ANSWER_BYTES = 8 << 20  # the metrics of 25 workers are a tenth of it


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker as the supervisor sees it; `pid` 0 means that no process runs.

    `failed_starts`: of its starts since it was last ready; 3 and more if it cannot run. `note`: what people should know
    of it, in a line; "" if nothing.
    """

    name: str
    phase: str
    pid: int
    epoch: int
    restarts: int
    heartbeat_age_s: float
    resident_bytes: int
    device: str
    cores: tuple[int, ...]
    note: str = ""
    failed_starts: int = 0


class Written(msgspec.Struct, frozen=True):
    """The live collections that the node writes to, all together; see the metrics `trinity_live_…`."""

    documents: int
    segments: int
    growing: int
    tombstones: int
    log_bytes: int
    building: int
    built: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of the build that is least far: rows read, graph, written

    @classmethod
    def of(cls, table: WorkerTable) -> "Written | None":
        """As the frontend tells it; None if nothing was written since it began."""
        rows, graph, written = map(table.value, FrontendMetrics.LIVE_BUILT.values())
        documents, segments, growing, tombstones, log_bytes, building = (int(table.value(gauge)) for gauge in _WRITTEN)
        built = rows, graph, written
        return cls(documents, segments, growing, tombstones, log_bytes, building, built) if log_bytes else None


class NodeStatus(msgspec.Struct, frozen=True):
    """A node, its workers and its standby workers."""

    info: NodeInfo
    stopping: bool
    workers: tuple[WorkerStatus, ...]
    spares: tuple[WorkerStatus, ...] = ()
    draining: bool = False  # an operator has it drain
    written: Written | None = None  # None as long as nothing was written

    @property
    def ready(self) -> bool:
        return all(worker.phase == "ready" for worker in self.workers)


class ControlServer:
    """The answering side, in the supervisor's loop."""

    def __init__(self, endpoint: str) -> None:
        self._socket = bind(zmq.ROUTER, endpoint, max_message_bytes=_MAX_QUESTION_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def pending(self) -> bool:
        """Whether a question waits: ZeroMQ's fd is edge-triggered, so this is asked before sleeping on it."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def serve(
        self,
        status: Callable[[], NodeStatus],
        metrics: Callable[[], str],
        stop: Callable[[], None],
        drain: Callable[[bool], None],
        restart: Callable[[str], str],
        change: Callable[[Verb, str], tuple[str, ...]],
        reload: Callable[[str], Reload],
        reloaded: Callable[[], Reload],
    ) -> None:
        """Answer every question that waits; what is not a question is dropped.

        `drain` is told whether the node is to drain; `restart` is given a worker's name, or "" for all, and returns
        what is wrong with that; `change` (see `Changes.ask`) raises it; `reload` is given a collection's name, or ""
        for all, and says so as `reloaded` does.
        """
        while self.pending():
            frames = self._socket.recv_multipart()
            if len(frames) != 2:
                continue
            identity, question = frames
            what, _, name = question.partition(b" ")
            match what:
                case b"status":
                    answer = msgspec.json.encode(status())
                case b"metrics":
                    answer = metrics().encode()
                case b"stop":
                    stop()
                    answer = b"{}"
                case b"draining" if name in (b"on", b"off"):
                    drain(name == b"on")
                    answer = b"{}"
                case b"restart":
                    answer = restart(name.decode(errors="replace")).encode()
                case b"reload":
                    answer = msgspec.json.encode(reload(name.decode(errors="replace")))
                case b"reloaded":
                    answer = msgspec.json.encode(reloaded())
                case b"add" | b"drain" | b"flip":
                    answer = msgspec.json.encode(_changed(change, what.decode(), name.decode(errors="replace")))
                case _:
                    continue
            self._socket.send_multipart([identity, answer], flags=zmq.DONTWAIT)


class Changed(msgspec.Struct, frozen=True):
    """The workers that a change is about, or what is wrong with it."""

    workers: tuple[str, ...]
    trouble: str = ""


def _changed(change: Callable[[Verb, str], tuple[str, ...]], verb: str, what: str) -> Changed:
    try:
        return Changed(change(cast("Verb", verb), what))
    except TrinityError as error:
        return Changed((), error.message)


def ask(endpoint: str, question: str, timeout_s: float = 5.0) -> bytes:
    """Ask the supervisor at a control endpoint: "status", "metrics", "stop", "draining on", "draining off", "restart",
    "restart WORKER", "reload", "reload COLLECTION", "reloaded", or a change: "add ROLE", "drain ROLE", "flip ROLE", the
    last two also of a worker, the first two also of a GPU.

    Raises `Unavailable` if it does not answer in time.
    """
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


def restart_node(info: NodeInfo, worker: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Restart one worker, or with "" all, one after the other; returns when they have come back.

    Raises `InvalidRequest` for a worker that does not exist, `DeadlineExceeded` after `timeout_s` seconds.
    """
    before = {found.name: found.epoch for found in node_status(info).workers}
    if trouble := ask(info.control, f"restart {worker}".strip()).decode():
        raise InvalidRequest(trouble)
    end = clock() + timeout_s
    while True:
        status = node_status(info)
        wanted = [found for found in status.workers if not worker or found.name == worker]
        if all(found.phase == "ready" and found.epoch > before.get(found.name, 0) for found in wanted):
            return
        if clock() > end:
            left = ", ".join(found.name for found in wanted if found.epoch == before.get(found.name, 0))
            raise DeadlineExceeded(f"not restarted within {timeout_s:.0f} s: {left or 'the last one is not ready'}")
        select.select([], [], [], _LOOK_S)


def reload_collections(
    info: NodeInfo, collection: str, timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> tuple[str, ...]:
    """Have a node serve what lies in a collection's directory now, or with "" in those of all; the workers that do.

    Returns when all pool workers do, one after the other. Raises `InvalidRequest` for a collection that does not exist,
    `CollectionError` if a worker refuses what lies there (it, and who was to follow, go on with what they had),
    `DeadlineExceeded` after `timeout_s` seconds.
    """
    found = msgspec.json.decode(ask(info.control, f"reload {collection}".strip()), type=Reload)
    if found.trouble:
        raise InvalidRequest(found.trouble)
    end, number = clock() + timeout_s, found.number
    while not found.over:
        if clock() > end:
            raise DeadlineExceeded(f"not reloaded within {timeout_s:.0f} s, but by {', '.join(found.done) or 'nobody'}")
        select.select([], [], [], _LOOK_S)
        found = msgspec.json.decode(ask(info.control, "reloaded"), type=Reload)
        if found.number != number:
            raise InvalidRequest("another reload has taken the place of this one")
    if found.trouble:
        raise CollectionError(found.trouble)
    return found.done


def change_worker(
    info: NodeInfo, verb: Verb, what: str, timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> tuple[str, ...]:
    """Add, drain or flip workers (see `Changes.ask`), and return their names when that is done.

    Raises `InvalidRequest` for what cannot be, `Unavailable` if a new worker cannot run, `DeadlineExceeded` after
    `timeout_s` seconds.
    """
    before = {found.name for found in node_status(info).workers}
    changed = msgspec.json.decode(ask(info.control, f"{verb} {what}"), type=Changed)
    if changed.trouble:
        raise InvalidRequest(changed.trouble)
    end = clock() + timeout_s
    while True:
        phases = {found.name: found.phase for found in node_status(info).workers}
        gone = [name for name in changed.workers if name not in phases]
        if verb == "drain":
            done = len(gone) == len(changed.workers)
        elif gone:
            raise Unavailable(f"{', '.join(gone)} cannot run; the node's log has the reason")
        else:
            done = all(phases[name] == "ready" for name in changed.workers)
            done = done and (verb == "add" or bool(before - phases.keys()))
        if done:
            return changed.workers
        if clock() > end:
            raise DeadlineExceeded(f"{verb} {what}: not done within {timeout_s:.0f} s; it goes on")
        select.select([], [], [], _LOOK_S)
