"""Prefix-aware routing: chooses the prefill and the decode worker of a request. No sockets, an injected clock.

- **Prefill**: the worker with the lowest cost (`choice.py`).
- **Decode**: workers with a free slot and enough free KV blocks before those without, then the lowest cost a slot.

Workers publish which KV blocks they have cached (`cached_blocks.py`). The router also tracks the prefixes that it has
sent to each worker, which count while a worker's own account is missing or has a gap.

Reports lag by up to 250 ms. Draining workers receive no new requests; the number of requests in flight is bounded.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from ipc import Memo
from runtime.errors import ContextLengthExceeded, Overloaded, Unavailable
from runtime.serving.frontend.cached_blocks import PrefixKeys, WorkerBlocks
from runtime.serving.frontend.choice import BLOCK_CHARS, BLOCK_TOKENS, Candidate, Choice, prefix_blocks
from runtime.serving.kv.blocks import chain_root
from runtime.serving.messages import UNKNOWN_LOAD, Cached, DecodeLoad, Generation, Hello, Message, Report, Role
from runtime.serving.model.text import last_question_index


class KnownPrefix(NamedTuple):
    """The part of a prompt that is known before its passages are found: the hashes of its `blocks`, and its `length` in
    blocks, with the incomplete last one. The prompt without passages has `whole` blocks."""

    blocks: tuple[int, ...]
    length: float
    whole: int


NO_PREFIX = KnownPrefix((), 0.0, 0)


def known_prefix(generation: Generation) -> KnownPrefix:
    """Return the prefix that precedes the passages; without retrieval, the whole prompt.

    Passages are inserted before the text of a chat's last question, or before a raw prompt (`model/text.py`): what
    follows them is no shared prefix.
    """
    whole: str | Sequence[int] | Sequence[Message] = generation.messages or generation.prompt
    before = whole
    if generation.retrieval is not None:
        before = generation.messages[: max(last_question_index([turn.role for turn in generation.messages]), 0)]
    return KnownPrefix(prefix_blocks(before, salt=generation.salt), _length(before), int(_length(whole)))


def _length(prompt: str | Sequence[int] | Sequence[Message]) -> float:
    """Return a prompt's length in blocks, as `prefix_blocks` divides it."""
    if isinstance(prompt, str):
        return len(prompt) / BLOCK_CHARS
    turns = [turn for turn in prompt if isinstance(turn, Message)]
    if turns:
        return sum(len(turn.role) + len(turn.content) + 2 for turn in turns) / BLOCK_CHARS
    return len(prompt) / BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Placement:
    """Names of the two workers of a request, and the decode worker's hand-over endpoint and load at that time."""

    prefill: str
    decode: str
    decode_endpoint: str
    decode_load: DecodeLoad = UNKNOWN_LOAD


UNPLACED = Placement("", "", "")


log = logging.getLogger(__name__)

_ASK_INTERVAL_NS = 1_000_000_000


@dataclass(slots=True, eq=False, kw_only=True)
class Worker(Candidate):
    """State of a worker: its Hello and its last report."""

    hello: Hello
    reported: Report
    cached: WorkerBlocks
    asked_ns: int | None = None  # when it was asked to list its blocks

    @property
    def reported_load(self) -> int:
        return self.reported.queued + self.reported.running

    @property
    def has_free_slot(self) -> bool:
        return self.reported.free_slots > 0 and self.load < self.hello.slots

    def has_free_blocks(self, tokens: int) -> bool:
        """Whether it reported enough free KV blocks for so many tokens; true if it reports none."""
        return not self.hello.blocks or self.reported.free_blocks * self.hello.block_tokens >= tokens

    def remember(self, prefix: Sequence[int], limit: int) -> None:
        """Add a prompt's blocks and evict the least recently used beyond `limit` and beyond the worker's KV
        capacity."""
        if self.hello.blocks:
            limit = min(limit, max(1, self.hello.blocks * self.hello.block_tokens // BLOCK_TOKENS))
        self.prefixes.remember(prefix, limit)


class Router:
    """Places requests on workers.

    Every `place` is followed by at most one `prefilled` and exactly one `finished` with the same placement.
    """

    def __init__(
        self,
        *,
        max_in_flight: int,
        overlap_weight: float = 1.0,
        remembered_blocks: int = 65_536,
        in_tier: Callable[[bytes], bool] = lambda key: False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`in_tier`: whether the host tier, which the workers share, has a KV block."""
        self.max_in_flight = max_in_flight
        self.in_flight = 0
        self.choice = Choice(overlap_weight)
        self.prefixes = PrefixKeys()
        self._in_tier = Memo(in_tier)  # of one placement: workers are asked for the same blocks, and each is a file
        self._remembered_blocks = remembered_blocks
        self._clock = clock
        self._workers: dict[str, Worker] = {}

    def add(self, hello: Hello) -> None:
        """Add a ready worker. It replaces one of the same name: it is a new process with an empty cache."""
        idle = Report(hello.worker, hello.epoch, 0, 0, 0, hello.slots, free_blocks=hello.blocks)
        cached = WorkerBlocks(self.prefixes, hello.blocks, self._in_tier.__getitem__)
        self._workers[hello.worker] = Worker(hello=hello, reported=idle, cached=cached)

    def remove(self, name: str) -> None:
        """Remove a lost worker; unknown names are ignored."""
        self._workers.pop(name, None)

    def report(self, report: Report) -> None:
        """Store a worker's load report; unknown names are ignored."""
        worker = self._workers.get(report.worker)
        if worker is not None:
            worker.reported = report
            worker.cached.load_saves = min(1.0, max(0.0, report.load_saves))  # 0 for NaN
            worker.cached.expect(report.cached_batch)

    def cached(self, batch: Cached) -> None:
        """Apply what a worker says of its KV blocks; unknown names and epochs are ignored."""
        worker = self._workers.get(batch.worker)
        if worker is not None and worker.hello.epoch == batch.epoch:
            worker.cached.apply(batch)

    def should_list(self, name: str) -> bool:
        """Return whether to ask a worker for all its blocks, as a batch is missing: once a second at most."""
        worker, now_ns = self._workers.get(name), self._clock()
        if worker is None or not worker.cached.incomplete or not worker.reported.cached_batch:
            return False
        if worker.asked_ns is not None and now_ns - worker.asked_ns < _ASK_INTERVAL_NS:
            return False
        worker.asked_ns = now_ns
        log.info("%s lists its KV blocks: a batch is missing, or it was not heard from the start", name)
        return True

    def learn(self, prefix: KnownPrefix, tokens: Sequence[int], salt: bytes) -> None:
        """Remember which KV blocks a computed prompt's known prefix has; `tokens` are the prefix's."""
        hello = next((worker.hello for worker in self._workers.values() if worker.hello.block_tokens), None)
        if hello is not None and len(self._workers) > len(get_args(Role)):  # else there is no choice
            root = chain_root(hello.model, salt)
            self.prefixes.learn(prefix.blocks, prefix.length, tokens, hello.block_tokens, root)

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
        self._in_tier.clear()
        choice, likely = self.choice, min(expected or tokens, tokens)
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
        for worker in (prefill, decode):
            worker.remember(prefix, self._remembered_blocks)
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
