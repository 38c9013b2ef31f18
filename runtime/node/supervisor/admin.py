"""Admin protocol of the supervisor over its control socket: status, metrics, stop, drain, restart, reload, scaling.

Clients are the command line and the frontend. A request is one line of text, a reply is JSON or Prometheus text.
"""

import os
import select
import time
from collections.abc import Callable, Mapping

import msgspec
import zmq

from ipc.endpoints import bind, connect
from runtime.errors import CollectionError, DeadlineExceeded, InvalidRequest, Unavailable
from runtime.node.run_dir import NodeInfo
from runtime.node.supervisor.reload import ReloadStatus
from runtime.node.supervisor.scaling import ScaleAction

_MAX_REQUEST_BYTES = 128
_POLL_S = 0.1
_MAX_REPLY_BYTES = 8 << 20  # ten times the metrics of 25 workers


class WorkerStatus(msgspec.Struct, frozen=True):
    """State of one worker; `pid` is 0 if it has no process.

    `failed_starts`: since it was last ready; 3 or more mean that it cannot run. `note`: one line for the operator, ""
    if there is nothing to report.
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
    cpu_s: float = 0.0
    fds: int = 0


class NodeStatus(msgspec.Struct, frozen=True):
    """A node, its workers and its standby workers."""

    info: NodeInfo
    stopping: bool
    workers: tuple[WorkerStatus, ...]
    spares: tuple[WorkerStatus, ...] = ()
    draining: bool = False  # requested by an operator

    @property
    def ready(self) -> bool:
        return all(worker.phase == "ready" for worker in self.workers)


class AdminServer:
    """Server of the admin protocol, polled by the supervisor's loop."""

    def __init__(self, endpoint: str) -> None:
        self._socket = bind(zmq.ROUTER, endpoint, max_message_bytes=_MAX_REQUEST_BYTES)

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def pending(self) -> bool:
        """Whether a request is waiting. ZeroMQ's fd is edge-triggered: check this before sleeping on it."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def serve(self, handlers: Mapping[str, Callable[[str], bytes]]) -> None:
        """Answer every waiting request by its handler, or by that of its verb, which receives the rest of the line;
        unknown requests are dropped."""
        while self.pending():
            frames = self._socket.recv_multipart()
            if len(frames) != 2:
                continue
            request = frames[1].decode(errors="replace")
            verb, _, rest = request.partition(" ")
            if (handler := handlers.get(request, handlers.get(verb))) is not None:
                self._socket.send_multipart([frames[0], handler(rest)], flags=zmq.DONTWAIT)


class ScaleReply(msgspec.Struct, frozen=True):
    """The workers that are being scaled, or an error. The names in JSON are part of the admin protocol."""

    workers: tuple[str, ...]
    error: str = msgspec.field(name="trouble", default="")


def admin_request(endpoint: str, request: str, timeout_s: float = 10.0) -> bytes:
    """Send one request to the supervisor at a control endpoint and return its reply.

    Requests: "status", "metrics", "stop", "draining on", "draining off", "restart", "restart WORKER", "reload",
    "reload COLLECTION", "reloaded" (status of the reload), "add ROLE|GPU", "drain ROLE|WORKER|GPU", "flip ROLE|WORKER".
    Raises `Unavailable` on a timeout.
    """
    with connect(zmq.DEALER, endpoint, max_message_bytes=_MAX_REPLY_BYTES) as socket:
        socket.send(request.encode())
        if not socket.poll(int(timeout_s * 1000)):
            raise Unavailable(f"the node's supervisor does not answer after {timeout_s:.0f} s")
        return bytes(socket.recv())


def node_status(info: NodeInfo) -> NodeStatus:
    return msgspec.json.decode(admin_request(info.control, "status"), type=NodeStatus)


def stop_node(info: NodeInfo, timeout_s: float) -> None:
    """Drain and stop a node, and wait until its supervisor has ended. Raises `DeadlineExceeded` after `timeout_s`."""
    try:
        pidfd = os.pidfd_open(info.pid)
    except ProcessLookupError:
        return
    try:
        try:
            admin_request(info.control, "stop")
        except Unavailable:
            if not select.select([pidfd], [], [], 0)[0]:
                raise
            return  # the supervisor ended before it could answer
        if not select.select([pidfd], [], [], timeout_s)[0]:
            raise DeadlineExceeded(f"node {info.name!r} (pid {info.pid}) still runs after {timeout_s:.0f} s")
    finally:
        os.close(pidfd)


def restart_node(info: NodeInfo, worker: str, timeout_s: float) -> None:
    """Restart one worker, or all in turn with "", and wait until they are ready again.

    Raises `InvalidRequest` for an unknown worker, `DeadlineExceeded` after `timeout_s` seconds.
    """
    before = {status.name: status.epoch for status in node_status(info).workers}
    if error := admin_request(info.control, f"restart {worker}".strip()).decode():
        raise InvalidRequest(error)
    deadline = time.monotonic() + timeout_s
    while True:
        chosen = [status for status in node_status(info).workers if not worker or status.name == worker]
        if all(status.phase == "ready" and status.epoch > before.get(status.name, 0) for status in chosen):
            return
        if time.monotonic() > deadline:
            pending = ", ".join(status.name for status in chosen if status.epoch == before.get(status.name, 0))
            raise DeadlineExceeded(f"not restarted within {timeout_s:.0f} s: {pending or 'the last one is not ready'}")
        select.select([], [], [], _POLL_S)


def reload_collections(
    info: NodeInfo, collection: str, timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> tuple[str, ...]:
    """Reload one collection, or all with "", from its directory in every worker; returns the workers that have.

    Raises `InvalidRequest` for an unknown collection, `CollectionError` if a worker refuses the new files (it and the
    workers after it keep the old ones), `DeadlineExceeded` after `timeout_s` seconds.
    """
    status = msgspec.json.decode(admin_request(info.control, f"reload {collection}".strip()), type=ReloadStatus)
    if status.error:
        raise InvalidRequest(status.error)
    deadline, number = clock() + timeout_s, status.number
    while not status.finished:
        if clock() > deadline:
            reloaded = ", ".join(status.workers) or "none"
            raise DeadlineExceeded(f"not reloaded within {timeout_s:.0f} s; workers that have reloaded: {reloaded}")
        select.select([], [], [], _POLL_S)
        status = msgspec.json.decode(admin_request(info.control, "reloaded"), type=ReloadStatus)
        if status.number != number:
            raise InvalidRequest("another reload has replaced this one")
    if status.error:
        raise CollectionError(status.error)
    return status.workers


def scale_workers(
    info: NodeInfo, action: ScaleAction, target: str, timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> tuple[str, ...]:
    """Add, drain or flip workers (see `Scaler.request`), wait until that is done, and return their names.

    Raises `InvalidRequest` if it is refused, `Unavailable` if a new worker cannot run, `DeadlineExceeded` after
    `timeout_s` seconds.
    """
    before = {status.name for status in node_status(info).workers}
    reply = msgspec.json.decode(admin_request(info.control, f"{action} {target}"), type=ScaleReply)
    if reply.error:
        raise InvalidRequest(reply.error)
    deadline = clock() + timeout_s
    while True:
        phases = {status.name: status.phase for status in node_status(info).workers}
        gone = [name for name in reply.workers if name not in phases]
        if action == "drain":
            done = len(gone) == len(reply.workers)
        elif gone:
            raise Unavailable(f"{', '.join(gone)} cannot run; the node's log has the reason")
        else:
            done = all(phases[name] == "ready" for name in reply.workers)
            done = done and (action == "add" or bool(before - phases.keys()))
        if done:
            return reply.workers
        if clock() > deadline:
            raise DeadlineExceeded(f"{action} {target}: not done within {timeout_s:.0f} s; it continues")
        select.select([], [], [], _POLL_S)
