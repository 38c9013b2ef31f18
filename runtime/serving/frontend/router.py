"""Prefix-aware routing: chooses the prefill and the decode worker of a request. No sockets, an injected clock.

- **Prefill**: the worker with the lowest cost. The cost is the number of requests waiting or running, less the prefix
  overlap (the share of the prompt's leading blocks that the worker has lately received), plus one for a worker without
  enough free KV blocks. A full overlap offsets one queued request, so a hot prefix cannot starve the other workers.
- **Decode**: workers with a free slot and enough free KV blocks before those without, then the smallest share of slots
  in use; a full overlap offsets one slot.
- `overlap_weight` scales the overlap, 1 by default; with 0 only the load counts.
- Ties go to the least recently chosen worker, so a new worker receives a request at once.

The router tracks the prefixes that it has sent to each worker. It considers a prefix evicted once the worker reports
that it has evicted cached blocks of a later request (LRU).

Reports lag by up to 250 ms, so the load of a worker is the maximum of its report and the requests assigned here.
Draining workers receive no new requests; the number of requests in flight is bounded.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import get_args

from runtime.errors import ContextLengthExceeded, Overloaded, Unavailable
from runtime.serving.messages import UNKNOWN_LOAD, DecodeLoad, Generation, Hello, Message, Report, Role
from runtime.serving.model.text import last_question_index

# ---- prefix hashes, to find the worker or server with cached KV of a prompt


BLOCK_CHARS = 128
BLOCK_TOKENS = 32
PREFIX_BLOCKS = 32  # of one prompt; later blocks do not affect routing


def prefix_blocks(
    prompt: str | Sequence[int] | Sequence[Message], most: int = PREFIX_BLOCKS, salt: bytes = b""
) -> tuple[int, ...]:
    """Return chained hashes of the prompt's leading whole blocks: equal hashes mean equal prefixes.

    Blocks are 128 characters of text (a chat's turns joined) or 32 token ids; at most `most` blocks. Only
    prompts with the same `salt` share any. The hashes of text hold within one process only.
    """
    content: str | Sequence[int]
    if isinstance(prompt, str):
        content, block = prompt, BLOCK_CHARS
    elif prompt and isinstance(prompt[0], Message):
        turns = (f"{turn.role}\0{turn.content}\0" for turn in prompt if isinstance(turn, Message))
        content, block = "".join(turns), BLOCK_CHARS
    else:
        content, block = tuple(token for token in prompt if isinstance(token, int)), BLOCK_TOKENS
    hashes: list[int] = []
    chain = hash((block, salt))
    for end in range(block, min(len(content), most * block) + 1, block):
        chain = hash((chain, content[end - block : end]))
        hashes.append(chain)
    return tuple(hashes)


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


class PrefixHistory:
    """LRU set of the prefix blocks lately sent to one worker or server."""

    def __init__(self) -> None:
        self._sent_ns: OrderedDict[int, int] = OrderedDict()  # block → ns when last sent, LRU first

    def __len__(self) -> int:
        return len(self._sent_ns)

    def seen(self, prefix: Sequence[int], since_ns: int = 0) -> int:
        """Return how many leading blocks of `prefix` were sent since then; hashes are chained, so a miss ends the
        match."""
        count = 0
        for block in prefix:
            if self._sent_ns.get(block, -1) < since_ns:
                break
            count += 1
        return count

    def remember(self, prefix: Sequence[int], limit: int, now_ns: int) -> None:
        """Add a prompt's blocks and evict the least recently used beyond `limit`."""
        for block in reversed(prefix):  # the first block last: a chain is evicted from its end
            self._sent_ns[block] = now_ns
            self._sent_ns.move_to_end(block)
        while len(self._sent_ns) > limit:
            self._sent_ns.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Placement:
    """Names of the two workers of a request, and the decode worker's hand-over endpoint and load at that time."""

    prefill: str
    decode: str
    decode_endpoint: str
    decode_load: DecodeLoad = UNKNOWN_LOAD


UNPLACED = Placement("", "", "")


@dataclass(slots=True)
class Worker:
    """State of a worker: its Hello, its last report, its assigned requests and prefixes."""

    hello: Hello
    reported: Report
    assigned: int = 0
    last_chosen: int = 0  # sequence number of the choice
    prefixes: PrefixHistory = field(default_factory=PrefixHistory)

    @property
    def load(self) -> int:
        """Number of requests on the worker or on their way to it."""
        return max(self.reported.queued + self.reported.running, self.assigned)

    @property
    def has_free_slot(self) -> bool:
        return self.reported.free_slots > 0 and self.load < self.hello.slots

    def has_free_blocks(self, tokens: int) -> bool:
        """Whether it reported enough free KV blocks for so many tokens; true if it reports none."""
        return not self.hello.blocks or self.reported.free_blocks * self.hello.block_tokens >= tokens

    def overlap(self, prefix: Sequence[int], blocks: int = 0) -> float:
        """Return the share of a prompt that the worker has lately received, 0..1.

        The prompt has max(`blocks`, len(`prefix`)) blocks, of which `prefix` are known.
        """
        return self.prefixes.seen(prefix, self.reported.evicted_ns) / max(blocks, len(prefix)) if prefix else 0.0

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
        self._overlap_weight = overlap_weight
        self._remembered_blocks = remembered_blocks
        self._choices = 0
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

    def place(self, prefix: Sequence[int], tokens: int = 0, avoid: str = "", blocks: int = 0) -> Placement:
        """Choose both workers for a prompt with these prefix blocks that needs at least `tokens` of context.

        `blocks`: the prompt's number of blocks, if not all are known. `avoid` is chosen only if there is no other
        worker. Raises Overloaded (too many in flight), Unavailable (a role has no worker) or ContextLengthExceeded.
        """
        if self.in_flight >= self.max_in_flight:
            raise Overloaded(
                f"{self.in_flight} requests are in flight, the limit is {self.max_in_flight}; try again later"
            )
        prefill = self._pick(
            self._fitting("prefill", tokens),
            lambda worker: (
                worker.hello.worker == avoid,
                self._cost(worker, prefix, blocks) + (not worker.has_free_blocks(tokens)),
            ),
        )
        decode = self._pick(
            self._fitting("decode", tokens),
            lambda worker: (
                worker.hello.worker == avoid,
                not (worker.has_free_slot and worker.has_free_blocks(tokens)),
                self._cost(worker, prefix, blocks) / worker.hello.slots,
            ),
        )
        load = DecodeLoad(decode.load, decode.hello.slots, decode.reported.step_ns)
        now_ns = self._clock()
        for worker in (prefill, decode):
            worker.remember(prefix, self._remembered_blocks, now_ns)
        prefill.assigned += 1
        decode.assigned += 1
        self.in_flight += 1
        return Placement(prefill.hello.worker, decode.hello.worker, decode.hello.endpoint, load)

    def _cost(self, worker: Worker, prefix: Sequence[int], blocks: int) -> float:
        return worker.load - self._overlap_weight * worker.overlap(prefix, blocks)

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

    def _pick(self, workers: Iterable[Worker], cost: Callable[[Worker], tuple[float, ...]]) -> Worker:
        chosen = min(workers, key=lambda worker: (*cost(worker), worker.last_chosen))
        self._choices += 1
        chosen.last_chosen = self._choices
        return chosen
