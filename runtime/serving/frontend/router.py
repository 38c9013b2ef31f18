"""Prefix-aware routing: chooses the prefill and the decode worker of a request. No sockets, an injected clock.

- **Prefill**: the worker with the lowest cost (`choice.py`).
- **Decode**: workers with a free slot and enough free KV blocks before those without, then the lowest cost a slot.

The router tracks the prefixes that it has sent to each worker. It considers a prefix evicted once the worker reports
that it has evicted cached blocks of a later request (LRU).

Reports lag by up to 250 ms. Draining workers receive no new requests; the number of requests in flight is bounded.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from runtime.errors import ContextLengthExceeded, Overloaded, Unavailable
from runtime.serving.frontend.choice import BLOCK_CHARS, BLOCK_TOKENS, Candidate, Choice, prefix_blocks
from runtime.serving.messages import UNKNOWN_LOAD, DecodeLoad, Generation, Hello, Message, Report, Role
from runtime.serving.model.text import last_question_index


def known_prefix(generation: Generation) -> tuple[tuple[int, ...], int]:
    """Return the prefix blocks that precede the passages, and the prompt's number of blocks without passages.

    Passages are inserted after the text of a chat's system message, before the text of its last question, or before a
    raw prompt (`model/text.py`): what follows them is no shared prefix.
    """
    if generation.retrieval is None:
        prefix = prefix_blocks(generation.messages or generation.prompt, salt=generation.salt)
        return prefix, len(prefix)
    before: Sequence[Message] = [turn for turn in generation.messages[:1] if turn.role == "system"]
    if generation.retrieval.place == "question":
        before = generation.messages[: max(last_question_index([turn.role for turn in generation.messages]), 0)]
    if generation.messages:
        whole = sum(len(turn.content) for turn in generation.messages) // BLOCK_CHARS
    else:
        whole = len(generation.prompt) // (BLOCK_CHARS if isinstance(generation.prompt, str) else BLOCK_TOKENS)
    return prefix_blocks(before, salt=generation.salt), whole


@dataclass(frozen=True, slots=True)
class Placement:
    """Names of the two workers of a request, and the decode worker's hand-over endpoint and load at that time."""

    prefill: str
    decode: str
    decode_endpoint: str
    decode_load: DecodeLoad = UNKNOWN_LOAD


UNPLACED = Placement("", "", "")


