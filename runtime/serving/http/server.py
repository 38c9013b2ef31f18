"""Servers of a process that serves HTTP, its limits, and how it runs until one of its loops fails."""

import asyncio
import contextlib
import gc
import logging
import resource
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import uvicorn
import uvloop
from msgspec.structs import replace

from runtime.node.config import HttpSection
from runtime.retrieval.fair_threads import Threads
from runtime.serving.http.connections import HttpConfig

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.1
_SWITCH_S = 0.0005  # how long a thread keeps the interpreter's lock when the event loop wants it
_COLLECTED = 10_000  # objects before garbage is collected: with Python's 700 that took a fifteenth of a search
_ACCEPTED = 16  # connections in a turn of the loop, which libuv accepts one of for each listening descriptor
_RESERVED_DESCRIPTORS = 256  # besides connections: sockets to workers, shared memory, files
_PRIVATE_REQUESTS = 1_000_000  # no limit: each is of a connection that another process has counted


def run_process(serving: Coroutine[Any, Any, None]) -> None:
    """Run the event loop of a process that serves HTTP."""
    sys.setswitchinterval(_SWITCH_S)
    gc.set_threshold(_COLLECTED)
    uvloop.run(_on_own_threads(serving))


async def _on_own_threads(serving: Coroutine[Any, Any, None]) -> None:
    asyncio.get_running_loop().set_default_executor(Threads(None, "blocking"))
    await serving


async def serve_beside(serving: Coroutine[Any, Any, None], loops: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Serve until `serving` ends. No loop ends by itself: if one does, it has failed, and its error is raised."""
    first, *others = (asyncio.create_task(one) for one in (serving, *loops))
    try:
        done, _ = await asyncio.wait([first, *others], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class Server(uvicorn.Server):
    """uvicorn on one listening socket, without its signal handlers: the worker has its own, and its loop ends the
    server.

    `on_closed` is called when no new connections are accepted any more.
    """

    def __init__(
        self, config: HttpConfig, listener: socket.socket, on_closed: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(config)
        self._listener, self._on_closed = listener, on_closed

    async def accept(self) -> None:
        """Accept and answer connections until `should_exit` is set and they have ended."""
        await self.serve(sockets=[self._listener, *(self._listener.dup() for _ in range(_ACCEPTED - 1))])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_closed()
        await super().shutdown(sockets)


def private_limits(limits: HttpSection) -> HttpSection:
    """Return the limits of connections from other processes of the node, which these have counted already."""
    return replace(limits, max_in_flight=_PRIVATE_REQUESTS)


def connections_with_files(http: HttpSection) -> int:
    """Raise the limit of open files to what this process's connections need, up to the hard limit. Return how many
    connections there are files for: without a file for a socket, ZeroMQ ends the process.

    Each of the `http.workers` may pass on as many connections as it accepts, or receive those of the others.
    """
    wanted = http.max_connections * http.workers + _RESERVED_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return http.max_connections
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    possible = (soft - min(_RESERVED_DESCRIPTORS, soft * 3 // 4)) // http.workers
    if possible < http.max_connections:
        log.warning(
            "%d connections may be open instead of %d (eight times http.max_in_flight, at least 1,024): the hard limit "
            "of open files is %d (ulimit -Hn, LimitNOFILE=)",
            possible, http.max_connections, soft,
        )  # fmt: skip
    return min(possible, http.max_connections)
