"""Workers stepped alternately, with the frontend's request table, recorded answers and injected faults.

A test also decides which messages are in flight when a worker dies. Consumers only record answers. `FakePool` replaces
the pool: it answers after a number of polls set by the test.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from runtime.errors import TrinityError, error_from_code
from runtime.retrieval.passages import Passage
from runtime.retrieval.retrieval_steps import RetrievalResult
from runtime.retrieval.search.query import Query
from runtime.serving.frontend.requests import ClientDisconnected, Piece, Request, RequestTable
from runtime.serving.frontend.router import Placement
from runtime.serving.messages import (
    Cached,
    Cancel,
    Failed,
    Hello,
    Prefill,
    Probe,
    Report,
    Retrieved,
    Taken,
    ToFrontend,
    Tokens,
)
from tests.serving.stepped_workers import EPOCH, SteppedWorkers

_MOST_ROUNDS = 50_000


class FakePool:
    """Fake of a worker's retriever: returns `passages`, in order or chosen by the text (`by_text`), `polls` polls after
    the request."""

    def __init__(self, passages: Sequence[Passage], polls: int = 1, *, by_text: bool = False) -> None:
        self.passages, self.polls, self._by_text = list(passages), polls, by_text
        self.request_count = 0
        self._open: dict[int, list[int]] = {}

    def submit(self, query: Query, build: str = "") -> int:
        self.request_count += 1
        k = query.spec.k
        place = crc32(query.text.encode()) if self._by_text else (self.request_count - 1) * k
        self._open[self.request_count] = [self.polls, k, place % len(self.passages)]
        return self.request_count

    def poll(self) -> list[RetrievalResult]:
        for waiting in self._open.values():
            waiting[0] -= 1
        done = [ticket for ticket, (left, *_) in self._open.items() if left <= 0]
        found = []
        for ticket in done:
            _, k, first = self._open.pop(ticket)
            passages = tuple((self.passages * 2)[first : first + k])
            found.append(RetrievalResult(ticket, passages, embedded_ns=time.monotonic_ns()))
        return found

    def cancel(self, ticket: int) -> None:
        self._open.pop(ticket, None)

    def sleep(self, sockets: Sequence[Any], timeout_ms: float) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Output:
    """Everything the consumer of a request received."""

    prompt: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    searches: list[Retrieved] = field(default_factory=list)
    last: Tokens | None = None
    failed: TrinityError | None = None
    probes: list[Probe] = field(default_factory=list)
    stages: list[dict[str, int]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.last is not None or self.failed is not None

    def add(self, piece: Piece | TrinityError) -> None:
        if isinstance(piece, TrinityError):
            self.failed = piece
        elif isinstance(piece, Retrieved):
            self.searches.append(piece)
        else:
            self.prompt = piece.prompt_token_ids or self.prompt
            self.tokens += piece.token_ids
            self.text += piece.text
            self.probes += piece.probes
            if piece.stages:
                self.stages.append(piece.stages)
            if piece.finish_reason is not None:
                self.last = piece

    @property
    def inserted(self) -> dict[int, tuple[int, ...]]:
        return {search.at_token: search.inserted for search in self.searches if search.inserted}

    @property
    def passages(self) -> list[str]:
        return [passage.id for search in self.searches for passage in search.passages]

    def sequence(self, generated: int) -> list[int]:
        """Return the context from which token number `generated` (from 0) was sampled: prompt, answer, and passages
        that probes inserted before the last token at that time."""
        context, inserted = list(self.prompt), self.inserted
        for number, token in enumerate(self.tokens[:generated], start=1):
            context += [*inserted.get(number, ()), token]
        return context


class _RecordedRequest(Request):
    """A request whose consumer records every piece at once."""

    def __init__(self, message: Prefill, output: Output) -> None:
        super().__init__(message.request_id, message.generation)
        self._output = output

    def put(self, piece: Piece | TrinityError) -> None:
        self._output.add(piece)


class Workers(SteppedWorkers):
    """`SteppedWorkers` with recorded answers, killable decode workers and a fake pool."""

    def __init__(self, model: Path, *, weights: str = "float32", **options: Any) -> None:
        self.ended: list[str] = []  # ids in the order in which their requests ended
        self._table = RequestTable(lambda outcome, request: self.ended.append(request.id))
        self._requests: dict[str, Request] = {}  # including ended ones
        self._late: list[ToFrontend] = []  # messages of a dead worker that were not received yet
        self.outputs: dict[str, Output] = {}
        self.cached: list[Cached] = []
        super().__init__(model, weights=weights, **options)

    def lose(self, name: str, undelivered: int = 0) -> None:
        """Kill a decode worker. Messages of its last `undelivered` steps arrive after its death is known."""
        worker = self.decodes.pop(name)
        worker.link.send = lambda message: self._late.append(message)  # type: ignore[method-assign]
        for _ in range(undelivered):
            worker.step()
        worker.close()

    def play_pool(self, prefill: FakePool, decode: FakePool) -> None:
        self.prefill.retriever.close()
        self.prefill.retriever = prefill  # type: ignore[assignment]
        for worker in self.decodes.values():
            worker.probes.retriever = decode  # type: ignore[assignment]

    def submit(self, request_id: str, prompt: Sequence[int], max_tokens: int, **more: Any) -> Prefill:
        message = super().submit(request_id, prompt, max_tokens, **more)
        self.outputs[request_id] = Output()
        self._requests[request_id] = request = _RecordedRequest(message, self.outputs[request_id])
        self._table.open(request)
        return message

    def restart(self, request_id: str, decode: str) -> None:
        """Continue on another decode worker after the death of the first, from the reported tokens."""
        request = self._requests[request_id]
        self._call_off(request)
        self._table.start_attempt(request)
        placement = Placement("prefill-0", decode, self.plan.endpoint(decode))
        self.send("prefill-0", request.message(EPOCH, placement, request.resume()))

    def cancel(self, request_id: str) -> None:
        request = self._requests[request_id]
        self._call_off(request)
        self._table.fail(request, ClientDisconnected("nobody waits for it"))

    def _call_off(self, request: Request) -> None:
        for name in ("prefill-0", *self.decodes):
            self.send(name, Cancel(request.attempt_id))

    def run(self) -> None:
        """Run until all requests have ended."""
        for _ in range(_MOST_ROUNDS):
            if all(output.ended for output in self.outputs.values()):
                return
            self.round()
        raise AssertionError(f"not ended: {[name for name, output in self.outputs.items() if not output.ended]}")

    def settle(self) -> None:
        """Run until the workers hold no resources."""
        for _ in range(_MOST_ROUNDS):
            if not self.prefill.busy and not any(worker.busy for worker in self.decodes.values()):
                return
            self.round()
        raise AssertionError("workers still hold requests")

    def assert_nothing_held(self) -> None:
        """Check that the workers release all resources."""
        self.settle()
        assert set(self.held().values()) == {(0, 0)}

    def receive(self) -> None:
        """Receive messages of the workers."""
        late, self._late = self._late, []
        for message in late:
            self.handle(message)
        super().receive()

    def handle(self, message: ToFrontend) -> None:
        if isinstance(message, Cached):
            self.cached.append(message)
        if isinstance(message, Hello | Report | Cached):
            return
        request = self._table.get(message.request_id)
        if request is not None and isinstance(message, Failed):
            self._table.fail(request, error_from_code(message.code, message.message, message.param))
        elif request is not None and not isinstance(message, Failed | Taken):
            request.first_token_ns = request.first_token_ns or 1
            self._table.deliver(message)


Start = Callable[..., Workers]
"""Starts workers with these options; they end with the test."""
