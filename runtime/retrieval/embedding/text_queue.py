"""Texts that wait to be embedded: whose turn it is, and how long the wait would be.

Keys take turns: the one goes first whose texts have used least time. Within a key the parts share in the same way, but
a part's time counts by its weight, so prefill goes before decode and both before bulk (documents, `/v1/embeddings`),
none of which starves. Within a part the texts that are due first go first: queries by deadline, texts of a long list by
when they could have been embedded if their list were alone, so that a short list does not wait for the end of a long
one. Beside the first text of a batch go those of nearest length, which costs least padding: of the texts that are due
first, so that each is overtaken a bounded number of times. Of those whose tokens are known, a batch is one forward
pass: a text that would need another one, or padding that costs more than that, waits for a batch of its length.
"""

import itertools
import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from runtime.retrieval.embedding.embedder import Embedder, TextKind, Tokenizing, Vectors
from runtime.retrieval.fair_queue import FairQueue

Part = Literal["prefill", "decode", "bulk"]
WEIGHTS: dict[Part, float] = {"prefill": 1.0, "decode": 8.0, "bulk": 8.0}
"""What a second of a part counts: where all wait in one queue, prefill gets eight times the time of each other part."""
_TEXT_COST = 32  # characters, of each text besides its own: its share of a forward pass, which costs 10 to 15 tokens
_LONGEST = 2048  # characters that count of one text: models truncate longer ones
_NEWEST = 0.1  # weight of the newest measurement
_WINDOW = 64  # texts of a key and part among which one of similar length is chosen
_TOKEN = 4  # characters, of texts whose tokens are not known


@dataclass(eq=False, slots=True)
class Texts:
    """Texts of one caller, or of several that asked for the same one, which are embedded in any number of batches.

    `futures`: of the callers; it is dropped when all are cancelled. `key`: in the cache; None: not cached. `counted`:
    whether its tokens are. The rest is the stage's.
    """

    embedder: Embedder
    texts: list[str]
    kind: TextKind
    flow: int
    part: Part
    deadline_ns: int
    submitted_ns: int
    futures: list[Future[Any]]
    key: tuple[str, str] | None = None
    counted: bool = False
    vectors: Vectors = field(init=False)
    missing: int = field(init=False)
    tokens: int = 0
    begin_ns: int = -1  # not yet
    ended: bool = False

    def __post_init__(self) -> None:
        self.missing = len(self.texts)
        self.vectors = np.empty((self.missing, self.embedder.dim), np.float32)

    @property
    def wanted(self) -> bool:
        """Whether a caller still waits."""
        return not self.ended and not all(future.cancelled() for future in self.futures)


@dataclass(eq=False, slots=True)
class Waiting:
    """One text of `texts`. `length`: tokens, estimated until `set_tokens`. `overtaken`: how many went before it that
    were due later."""

    texts: Texts
    number: int
    size: int
    length: float
    overtaken: int = 0
    tokens: list[int] | None = None
    tokenizing: Tokenizing | None = None

    def set_tokens(self, tokens: list[int], tokenizing: Tokenizing) -> None:
        """Record its tokens, and who embeds them."""
        self.tokens, self.tokenizing, self.length = tokens, tokenizing, len(tokens)

    @property
    def text(self) -> str:
        return self.texts.texts[self.number]

    def goes_with(self, other: "Waiting") -> bool:
        """Whether both can be embedded in one call."""
        return self.texts.embedder is other.texts.embedder and self.texts.kind == other.texts.kind

    def fits(self, taken: Sequence["Waiting"]) -> bool:
        """Whether it can be embedded in one forward pass with others without much padding, as far as is known."""
        if self.tokenizing is None:
            return True
        lengths = [self.length, *(waiting.length for waiting in taken)]
        padded = max(lengths) * len(lengths)
        padding = padded - sum(lengths)
        return padding <= self.tokenizing.pass_tokens and padded <= self.tokenizing.batch_tokens


