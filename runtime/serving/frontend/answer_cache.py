"""Answers to prompts like ones that were answered before, given without running the model. Off unless configured.

A prompt is looked up by the embedding of its question: the last user turn, or a completion's text. Everything else
must be equal (`CacheKey.key`): who asks, model, the turns before, the numbers in the question, sampling, retrieval. The
answers are a live collection of the pools (`runtime.retrieval.answer_store`), which outlives the frontend's process.

A lookup that cannot be made is a miss, and what cannot be stored is not: no request fails by it, or waits for a write.
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

MOST_CHARS = 800  # of a question: an embedder does not see what comes later in a long one
_ANSWER_BYTES = 64 << 10
_MOST_WAITING = 64  # answers that are still to be stored; more are not
_LOOKUP_S = 0.25
_TEND_S = 1.0
_RENEW_S = 60.0  # between two times that the collection is begun anew because no pool can serve it

Vector = npt.NDArray[np.float32]
_decoder = msgspec.json.Decoder(tuple[Retrieved | Tokens | Relayed, ...])


@dataclass(frozen=True, slots=True)
class CacheKey:
    """A prompt as the cache sees it: `question` may be like another's, `key` must be equal."""

    question: str
    key: str

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
        return cls(question, _digest((tenant, model, kind, before, numbers, drawn, retrieval)))


@dataclass(frozen=True, slots=True)
class CacheHit:
    """A stored answer: its pieces, how alike the questions are (cosine), and how old it is."""

    pieces: tuple[Piece, ...]
    similarity: float
    age_s: float


class Lookup(Protocol):
    """What searches the collection: an `AsyncSearchClient`."""

    def search(
        self, vector: Vector, k: int, *, collection: str, filter: Mapping[str, Any], deadline_ms: float
    ) -> Awaitable[SearchResult]: ...

    @property
    def unavailable(self) -> Mapping[str, str]:
        """The collections that no pool can serve, and why."""


class AnswerCache:
    """Looks prompts up and keeps answers. Embedding and writing run in threads of their own: the event loop goes on."""

    def __init__(self, stored: AnswerStore, embedder: Embedder, client: Lookup) -> None:
        self._stored, self._embedder, self._client = stored, embedder, client
        self._embedding = ThreadPoolExecutor(1, thread_name_prefix="embed-prompt")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="store-answer")
        self._waiting: deque[tuple[CacheKey, Vector, Sequence[Piece]]] = deque()
        self._closed = False

    async def find(self, asked: CacheKey) -> tuple[Vector, CacheHit | None]:
        """The question's vector, and the answer to the most similar question with its key, if that is alike."""
        loop = asyncio.get_running_loop()
        vector = (await loop.run_in_executor(self._embedding, self._embedder.embed, [asked.question]))[0]
        hit = await self._look_up(asked.key, vector)
        self._stored.count("miss" if hit is None else "hit", 1)
        return vector, hit

    async def _look_up(self, key: str, vector: Vector) -> CacheHit | None:
        try:
            async with asyncio.timeout(_LOOKUP_S):
                result = await self._client.search(
                    vector, 1, collection=ANSWERS, filter=self._stored.wanted(key), deadline_ms=_LOOKUP_S * 1e3
                )
            found = self._stored.found(result)
            hit = found and CacheHit(_decoder.decode(found.text), found.similarity, found.age_s)
        except (TrinityError, TimeoutError, msgspec.MsgspecError) as error:
            self._stored.say("found", str(error) or "the pools have not answered in time")
            return None
        self._stored.say("found", "")
        return hit

    def store(self, asked: CacheKey, vector: Vector, pieces: Sequence[Piece]) -> None:
        """Keep a whole answer, in a moment; not where it is too large, too many wait, or nodes of its collection were
        missing."""
        if any(isinstance(piece, Retrieved) and piece.partial for piece in pieces):
            return
        if len(self._waiting) < _MOST_WAITING and not self._closed:
            self._waiting.append((asked, vector, pieces))
            self._writing.submit(self._write)

    def _write(self) -> None:
        """Store all that wait: they share a record, and its sync."""
        answers = []
        while self._waiting:
            asked, vector, pieces = self._waiting.popleft()
            try:
                text = msgspec.json.encode(tuple(pieces)).decode()
            except ValueError:  # a lone surrogate
                continue
            if len(text) <= _ANSWER_BYTES:
                answers.append(NewAnswer(_digest((asked.key, asked.question)), asked.key, vector, text))
        if answers:
            self._stored.keep(answers)

    async def run(self) -> None:
        """Keep the collection open and within its bounds until cancelled."""
        renewed = -_RENEW_S
        while True:
            reason = self._client.unavailable.get(ANSWERS)
            if not self._closed:
                if reason and time.monotonic() >= renewed + _RENEW_S:
                    renewed = time.monotonic()
                    self._writing.submit(self._stored.renew, reason)
                await self.tend()
            await asyncio.sleep(_TEND_S)

    async def tend(self) -> None:
        """Have the collection open and within its bounds."""
        await asyncio.get_running_loop().run_in_executor(self._writing, self._stored.tend)

    def close(self) -> None:
        """Nothing is stored from now on, so that another frontend may. Idempotent."""
        if not self._closed:
            self._closed = True
            self._writing.submit(self._stored.close)
            self._writing.shutdown(wait=False)
            self._embedding.shutdown(wait=False)


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()
