"""Which prefill worker and which decode worker take a request. Pure code: no sockets, an injected clock.

- **Prefill**: the fewest requests waiting or running, less the share of the prompt's leading blocks that the worker has
  lately seen, one more for a worker without enough free KV blocks. A full overlap is worth one request of queue, no
  more: a hot prefix cannot starve the other workers.
- **Decode**: a worker with a free slot and enough free KV blocks before one without, then the smallest share of slots
  in use; a full overlap is worth one slot.
- `overlap_weight` is what a full overlap is worth, if not one; with 0 load alone decides.
- Among equals the one that was chosen longest ago: a worker that is new has its first request at once.

What a worker has seen is known from what this router gave it, and forgotten once the worker reports that it has given
up cached blocks of a later request: the longest unused go first.

Reports lag behind by up to 250 ms, so a worker's load is the larger of what it reports and what this router
has given it. Draining workers get nothing new; the number of requests in flight is bounded.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import get_args

from runtime.errors import ContextLengthExceeded, Overloaded, Unavailable
from runtime.serving.messages import UNKNOWN_LOAD, DecodeLoad, Generation, Hello, Message, Report, Role
from runtime.serving.model.text import last_question_index

# ---- prefixes of prompts, by which requests find the worker or the server that has their KV already


BLOCK_CHARS = 128
BLOCK_TOKENS = 32
PREFIX_BLOCKS = 32  # of one prompt; what lies behind them does not choose the worker


def prefix_blocks(
    prompt: str | Sequence[int] | Sequence[Message], most: int = PREFIX_BLOCKS, salt: bytes = b""
) -> tuple[int, ...]:
    """Hashes of the prompt's leading whole blocks, each over all before it: equal hashes mean equal prefixes.

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


def known_prefix(asked: Generation) -> tuple[tuple[int, ...], int]:
    """The prefix blocks of a prompt that are known before its passages are, and how many blocks it has without these.

    Passages stand behind the text of a chat's system message, before the text of its last question, or before a raw
    prompt (`model/text.py`): what follows them is no prefix that two prompts share.
    """
    if asked.retrieval is None:
        prefix = prefix_blocks(asked.messages or asked.prompt, salt=asked.salt)
        return prefix, len(prefix)
    before: Sequence[Message] = [turn for turn in asked.messages[:1] if turn.role == "system"]
    if asked.retrieval.place == "question":
        before = asked.messages[: max(last_question_index([turn.role for turn in asked.messages]), 0)]
    if asked.messages:
        whole = sum(len(turn.content) for turn in asked.messages) // BLOCK_CHARS
    else:
        whole = len(asked.prompt) // (BLOCK_CHARS if isinstance(asked.prompt, str) else BLOCK_TOKENS)
    return prefix_blocks(before, salt=asked.salt), whole


class Prefixes:
    """The blocks that somebody was given lately."""

    def __init__(self) -> None:
        self._given: OrderedDict[int, int] = OrderedDict()  # block → when it was last given, the longest unused first

    def __len__(self) -> int:
        return len(self._given)

    def seen(self, prefix: Sequence[int], since_ns: int = 0) -> int:
        """How many leading blocks of `prefix` were given since then (prefixes are chains: the first miss ends it)."""
        count = 0
        for block in prefix:
            if self._given.get(block, -1) < since_ns:
                break
            count += 1
        return count

    def remember(self, prefix: Sequence[int], limit: int, now_ns: int) -> None:
        """Note a prompt's blocks, forgetting the longest unused beyond `limit`."""
        for block in reversed(prefix):  # the first block last: a chain is forgotten from its far end
            self._given[block] = now_ns
            self._given.move_to_end(block)
        while len(self._given) > limit:
            self._given.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Placement:
    """The two workers of one request, by name, where the decode worker takes the hand-over, and its load then."""

    prefill: str
    decode: str
    decode_endpoint: str
    decode_load: DecodeLoad = UNKNOWN_LOAD


UNPLACED = Placement("", "", "")


@dataclass(slots=True)
class Worker:
    """A worker as the router sees it: what it said of itself, what it last reported, what it was given."""

    hello: Hello
    reported: Report
    assigned: int = 0
    turn: int = 0  # the router's choices until it was chosen last
    prefixes: Prefixes = field(default_factory=Prefixes)

    @property
    def load(self) -> int:
        """Requests that it has, or soon will have."""
        return max(self.reported.queued + self.reported.running, self.assigned)

    @property
    def has_free_slot(self) -> bool:
        return self.reported.free_slots > 0 and self.load < self.hello.slots

    def has_free_blocks(self, tokens: int) -> bool:
        """Whether its last report had KV blocks for so many tokens (a worker that does not tell has)."""
        return not self.hello.blocks or self.reported.free_blocks * self.hello.block_tokens >= tokens

    def overlap(self, prefix: Sequence[int], blocks: int = 0) -> float:
        """The share of a prompt that the worker has lately seen, 0..1 (prefixes are chains: the first miss ends it).

        The prompt has `blocks` blocks, of which `prefix` are known; at least these."""
        return self.prefixes.seen(prefix, self.reported.evicted_ns) / max(blocks, len(prefix)) if prefix else 0.0

    def remember(self, prefix: Sequence[int], limit: int, now_ns: int) -> None:
        """Note a prompt's blocks, forgetting the longest unused beyond `limit`, and beyond what its KV blocks hold."""
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
        """A worker is ready. One of the same name is replaced: it is a new process that holds nothing."""
        idle = Report(hello.worker, hello.epoch, 0, 0, 0, hello.slots, free_blocks=hello.blocks)
        self._workers[hello.worker] = Worker(hello, idle)

    def remove(self, name: str) -> None:
        """A worker is gone; unknown names are ignored."""
        self._workers.pop(name, None)

    def report(self, report: Report) -> None:
        """Take a worker's load; unknown names are ignored."""
        worker = self._workers.get(report.worker)
        if worker is not None:
            worker.reported = report

    def assigned(self, name: str) -> int:
        """Requests placed on a worker that have not left it, on their way to it included."""
        worker = self._workers.get(name)
        return worker.assigned if worker is not None else 0

    def workers(self) -> list[Worker]:
        """All workers known, draining ones included, in the order in which they came."""
        return list(self._workers.values())

    def missing(self) -> list[Role]:
        """The roles for which no worker takes requests; empty when the node is ready."""
        return [role for role in get_args(Role) if not self._ready(role)]

    def place(self, prefix: Sequence[int], tokens: int = 0, avoid: str = "", blocks: int = 0) -> Placement:
        """Choose both workers for a prompt of these prefix blocks that needs at least `tokens` of context. It has
        `blocks` blocks, if not all of them are known.

        The worker `avoid` is taken only if there is no other. Raises Overloaded (too many in flight), Unavailable (a
        role has no worker) or ContextLengthExceeded.
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
        """The request has left its prefill worker."""
        self._unassign(placement.prefill)

    def finished(self, placement: Placement, *, prefilled: bool) -> None:
        """The request has ended; `prefilled` tells whether `prefilled` was called for it."""
        self.in_flight -= 1
        self._unassign(placement.decode)
        if not prefilled:
            self._unassign(placement.prefill)

    def _unassign(self, name: str) -> None:
        worker = self._workers.get(name)
        if worker is not None and worker.assigned:  # a worker that was replaced meanwhile starts from nothing
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
        chosen = min(workers, key=lambda worker: (*cost(worker), worker.turn))
        self._choices += 1
        chosen.turn = self._choices
        return chosen
