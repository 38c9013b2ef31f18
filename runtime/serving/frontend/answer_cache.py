"""Answers to prompts like ones that were answered before, given without running the model. Off unless configured.

A prompt is looked up by the embedding of its question: the last user turn, or a completion's text. Everything else
must be equal (`Asked.key`): who asks, model, the turns before, the numbers in the question, sampling, retrieval. What
remains is a scan of the few entries with the same key, exact and in this process: an index of the pool cannot take new
entries, and for a bounded cache a scan takes microseconds where the embedding takes milliseconds.

Entries live for `ttl_s`, and the oldest goes when there are too many. The cache ends with its process.
"""

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from runtime.node.config import AnswerCacheSection
from runtime.retrieval.embedding.embedder import Embedder
from runtime.serving.frontend.requests import Piece
from runtime.serving.messages import Message, Retrieval, Retrieved, Sampling, Tokens

MOST_CHARS = 800  # of a question: an embedder does not see what comes later in a long one
_ANSWER_BYTES = 64 << 10

Vector = npt.NDArray[np.float32]
Event = Literal["hit", "miss", "stored", "expired", "evicted"]
Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as the cache sees it: `question` may be like another's, `key` must be equal."""

    question: str
    key: Key

    @classmethod
    def of(
        cls,
        tenant: str,
        model: str,
        prompt: str | tuple[int, ...] | tuple[Message, ...],
        sampling: Sampling,
        retrieval: Retrieval | None,
        *,
        seeded: bool,
    ) -> "Asked | None":
        """None for what is not looked up: a long question, tokens, or a chat whose last turn is not the user's.

        `tenant` is the API key ("" without keys). A seed matters if the request brought it and draws at random.
        """
        if isinstance(prompt, str):
            kind, question, before = "text", prompt, ""
        else:
            *turns, last = prompt
            if not isinstance(last, Message) or last.role != "user":
                return None
            kind, question, before = "chat", last.content, repr(turns)
        if not question.strip() or len(question) > MOST_CHARS:
            return None
        seed = sampling.seed if seeded and sampling.temperature > 0 else None
        drawn = (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.stop, sampling.ignore_eos, seed)
        numbers = tuple(re.findall(r"\d+", question))  # "in 2019" and "in 2020" are alike to an embedder
        return cls(question, (_digest(tenant), model, kind, _digest(before), numbers, drawn, retrieval))


@dataclass(frozen=True, slots=True)
class Hit:
    """A stored answer: its pieces, how alike the questions are (cosine), and how old it is."""

    pieces: tuple[Piece, ...]
    similarity: float
    age_s: float


@dataclass(frozen=True, slots=True)
class _Entry:
    key: Key
    pieces: tuple[Piece, ...]
    stored_s: float


class AnswerCache:
    """The entries. `count` is told of every event; `clock` gives seconds."""

    def __init__(
        self, limits: AnswerCacheSection, count: Callable[[Event], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits, self._count, self._clock = limits, count, clock
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # in the order in which they were stored, and expire
        self._vectors: dict[Key, dict[int, Vector]] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Key, vector: Vector) -> Hit | None:
        """The answer to the most similar question with this key, if it is similar enough."""
        self._expire()
        found = self._nearest(key, vector)
        self._count("miss" if found is None else "hit")
        if found is None:
            return None
        number, similarity = found
        entry = self._entries[number]
        return Hit(entry.pieces, similarity, self._clock() - entry.stored_s)

    def store(self, key: Key, vector: Vector, pieces: Sequence[Piece]) -> None:
        """Keep an answer, unless it is too large, or one to such a question was stored meanwhile."""
        self._expire()
        if _size(pieces) > _ANSWER_BYTES or self._nearest(key, vector) is not None:
            return
        while len(self._entries) >= self._limits.entries:
            self._remove(next(iter(self._entries)), "evicted")
        self._last += 1
        self._entries[self._last] = _Entry(key, tuple(pieces), self._clock())
        self._vectors.setdefault(key, {})[self._last] = _unit(vector)
        self._count("stored")

    def _nearest(self, key: Key, vector: Vector) -> tuple[int, float] | None:
        candidates = self._vectors.get(key)
        if not candidates:
            return None
        similarities = np.stack(list(candidates.values())) @ _unit(vector)
        best = int(similarities.argmax())
        similarity = float(similarities[best])
        return (list(candidates)[best], min(similarity, 1.0)) if similarity >= self._limits.threshold else None

    def _expire(self) -> None:
        while self._entries:
            number, entry = next(iter(self._entries.items()))
            if self._clock() - entry.stored_s < self._limits.ttl_s:
                return
            self._remove(number, "expired")

    def _remove(self, number: int, event: Event) -> None:
        entry = self._entries.pop(number)
        del self._vectors[entry.key][number]
        if not self._vectors[entry.key]:
            del self._vectors[entry.key]
        self._count(event)


class PromptAnswers:
    """The cache with its embedder, which runs in a thread of its own so that the event loop goes on."""

    def __init__(self, cache: AnswerCache, embedder: Embedder) -> None:
        self._cache, self._embedder = cache, embedder
        self._embedding = ThreadPoolExecutor(1, thread_name_prefix="embed-prompt")

    async def find(self, asked: Asked) -> tuple[Vector, Hit | None]:
        """The question's vector, and the answer if there is one."""
        loop = asyncio.get_running_loop()
        vector = (await loop.run_in_executor(self._embedding, self._embedder.embed, [asked.question]))[0]
        return vector, self._cache.find(asked.key, vector)

    def store(self, asked: Asked, vector: Vector, pieces: Sequence[Piece]) -> None:
        """Keep a whole answer."""
        self._cache.store(asked.key, vector, pieces)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def _unit(vector: Vector) -> Vector:
    return np.asarray(vector / max(float(np.linalg.norm(vector)), 1e-30), np.float32)


def _size(pieces: Sequence[Piece]) -> int:
    """About the bytes that an answer holds."""
    size = 0
    for piece in pieces:
        if isinstance(piece, Tokens):
            size += len(piece.text) + 8 * (len(piece.token_ids) + len(piece.prompt_token_ids))
        elif isinstance(piece, Retrieved):
            size += sum(len(passage.text) + len(passage.title) + 64 for passage in piece.passages)
    return size
