"""Fake workers that speak `runtime.serving.messages` over real ZeroMQ.

`Worker` says only what the test tells it to. `Player` plays what the prompt says to a `Cluster`: `say=5` answers with
five words and stops, `hang=2` falls silent after two, `fail=2` fails after two, `probe=2` searches after two,
`refuse=CODE` is refused by prefill.
"""

import asyncio
import itertools
import os
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio

from runtime.retrieval.passages import Passage
from runtime.serving.messages import (
    Cancel,
    Failed,
    Hello,
    Prefill,
    Report,
    Retrieved,
    Role,
    ToFrontend,
    Tokens,
    ToWorker,
    Welcome,
    decode_to_worker,
    encode,
)

if TYPE_CHECKING:
    from tests.frontend.cluster import Cluster

WAIT = 60.0  # seconds until a test that hangs fails
_names = itertools.count(1)


def endpoint() -> str:
    """An abstract ipc name that no other test uses."""
    return f"ipc://@trinity-test-{os.getpid()}-{next(_names)}"


def run(test: Any) -> Any:
    """Run a coroutine to its end, or fail."""
    return asyncio.run(asyncio.wait_for(test, WAIT))


class Worker:
    """One DEALER socket that says what the test says."""

    def __init__(
        self,
        to: str,
        role: Role,
        name: str,
        *,
        epoch: int = 1,
        slots: int = 4,
        limit: int = 2048,
        identity: bytes = b"",
    ) -> None:
        self.identity = identity
        self.me = Hello(role, name, epoch, 4711, slots, limit, f"ipc://@{name}-handover" if role == "decode" else "")
        self.context = zmq.asyncio.Context()
        self.socket = self._connected(to)

    def _connected(self, to: str) -> zmq.asyncio.Socket:
        made = self.context.socket(zmq.DEALER)
        made.set(zmq.LINGER, 0)
        if self.identity:
            made.set(zmq.IDENTITY, self.identity)
        made.connect(to)
        return made

    async def say(self, message: ToFrontend) -> None:
        await self.socket.send(encode(message))

    async def say_raw(self, *frames: bytes) -> None:
        await self.socket.send_multipart(frames)

    async def hear(self) -> ToWorker:
        message: ToWorker = decode_to_worker(await self.socket.recv())
        return message

    async def hear_prefill(self) -> Prefill:
        message = await self.hear()
        assert isinstance(message, Prefill)
        return message

    def reconnect(self, to: str) -> None:
        """Come back over another connection, as ZeroMQ does by itself after a broken one."""
        self.socket.close(linger=0)
        self.socket = self._connected(to)

    async def hello(self) -> Welcome:
        await self.say(self.me)
        message = await self.hear()
        assert isinstance(message, Welcome)
        return message

    async def settle(self) -> None:
        """Until the frontend has taken in all that was said before: a report to no frontend is answered."""
        await self.report(0)
        while not isinstance(await self.hear(), Welcome):
            pass

    async def report(self, frontend_epoch: int, **load: Any) -> None:
        load = {"queued": 0, "running": 0, "free_slots": self.me.slots} | load
        await self.say(Report(self.me.worker, self.me.epoch, frontend_epoch, **load))

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


PASSAGES = (
    Passage("with-1", "The with statement", 0.25, "The with statement wraps a block."),
    Passage("try-2", "The try statement", 0.5, "The try statement handles exceptions."),
)


class Player(Worker):
    """A worker that plays the prompts' directions. `held` are the requests it holds memory for."""

    def __init__(self, cluster: "Cluster", role: Role, name: str, **options: Any) -> None:
        super().__init__(cluster.link.endpoint, role, name, **options)
        self.cluster = cluster
        self.held: dict[str, asyncio.Task[None]] = {}
        self.prefills: list[Prefill] = []
        self.cancels: list[str] = []

    async def live(self) -> None:
        await self.say(self.me)
        try:
            while True:
                message = await self.hear()
                if isinstance(message, Welcome):
                    await self.report(message.frontend_epoch)
                elif isinstance(message, Cancel):
                    self.cancels.append(message.request_id)
                    self.drop(message.request_id)
                elif isinstance(message, Prefill):
                    self.prefills.append(message)
                    self.take(message)
                self.cluster.changed()
        finally:
            for task in list(self.held.values()):
                task.cancel()
            self.close()

    def take(self, prefill: Prefill) -> None:
        self.held[prefill.request_id] = asyncio.create_task(self._play(prefill))

    def drop(self, request_id: str) -> None:
        task = self.held.pop(request_id, None)
        if task is not None:
            task.cancel()
        self.cluster.changed()

    async def _play(self, prefill: Prefill) -> None:
        try:
            await (self._prefill(prefill) if self.me.role == "prefill" else self._decode(prefill))
        finally:
            self.held.pop(prefill.request_id, None)
            self.cluster.changed()

    async def _prefill(self, prefill: Prefill) -> None:
        plan = _plan(prefill)
        if "refuse" in plan:
            await self.say(Failed(prefill.request_id, plan["refuse"], f"refused: {plan['refuse']}", "messages"))
            return
        if plan.get("hang") == "prefill":
            await asyncio.Event().wait()
        asked = prefill.generation
        if asked.retrieval is not None:
            await self.say(Retrieved(prefill.request_id, PASSAGES[: asked.retrieval.k]))
        self.cluster.players[prefill.decode_worker].take(prefill)

    async def _decode(self, prefill: Prefill) -> None:
        plan, sampling = _plan(prefill), prefill.generation.sampling
        wanted = int(plan.get("say", "1000000"))
        received_ns = prefill.generation.received_ns
        stages = {"received": received_ns, "first_token": received_ns + 5_000_000}
        stages["end"] = stages["first_token"] + 10_000_000
        for count in range(min(wanted, sampling.max_tokens) + 1):
            if str(count) == plan.get("probe"):
                await self.say(Retrieved(prefill.request_id, PASSAGES[:1], at_token=count))
            if str(count) == plan.get("hang"):
                await asyncio.Event().wait()
            if str(count) == plan.get("fail"):
                await self.say(Failed(prefill.request_id, "internal_error", "the fake broke"))
                return
            word, last = f"w{count} ", count + 1 == min(wanted, sampling.max_tokens)
            stopped = any(stop in word for stop in sampling.stop)
            reason = "stop" if stopped or (last and wanted <= sampling.max_tokens) else "length" if last else None
            text = "" if stopped else word
            prompt = (1, 2, 3) if count == 0 else ()
            usage = {"prompt_tokens": 3, "stages": stages} if reason else {}
            await self.say(
                Tokens(prefill.request_id, text, (100 + count,), reason, prompt_token_ids=prompt, **usage)  # type: ignore[arg-type]
            )
            if reason is not None:
                return


def _plan(prefill: Prefill) -> dict[str, str]:
    asked = prefill.generation
    text = asked.messages[-1].content if asked.messages else asked.prompt
    words = text.split() if isinstance(text, str) else []
    return dict(word.split("=", 1) for word in words if "=" in word)
