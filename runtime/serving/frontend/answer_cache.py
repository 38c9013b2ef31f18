"""Semantic cache of answers: a prompt similar to an earlier one is answered without running the model. Off by default.

The lookup compares the embedding of the question: the last user turn, or a completion's text. Everything else must be
equal (`CacheKey.digest`): API key, model, earlier turns, numbers in the question, sampling, retrieval. The answers are
a collection of the pools (`runtime.retrieval.answer_store`), which outlives the frontend's process.

A failed lookup is a miss and a failed write is dropped: no request fails because of the cache or waits for a write.
"""

import asyncio
import hashlib
import re
import time
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.errors import TrinityError
from runtime.node.placement.plan import ANSWERS
from runtime.retrieval.answer_store import AnswerStore, NewAnswer
from runtime.retrieval.embedding.embedder import Embedder
from runtime.retrieval.search.query import SearchResult
from runtime.serving.frontend.requests import Piece, Relayed
from runtime.serving.messages import Message, Retrieval, Retrieved, Sampling, Tokens

MAX_QUESTION_CHARS = 800  # embedders truncate longer texts
_MAX_ANSWER_BYTES = 64 << 10
_MAX_QUEUED = 64  # answers to be stored; further ones are dropped
_LOOKUP_TIMEOUT_S = 0.25
_MAINTENANCE_INTERVAL_S = 1.0
_RESET_INTERVAL_S = 60.0  # between resets of a collection that no pool can serve

Vector = npt.NDArray[np.float32]
_decoder = msgspec.json.Decoder(tuple[Retrieved | Tokens | Relayed, ...])


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Cache key of a prompt: `question` is matched by similarity, `digest` (of everything else) exactly."""

    question: str
    digest: str

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
    ) -> "CacheKey | None":
        """Return the key, or None for prompts without lookup: long questions, token ids, chats ending with another
        role.

        `tenant` is the API key ("" without keys). A seed counts if the client sent it and the temperature is not 0.
        """
        if isinstance(prompt, str):
            kind, question, before = "text", prompt, ""
        else:
            *turns, last = prompt
            if not isinstance(last, Message) or last.role != "user":
                return None
            kind, question, before = "chat", last.content, repr(turns)
        if not question.strip() or len(question) > MAX_QUESTION_CHARS:
            return None
        seed = sampling.seed if seeded and sampling.temperature > 0 else None
        parameters = (
            sampling.max_tokens,
            sampling.temperature,
            sampling.top_p,
            sampling.stop,
            sampling.ignore_eos,
            seed,
        )
        numbers = tuple(re.findall(r"\d+", question))  # embedders hardly distinguish "in 2019" from "in 2020"
        return cls(question, _digest((tenant, model, kind, before, numbers, parameters, retrieval)))


@dataclass(frozen=True, slots=True)
class CacheHit:
    """A stored answer: its pieces, the cosine similarity of the questions, and its age."""

    pieces: tuple[Piece, ...]
    similarity: float
    age_s: float


class VectorSearch(Protocol):
    """Searches the collection; implemented by `AsyncSearchClient`."""

    def search(
        self, vector: Vector, k: int, *, collection: str, filter: Mapping[str, Any], deadline_ms: float
    ) -> Awaitable[SearchResult]: ...

    @property
    def unavailable(self) -> Mapping[str, str]:
        """The collections that no pool can serve → reason."""


class AnswerCache:
    """Looks up and stores answers. Embedding and writing run in one thread each, so they do not block the event
    loop."""

    def __init__(self, store: AnswerStore, embedder: Embedder, client: VectorSearch) -> None:
        self._store, self._embedder, self._client = store, embedder, client
        self._embed_thread = ThreadPoolExecutor(1, thread_name_prefix="embed-prompt")
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="store-answer")
        self._queue: deque[tuple[CacheKey, Vector, Sequence[Piece]]] = deque()
        self._closed = False

    async def find(self, key: CacheKey) -> tuple[Vector, CacheHit | None]:
        """Return the question's vector, and the answer to the most similar question with the same digest, or None."""
        loop = asyncio.get_running_loop()
        vector = (await loop.run_in_executor(self._embed_thread, self._embedder.embed, [key.question]))[0]
        hit = await self._look_up(key.digest, vector)
        self._store.count("miss" if hit is None else "hit", 1)
        return vector, hit

    async def _look_up(self, digest: str, vector: Vector) -> CacheHit | None:
        try:
            async with asyncio.timeout(_LOOKUP_TIMEOUT_S):
                result = await self._client.search(
                    vector,
                    1,
                    collection=ANSWERS,
                    filter=self._store.filter(digest),
                    deadline_ms=_LOOKUP_TIMEOUT_S * 1e3,
                )
            answer = self._store.resolve(result)
            hit = answer and CacheHit(_decoder.decode(answer.text), answer.similarity, answer.age_s)
        except (TrinityError, TimeoutError, msgspec.MsgspecError) as error:
            self._store.log_state("found", str(error) or "the lookup timed out")
            return None
        self._store.log_state("found", "")
        return hit

    def store(self, key: CacheKey, vector: Vector, pieces: Sequence[Piece]) -> None:
        """Queue a complete answer to be stored. It is dropped if it is too large, or if the queue is full."""
        if len(self._queue) < _MAX_QUEUED and not self._closed:
            self._queue.append((key, vector, pieces))
            self._write_thread.submit(self._write)

    def _write(self) -> None:
        """Store all queued answers as one log record with one sync."""
        answers = []
        while self._queue:
            key, vector, pieces = self._queue.popleft()
            try:
                text = msgspec.json.encode(tuple(pieces)).decode()
            except ValueError:  # a lone surrogate
                continue
            if len(text) <= _MAX_ANSWER_BYTES:
                answers.append(NewAnswer(_digest((key.digest, key.question)), key.digest, vector, text))
        if answers:
            self._store.store(answers)

    async def run(self) -> None:
        """Maintain the collection until cancelled."""
        last_reset_s = -_RESET_INTERVAL_S
        while True:
            reason = self._client.unavailable.get(ANSWERS)
            if not self._closed:
                if reason and time.monotonic() >= last_reset_s + _RESET_INTERVAL_S:
                    last_reset_s = time.monotonic()
                    self._write_thread.submit(self._store.reset, reason)
                await self.maintain()
            await asyncio.sleep(_MAINTENANCE_INTERVAL_S)

    async def maintain(self) -> None:
        """Open the collection if necessary and evict answers beyond its limits."""
        await asyncio.get_running_loop().run_in_executor(self._write_thread, self._store.maintain)

    def close(self) -> None:
        """Stop storing, so that another frontend may open the collection for writing. Idempotent."""
        if not self._closed:
            self._closed = True
            self._write_thread.submit(self._store.close)
            self._write_thread.shutdown(wait=False)
            self._embed_thread.shutdown(wait=False)


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()
