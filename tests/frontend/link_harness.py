"""A `WorkerLink` on a virtual clock, without HTTP, and the fake workers connected to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from runtime.errors import TrinityError
from runtime.serving.frontend.engine import RestartLimits
from runtime.serving.frontend.requests import Request, RequestOutcome
from runtime.serving.frontend.router import Router
from runtime.serving.frontend.worker_link import WorkerLink
from runtime.serving.messages import Generation, Role, Sampling
from tests.clock import Clock
from tests.frontend.fake_workers import FakeWorker, unique_endpoint

EPOCH = 77
LOST_AFTER_S = 10.0
RESTART_WAIT_S = 30.0


class LinkHarness:
    """A link on a virtual clock and the fake workers that a test connects to it."""

    def __init__(
        self, max_in_flight: int = 64, endpoint: str = "", link_class: type[WorkerLink] = WorkerLink, restarts: int = 0
    ) -> None:
        self.clock = Clock()
        self.ended: list[RequestOutcome] = []
        self.router = Router(max_in_flight=max_in_flight)
        self.link = link_class(
            endpoint or unique_endpoint(),
            self.router,
            epoch=EPOCH,
            clock=self.clock,
            lost_after_ns=int(LOST_AFTER_S * 1e9),
            on_end=self.ended.append,
            restarts=RestartLimits(restarts, int(RESTART_WAIT_S * 1e9)),
        )
        self.workers: list[FakeWorker] = []

    async def worker(self, role: Role, name: str, **options: Any) -> FakeWorker:
        worker = FakeWorker(self.link.endpoint, role, name, **options)
        self.workers.append(worker)
        assert (await worker.hello()).frontend_epoch == EPOCH
        return worker

    def submit(self, request_id: str = "r1", timeout_s: float = 60.0, **options: Any) -> Request:
        options = {"prompt": "hello", "sampling": Sampling(max_tokens=8), **options}
        now = self.clock()
        generation = Generation(received_ns=now, deadline_ns=now + int(timeout_s * 1e9), **options)
        return self.link.submit(request_id, generation)

    @property
    def codes(self) -> list[str]:
        return [ended.code for ended in self.ended]


@contextlib.asynccontextmanager
async def running_link(**options: Any) -> AsyncIterator[LinkHarness]:
    harness = LinkHarness(**options)
    running = asyncio.create_task(harness.link.run())
    try:
        yield harness
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for worker in harness.workers:
            worker.close()
        harness.link.close()


async def error_of(request: Request) -> TrinityError:
    """Return the error that ended the request; discard the pieces before it."""
    try:
        while True:
            await request.next()
    except TrinityError as error:
        return error
