"""Workers that step in turns, with the frontend's table of requests: what is told of each, and faults.

Also what is still on its way when a worker dies is up to the test. Who consumes the answers only takes notes. The pool
is played by `FakePool`: it answers after as many polls as the test says.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from benchmarks.common.stepped_workers import EPOCH, SteppedWorkers
from runtime.errors import TrinityError, error_from_code
from runtime.retrieval.passages import Passage
from runtime.retrieval.retriever import RetrievalResult
from runtime.serving.frontend.requests import ClientDisconnected, Piece, Request, RequestTable
from runtime.serving.frontend.router import Placement
from runtime.serving.messages import Cancel, Failed, Hello, Prefill, Probe, Report, Retrieved, ToFrontend, Tokens

_MOST_ROUNDS = 50_000


class FakePool:
    """Stands for a worker's retriever: passages from `passages`, in turn or as the text has it (`by_text`), `polls`
    polls after they were asked for."""

    def __init__(
        self, passages: Sequence[Passage], polls: int = 1, *, by_text: bool = False, partial: bool = False
    ) -> None:
        self.passages, self.polls, self._by_text, self._partial = list(passages), polls, by_text, partial
        self.asked = 0
        self._open: dict[int, list[int]] = {}

    def submit(
        self, text: str, collection: str, k: int, stage: str, deadline_ns: int, build: str = "", filter: bytes = b"",
        hybrid: float = 0.0,
    ) -> int:  # fmt: skip
        self.asked += 1
        place = crc32(text.encode()) if self._by_text else (self.asked - 1) * k
        self._open[self.asked] = [self.polls, k, place % len(self.passages)]
        return self.asked

    def poll(self) -> list[RetrievalResult]:
        for waiting in self._open.values():
            waiting[0] -= 1
        done = [ticket for ticket, (left, *_) in self._open.items() if left <= 0]
        found = []
        for ticket in done:
            _, k, first = self._open.pop(ticket)
            passages = tuple((self.passages * 2)[first : first + k])
            found.append(RetrievalResult(ticket, passages, embedded_ns=time.monotonic_ns(), partial=self._partial))
        return found

    def cancel(self, ticket: int) -> None:
        self._open.pop(ticket, None)

    def sleep(self, sockets: Sequence[Any], timeout_ms: float) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Told:
    """What the consumer of a request was given."""

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
        """The context from which token number `generated` (from 0) was drawn: prompt, answer, and what probes
        inserted before the then last token."""
        context, inserted = list(self.prompt), self.inserted
        for number, token in enumerate(self.tokens[:generated], start=1):
            context += [*inserted.get(number, ()), token]
        return context


class _Noted(Request):
    """A request whose consumer notes every piece at once."""

    def __init__(self, message: Prefill, notes: Told) -> None:
        super().__init__(message.request_id, message.generation)
        self._notes = notes

    def put(self, piece: Piece | TrinityError) -> None:
        self._notes.add(piece)


class Workers(SteppedWorkers):
    """`SteppedWorkers` whose answers are told, of which decode workers die, and which are asked for passages."""

    def __init__(self, model: Path, *, weights: str = "float32", **options: Any) -> None:
        self._table = RequestTable(lambda ended, request: None)
        self._requests: dict[str, Request] = {}  # ended ones too
        self._late: list[ToFrontend] = []  # what a worker said before it died, and nobody has heard yet
        self.told: dict[str, Told] = {}
        super().__init__(model, weights=weights, **options)

    def lose(self, name: str, unheard: int = 0) -> None:
        """A decode worker dies. What it says in `unheard` last steps comes in when its death is known already."""
        worker = self.decodes.pop(name)
        worker.link.send = lambda message: self._late.append(message)  # type: ignore[method-assign]
        for _ in range(unheard):
            worker.step()
        worker.close()

    def play_pool(self, prefill: FakePool, decode: FakePool) -> None:
        self.prefill.retriever.close()
        self.prefill.retriever = prefill  # type: ignore[assignment]
        for worker in self.decodes.values():
            worker.probes.retriever = decode  # type: ignore[assignment]

    def submit(self, request_id: str, prompt: Sequence[int], max_tokens: int, **more: Any) -> Prefill:
        message = super().submit(request_id, prompt, max_tokens, **more)
        self.told[request_id] = Told()
        self._requests[request_id] = request = _Noted(message, self.told[request_id])
        self._table.open(request)
        return message

    def restart(self, request_id: str, decode: str) -> None:
        """Its decode worker died: go on with another, from what was told."""
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
        """Until all requests have ended."""
        for _ in range(_MOST_ROUNDS):
            if all(told.ended for told in self.told.values()):
                return
            self.round()
        raise AssertionError(f"not ended: {[name for name, told in self.told.items() if not told.ended]}")

    def settle(self) -> None:
        """Until the workers hold nothing any more."""
        for _ in range(_MOST_ROUNDS):
            if not self.prefill.busy and not any(worker.busy for worker in self.decodes.values()):
                return
            self.round()
        raise AssertionError("workers still hold requests")

    def receive(self) -> None:
        """Take in what workers have said."""
        late, self._late = self._late, []
        for message in late:
            self.handle(message)
        super().receive()

    def handle(self, message: ToFrontend) -> None:
        if isinstance(message, Hello | Report):
            return
        request = self._table.get(message.request_id)
        if request is not None and isinstance(message, Failed):
            self._table.fail(request, error_from_code(message.code, message.message, message.param))
        elif request is not None and not isinstance(message, Failed):
            request.first_token_ns = request.first_token_ns or 1
            self._table.deliver(message)


Start = Callable[..., Workers]
"""Starts workers with these options; they end with the test."""