@dataclass(slots=True, eq=False)
class Worker(Candidate):
    """State of a worker: its Hello and its last report."""

    hello: Hello
    reported: Report

    @property
    def reported_load(self) -> int:
        return self.reported.queued + self.reported.running

    @property
    def evicted_ns(self) -> int:
        return self.reported.evicted_ns

    @property
    def has_free_slot(self) -> bool:
        return self.reported.free_slots > 0 and self.load < self.hello.slots

    def has_free_blocks(self, tokens: int) -> bool:
        """Whether it reported enough free KV blocks for so many tokens; true if it reports none."""
        return not self.hello.blocks or self.reported.free_blocks * self.hello.block_tokens >= tokens

    def remember(self, prefix: Sequence[int], limit: int, now_ns: int) -> None:
        """Add a prompt's blocks and evict the least recently used beyond `limit` and beyond the worker's KV
        capacity."""
        if self.hello.blocks:
            limit = min(limit, max(1, self.hello.blocks * self.hello.block_tokens // BLOCK_TOKENS))
        self.prefixes.remember(prefix, limit, now_ns)


class Router:
    """Places requests on workers.

    Every `place` is followed by at most one `prefilled` and exactly one `finished` with the same placement.
    """

    def __init__(
        self,
        *,
        max_in_flight: int,
        overlap_weight: float = 1.0,
        remembered_blocks: int = 4096,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.max_in_flight = max_in_flight
        self.in_flight = 0
        self._choice = Choice(overlap_weight)
        self._remembered_blocks = remembered_blocks
        self._clock = clock
        self._workers: dict[str, Worker] = {}

    def add(self, hello: Hello) -> None:
        """Add a ready worker. It replaces one of the same name: it is a new process with an empty cache."""
        idle = Report(hello.worker, hello.epoch, 0, 0, 0, hello.slots, free_blocks=hello.blocks)
        self._workers[hello.worker] = Worker(hello, idle)

    def remove(self, name: str) -> None:
        """Remove a lost worker; unknown names are ignored."""
        self._workers.pop(name, None)

    def report(self, report: Report) -> None:
        """Store a worker's load report; unknown names are ignored."""
        worker = self._workers.get(report.worker)
        if worker is not None:
            worker.reported = report

    def assigned(self, name: str) -> int:
        """Return the number of requests assigned to a worker, including those on their way to it."""
        worker = self._workers.get(name)
        return worker.assigned if worker is not None else 0

    def workers(self) -> list[Worker]:
        """Return all workers, including draining ones, in the order in which they were added."""
        return list(self._workers.values())

    def missing(self) -> list[Role]:
        """Return the roles without a worker that accepts requests; empty when the node is ready."""
        return [role for role in get_args(Role) if not self._ready(role)]

    def place(
        self, prefix: Sequence[int], tokens: int = 0, avoid: str = "", blocks: int = 0, expected: int = 0
    ) -> Placement:
        """Choose both workers for a prompt with these prefix blocks that needs at least `tokens` of context.

        `blocks`: the prompt's number of blocks, if not all are known. `expected`: tokens that it is expected to need,
        if fewer than `tokens`. `avoid` is chosen only if there is no other worker. Raises Overloaded (too many in
        flight), Unavailable (a role has no worker) or ContextLengthExceeded.
        """
        if self.in_flight >= self.max_in_flight:
            raise Overloaded(
                f"{self.in_flight} requests are in flight, the limit is {self.max_in_flight}; try again later"
            )
        choice, likely = self._choice, min(expected or tokens, tokens)
        prefill = choice.choose(
            self._fitting("prefill", tokens),
            lambda worker: (
                worker.hello.worker == avoid,
                choice.cost(worker, prefix, blocks, full=not worker.has_free_blocks(likely)),
            ),
        )
        decode = choice.choose(
            self._fitting("decode", tokens),
            lambda worker: (
                worker.hello.worker == avoid,
                not (worker.has_free_slot and worker.has_free_blocks(likely)),
                choice.cost(worker, prefix, blocks) / worker.hello.slots,
            ),
        )
        load = DecodeLoad(decode.load, decode.hello.slots, decode.reported.step_ns)
        now_ns = self._clock()
        for worker in (prefill, decode):
            worker.remember(prefix, self._remembered_blocks, now_ns)
            worker.assigned += 1
        self.in_flight += 1
        return Placement(prefill.hello.worker, decode.hello.worker, decode.hello.endpoint, load)

    def prefilled(self, placement: Placement) -> None:
        """Unassign the prefill worker of a request that decode has taken over."""
        self._unassign(placement.prefill)

    def finished(self, placement: Placement, *, prefilled: bool) -> None:
        """Unassign a request that has ended; `prefilled`: whether `prefilled` was called for it."""
        self.in_flight -= 1
        self._unassign(placement.decode)
        if not prefilled:
            self._unassign(placement.prefill)

    def _unassign(self, name: str) -> None:
        worker = self._workers.get(name)
        if worker is not None and worker.assigned:  # a replacement starts with none assigned
            worker.assigned -= 1

    def _ready(self, role: Role) -> list[Worker]:
        return [
            worker for worker in self._workers.values() if worker.hello.role == role and not worker.reported.draining
        ]

    def _fitting(self, role: Role, tokens: int) -> list[Worker]:
        ready = self._ready(role)
        if not ready:
            raise Unavailable(f"no {role} worker is ready; try again later")
        fitting = [worker for worker in ready if worker.hello.limit_tokens >= tokens]
        if not fitting:
            limit = max(worker.hello.limit_tokens for worker in ready)
            raise ContextLengthExceeded(
                f"prompt and answer need at least {tokens} tokens, the model's context holds {limit}", "max_tokens"
            )
        return fitting
