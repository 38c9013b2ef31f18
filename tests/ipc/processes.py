"""Child processes of tests: forked from a clean fork server with `ipc` imported, joined with a timeout, or killed."""

import os
import select
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import pytest

from ipc import RingClient, new_token, private_endpoint
from tests.ipc.ring_server import RingServer
from tests.process_context import FORKSERVER

JOIN_S = 60.0


@contextmanager
def child(target: Callable[..., None], *args: Any) -> Iterator[BaseProcess]:
    """Run `target(*args)` in a process; kill it at the end if it has not exited."""
    process = FORKSERVER.Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield process
    finally:
        if process.is_alive():
            process.kill()
        process.join(JOIN_S)
        assert not process.is_alive()
        process.close()


def succeeded(process: BaseProcess) -> bool:
    """Wait for a child to exit by itself. Return whether it succeeded."""
    process.join(JOIN_S)
    return process.exitcode == 0


as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def become_another_user() -> None:
    os.setgid(65534)
    os.setuid(65534)


def endpoint() -> str:
    return private_endpoint(new_token(), "pool-0")


def attach(server: RingServer, name: str = "test", **options: Any) -> RingClient:
    """Attach a client to a server of the same thread."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(RingClient, server.endpoint, name, **({"timeout_ms": 1e3 * JOIN_S} | options))
        while not future.done():
            server.wait(1)
        return future.result()


@contextmanager
def served(server: RingServer, step: Callable[[RingServer], None]) -> Iterator[None]:
    """Run the server in its own thread, which alone may use it meanwhile: `step` is called after every wake-up."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            server.wait(5)
            step(server)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(loop)
        try:
            yield
        finally:
            stop.set()
            future.result(JOIN_S)


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


def readable(file: _HasFileno, timeout_ms: float) -> bool:
    """Sleep until `file` is readable. Return False on timeout."""
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(timeout_ms))
