"""HTTP worker: a process that accepts connections on the node's port beside the frontend.

It answers searches and embeddings itself, as a client of the pools with the collections open for reading, and passes
everything else to the frontend, which owns what has state.
"""

import asyncio
import time

from runtime.errors import TrinityError, Unavailable
from runtime.node.worker import Worker
from runtime.serving.frontend.engine import Engine
from runtime.serving.frontend.observability import RequestMetrics
from runtime.serving.frontend.requests import Request
from runtime.serving.http import process
from runtime.serving.http.service import Collections


class NoEngine(Engine):
    """The engine of a process that generates nothing: it has traces."""

    def missing(self) -> list[str]:
        return []

    @property
    def restarts(self) -> int:
        return 0

    async def run(self) -> None:
        """Nothing runs, until cancelled."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """Nothing is open."""

    def _accept(self, request: Request, sent: dict[str, object]) -> None:
        raise Unavailable("this process generates nothing")

    def _fail(self, request: Request, error: TrinityError) -> None:
        """None was accepted."""


async def _no_engine(worker: Worker, metrics: RequestMetrics, search: Collections) -> Engine:
    return NoEngine(epoch=worker.epoch, clock=time.monotonic_ns, on_end=None, on_refused=None)


def run(worker: Worker) -> None:
    """Serve until stopped, then finish the requests in flight."""
    process.run(worker, _no_engine)