class TextQueue:
    """Waiting texts. Not thread-safe. `ns_per_size`: measured time of a unit of size on one thread, 0: not known."""

    def __init__(self) -> None:
        self._keys: FairQueue[int, None] = FairQueue()
        self._parts: dict[int, FairQueue[Part, None]] = {}
        self._due: dict[tuple[int, Part], list[tuple[int, int, Waiting]]] = {}  # sorted by when, then by arrival
        self._sizes: Counter[tuple[int, Part]] = Counter()
        self._new: deque[Waiting] = deque()
        self._order = itertools.count()
        self.ns_per_size = 0.0

    def __len__(self) -> int:
        return len(self._keys)

    def push(self, texts: Texts) -> None:
        """Append all of its texts, the short ones first: those of a batch then have similar lengths."""
        flow, part, due = texts.flow, texts.part, texts.deadline_ns or texts.submitted_ns
        parts = self._parts.setdefault(flow, FairQueue())
        line = self._due.setdefault((flow, part), [])
        sizes = [size_of(text) for text in texts.texts]
        for number in sorted(range(len(sizes)), key=sizes.__getitem__):
            size = sizes[number]
            waiting = Waiting(texts, number, size, (size - _TEXT_COST) / _TOKEN)
            self._new.append(waiting)
            insort(line, (due, next(self._order), waiting))
            due += int(self.ns_of([size])) + 1
            self._sizes[flow, part] += size
            parts.push(part, None)
            self._keys.push(flow, None)

    def take_new(self, most: int, characters: int) -> list[Waiting]:
        """Return texts that were pushed and not returned here before, in order, of about so many characters: their
        tokens are not known yet."""
        new: list[Waiting] = []
        while self._new and len(new) < most and characters > 0:
            new.append(self._new.popleft())
            characters -= len(new[-1].text)
        return new

    def pop(self, taken: Sequence[Waiting] = (), characters: int = 0) -> Waiting | None:
        """Remove the text whose turn it is; beside others, one of the first one's length of the same key and part.
        Return None if there is none, or if it cannot be embedded with them: it is of another embedder or kind, has more
        than `characters`, or would need a forward pass of its own."""
        flow = self._keys.turn()
        if flow is None:
            return None
        parts = self._parts[flow]
        part = parts.turn()
        assert part is not None, "each text is in both queues"
        line = self._due[flow, part]
        position = _nearest(line, taken, characters) if taken else 0
        if position is None:
            return None
        waiting = line.pop(position)[2]
        if position:
            line[0][2].overtaken += 1
        self._keys.pop()
        parts.pop()
        self._sizes[flow, part] -= waiting.size
        if not len(parts):
            del self._parts[flow]
        if not line:
            del self._due[flow, part], self._sizes[flow, part]
        return waiting

    def begun(self, waiting: Waiting) -> None:
        """Charge what a text is expected to take, so that the next of a batch may be another key's."""
        self._charge(waiting, waiting.size * max(self.ns_per_size, 1.0))

    def measured(self, taken: list[Waiting], took_ns: int) -> None:
        """Record what a batch took; it is charged in place of what was expected."""
        size = sum(waiting.size for waiting in taken)
        expected, now = max(self.ns_per_size, 1.0), took_ns / size
        self.ns_per_size = now if self.ns_per_size == 0.0 else (1 - _NEWEST) * self.ns_per_size + _NEWEST * now
        for waiting in taken:
            self._charge(waiting, waiting.size * (now - expected))

    def ns_of(self, sizes: Iterable[int]) -> float:
        """Return the time that texts of these sizes are expected to take on one thread; 0 while that is not known."""
        return sum(sizes) * self.ns_per_size

    @property
    def size(self) -> int:
        """Sum over what waits."""
        return self._sizes.total()

    def wait_ns(self, flow: int, part: Part, size: int, threads: int) -> float:
        """Return when texts of this size would be embedded if they came now, from now on; 0 while that is not known."""
        own = size + self._sizes[flow, part]
        by_key: Counter[int] = Counter()
        for (other, its), waiting in self._sizes.items():
            if other != flow:
                by_key[other] += waiting
            elif its != part:
                own += min(waiting, int(own * WEIGHTS[part] / WEIGHTS[its]))
        return (own + sum(min(waiting, own) for waiting in by_key.values())) * self.ns_per_size / threads

    def _charge(self, waiting: Waiting, ns: float) -> None:
        texts = waiting.texts
        self._keys.charge(texts.flow, ns)
        if texts.flow in self._parts:
            self._parts[texts.flow].charge(texts.part, ns * WEIGHTS[texts.part])


def _nearest(line: list[tuple[int, int, Waiting]], taken: Sequence[Waiting], characters: int) -> int | None:
    """Return the place of the text that costs least padding beside others; None if it cannot be embedded with them."""
    best, nearest, beside = None, math.inf, taken[0]
    for position in range(1 if line[0][2].overtaken >= _WINDOW else min(len(line), _WINDOW)):
        waiting = line[position][2]
        difference = abs(waiting.length - beside.length)
        if difference < nearest and waiting.goes_with(beside) and len(waiting.text) <= characters:
            best, nearest = position, difference
            if difference < 1:
                break
    return best if best is not None and line[best][2].fits(taken) else None


def size_of(text: str) -> int:
    """Return what a text counts: its characters, bounded, and what each text costs besides."""
    return min(len(text), _LONGEST) + _TEXT_COST
