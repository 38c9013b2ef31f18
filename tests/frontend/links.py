"""A link to the workers for tests: on a clock that stands still, without HTTP."""

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
from runtime.testing.clock import Clock
from tests.frontend.fakes import Worker, endpoint

EPOCH = 77
LOST_AFTER = 10.0
RESTART_WAIT = 30.0


class Stand:
    """A link under a clock that stands still, and the workers that a test connects to it."""

    def __init__(
        self, max_in_flight: int = 64, at: str = "", kind: type[WorkerLink] = WorkerLink, restarts: int = 0
    ) -> None:
        self.clock = Clock()
        self.ended: list[RequestOutcome] = []
        self.router = Router(max_in_flight=max_in_flight)
        self.link = kind(
            at or endpoint(),
            self.router,
            epoch=EPOCH,
            clock=self.clock,
            lost_after_ns=int(LOST_AFTER * 1e9),
            on_end=self.ended.append,
            restarts=RestartLimits(restarts, int(RESTART_WAIT * 1e9)),
        )
        self.workers: list[Worker] = []

    async def worker(self, role: Role, name: str, **options: Any) -> Worker:
        worker = Worker(self.link.endpoint, role, name, **options)
        self.workers.append(worker)
        assert (await worker.hello()).frontend_epoch == EPOCH
        return worker

    def submit(self, request_id: str = "r1", timeout_s: float = 60.0, **options: Any) -> Request:
        options = {"prompt": "hello", "sampling": Sampling(max_tokens=8), **options}
        now = self.clock()
        asked = Generation(received_ns=now, deadline_ns=now + int(timeout_s * 1e9), **options)
        return self.link.submit(request_id, asked)

    @property
    def codes(self) -> list[str]:
        return [ended.code for ended in self.ended]


@contextlib.asynccontextmanager
async def standing(**options: Any) -> AsyncIterator[Stand]:
    stand = Stand(**options)
    running = asyncio.create_task(stand.link.run())
    try:
        yield stand
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for worker in stand.workers:
            worker.close()
        stand.link.close()


async def ending(request: Request) -> TrinityError:
    """What ended the request; pieces before it are thrown away."""
    try:
        while True:
            await request.next()
    except TrinityError as error:
        return error
