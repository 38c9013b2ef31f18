"""Fake workers that exchange `runtime.serving.messages` over real ZeroMQ.

`FakeWorker` sends only what the test sends. `ScriptedWorker` belongs to a `Cluster` and follows directions in the
prompt: `say=5` answers with five words and stops, `hang=2` stops responding after two, `fail=2` fails after two,
`probe=2` searches after two; prefill rejects `refuse=CODE`. `answer=Some_words` answers with these words. Only stores
of clients are searched; of another collection the passages are `PASSAGES`.
"""

import asyncio
import itertools
import os
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio
from msgspec.structs import replace

from runtime.node.stores_config import STORES
from runtime.retrieval.passages import Passage, ignore_size
from runtime.serving.messages import (
    Cancel,
    Failed,
    Generation,
    Hello,
    Prefill,
    Report,
    Retrieval,
    Retrieved,
    Role,
    ToFrontend,
    Tokens,
    ToWorker,
    Welcome,
    decode_to_worker,
    encode,
)
from runtime.serving.model.text import last_question, passage_text

if TYPE_CHECKING:
    from tests.frontend.cluster import Cluster

WAIT = 60.0  # seconds until a hanging test fails
_names = itertools.count(1)


def unique_endpoint() -> str:
    """Return an abstract ipc endpoint that no other test uses."""
    return f"ipc://@trinity-test-{os.getpid()}-{next(_names)}"


def run(test: Any) -> Any:
    """Run a coroutine; fail after `WAIT` seconds."""
    return asyncio.run(asyncio.wait_for(test, WAIT))


class FakeWorker:
    """A worker's DEALER socket, driven by the test."""

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
        self.socket = self._connect(to)

    def _connect(self, to: str) -> zmq.asyncio.Socket:
        dealer = self.context.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 0)
        if self.identity:
            dealer.set(zmq.IDENTITY, self.identity)
        dealer.connect(to)
        return dealer

    async def send(self, message: ToFrontend) -> None:
        await self.socket.send(encode(message))

    async def send_raw(self, *frames: bytes) -> None:
        await self.socket.send_multipart(frames)

    async def receive(self) -> ToWorker:
        message: ToWorker = decode_to_worker(await self.socket.recv())
        return message

    async def receive_prefill(self) -> Prefill:
        message = await self.receive()
        assert isinstance(message, Prefill)
        return message

    async def hello(self) -> Welcome:
        await self.send(self.me)
        message = await self.receive()
        assert isinstance(message, Welcome)
        return message

    async def settle(self) -> None:
        """Wait until the frontend has processed every earlier message: it answers a report for an unknown epoch."""
        await self.report(0)
        while not isinstance(await self.receive(), Welcome):
            pass

    async def report(self, frontend_epoch: int, **load: Any) -> None:
        load = {"queued": 0, "running": 0, "free_slots": self.me.slots} | load
        await self.send(Report(self.me.worker, self.me.epoch, frontend_epoch, **load))

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


PASSAGES = (
    Passage("with-1", "The with statement", 0.25, "The with statement wraps a block."),
    Passage("try-2", "The try statement", 0.5, "The try statement handles exceptions."),
)


class ScriptedWorker(FakeWorker):
    """A worker that follows the directions in prompts. `held`: the requests it holds memory for."""

    def __init__(self, cluster: "Cluster", role: Role, name: str, **options: Any) -> None:
        super().__init__(cluster.link.endpoint, role, name, **options)
        self.cluster = cluster
        self.held: dict[str, asyncio.Task[None]] = {}
        self.prefills: list[Prefill] = []
        self.cancels: list[str] = []

    async def serve(self) -> None:
        await self.send(self.me)
        try:
            while True:
                message = await self.receive()
                if isinstance(message, Welcome):
                    await self.report(message.frontend_epoch)
                elif isinstance(message, Cancel):
                    self.cancels.append(message.request_id)
                    self.cancel(message.request_id)
                elif isinstance(message, Prefill):
                    self.prefills.append(message)
                    self.start(message)
        finally:
            for task in list(self.held.values()):
                task.cancel()
            self.close()

    def start(self, prefill: Prefill) -> None:
        self.held[prefill.request_id] = asyncio.create_task(self._run(prefill))

    def cancel(self, request_id: str) -> None:
        task = self.held.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def _run(self, prefill: Prefill) -> None:
        try:
            await (self._prefill(prefill) if self.me.role == "prefill" else self._decode(prefill))
        finally:
            self.held.pop(prefill.request_id, None)

    async def _prefill(self, prefill: Prefill) -> None:
        script = _script(prefill)
        if "refuse" in script:
            await self.send(Failed(prefill.request_id, script["refuse"], f"refused: {script['refuse']}", "messages"))
            return
        if script.get("hang") == "prefill":
            await asyncio.Event().wait()
        generation = prefill.generation
        if generation.retrieval is not None:
            passages = PASSAGES[: generation.retrieval.k]
            if generation.retrieval.collection == STORES:
                passages = await self._found(generation, generation.retrieval)
            if "cite" in script:
                long = {"notes": "x" * int(script["cite"])}
                passages = tuple(replace(passage, attributes=long) for passage in passages)
            texts = tuple(passage_text(one.title, one.text) for one in passages) if generation.retrieval.quote else ()
            await self.send(Retrieved(prefill.request_id, passages, texts=texts))
        self.cluster.players[prefill.decode_worker].start(prefill)

    async def _found(self, generation: Generation, retrieval: Retrieval) -> tuple[Passage, ...]:
        """Search the stores, as a prefill worker does."""
        query = retrieval.query(last_question(generation.messages), "prefill")
        found = await self.cluster.search.search(query, on_embedded=int, on_read=ignore_size, timeout_s=WAIT)
        return tuple(found)

    async def _decode(self, prefill: Prefill) -> None:
        script, sampling = _script(prefill), prefill.generation.sampling
        words = script["answer"].split("_") if "answer" in script else []
        wanted = len(words) or int(script.get("say", "1000000"))
        received_ns = prefill.generation.received_ns
        stages = {"received": received_ns, "first_token": received_ns + 5_000_000}
        stages["end"] = stages["first_token"] + 10_000_000
        for count in range(min(wanted, sampling.max_tokens) + 1):
            if str(count) == script.get("probe"):
                await self.send(Retrieved(prefill.request_id, PASSAGES[:1], at_token=count))
            if str(count) == script.get("hang"):
                await asyncio.Event().wait()
            if str(count) == script.get("fail"):
                await self.send(Failed(prefill.request_id, "internal_error", "the fake failed"))
                return
            word, last = f"{words[count] if words else f'w{count}'} ", count + 1 == min(wanted, sampling.max_tokens)
            stopped = any(stop in word for stop in sampling.stop)
            reason = "stop" if stopped or (last and wanted <= sampling.max_tokens) else "length" if last else None
            text = "" if stopped else word
            prompt = (1, 2, 3) if count == 0 else ()
            usage = {"prompt_tokens": 3, "stages": stages, "cached_tokens": 2} if reason else {}
            await self.send(
                Tokens(prefill.request_id, text, (100 + count,), reason, prompt_token_ids=prompt, **usage)  # type: ignore[arg-type]
            )
            if reason is not None:
                return


def _script(prefill: Prefill) -> dict[str, str]:
    generation = prefill.generation
    text = generation.messages[-1].content if generation.messages else generation.prompt
    words = text.split() if isinstance(text, str) else []
    return dict(word.split("=", 1) for word in words if "=" in word)
