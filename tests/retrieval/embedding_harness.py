"""A stage on a clock of its own over an embedder whose batches a test holds, for tests of the embedding stage."""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from runtime.errors import (
    DeviceFailed,
    EmbedderUnreachable,
    InvalidRequest,
)
from runtime.retrieval.embedding.embedder import COMPUTED, TextKind, Turn, Vectors
from runtime.retrieval.embedding.stage import Embedded, EmbeddingStage
from runtime.retrieval.embedding.text_queue import Part
from runtime.testing.waiting import until

SOON_S = 60.0
_HELD_S = 300.0  # longer than `until` waits for another batch: it may not begin because a held one gives up
KINDS: tuple[TextKind, ...] = ("query", "passage")
PARTS: tuple[Part, ...] = ("bulk", "decode", "prefill")
COST_NS = 1_000_000  # of each text of a few characters


class Embedder:
    """Embeds a text as its length while `gate` is open, which takes `COST_NS` each; some texts fail."""

    name, dim, max_tokens = "lengths", 1, 1000
    tokenizing: "Words | None" = None

    def __init__(self, harness: Any, max_concurrency: int = 1, turn: Turn = COMPUTED) -> None:
        """`harness`: whose `now` it advances."""
        self.max_concurrency, self.turn, self._harness = max_concurrency, turn, harness
        self.gate = threading.Event()
        self.batches: list[list[str]] = []
        self.niceness: list[int] = []  # of the threads

    def count_tokens(self, text: str) -> int:
        if text == "bad":
            raise InvalidRequest("a bad text")
        return len(text)

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> Vectors:
        self.niceness.append(os.getpriority(os.PRIO_PROCESS, 0))
        self.batches.append(list(texts))
        assert self.gate.wait(_HELD_S)
        self._harness.now += sum(COST_NS * (1 + len(text) // 100) for text in texts)
        if "bad" in texts:
            raise InvalidRequest("a bad text")
        if "broken" in texts:
            raise RuntimeError("a broken library")
        if "lost" in texts:
            raise DeviceFailed("an illegal memory access")
        if "gone" in texts:
            raise EmbedderUnreachable("it does not answer")
        return np.array([[len(text)] for text in texts], np.float32)


class Words:
    """Tokens of the embedder: of each word its length. A forward pass has up to 12, of which two are padding."""

    batch_tokens, pass_tokens = 12, 2

    def __init__(self, embedder: Embedder) -> None:
        self.embedder, self.tokenized = embedder, 0

    def tokenize(self, texts: Sequence[str], kind: TextKind = "query") -> list[list[int]]:
        if "bad" in texts:
            raise InvalidRequest("a bad text")
        self.tokenized += len(texts)
        return [[len(word) for word in text.split()] for text in texts]

    def count(self, text: str, tokens: Sequence[int], kind: TextKind) -> int:
        return len(tokens)

    def embed_tokens(self, tokens: Sequence[list[int]]) -> Vectors:
        return self.embedder.embed([" ".join("w" * length for length in each) for each in tokens])


class Harness:
    """A stage on a clock of its own. The first text holds the thread of texts of `part`, so that others of that part
    wait together."""

    def __init__(self, threads: int = 1, part: Part = "prefill", **options: Any) -> None:
        self.now, self.part = 0, part
        self.stage = EmbeddingStage(threads, clock=lambda: self.now, **options)
        self.embedder = Embedder(self)
        self.held = [self.hold(f"first {number}") for number in range(threads)]

    def hold(self, text: str, part: Part | None = None) -> Future[Embedded]:
        begun = len(self.embedder.batches)
        held = self.ask(text, flow=99, part=part)
        until(lambda: len(self.embedder.batches) > begun)
        return held

    def ask(self, *texts: str, kind: TextKind = "query", part: Part | None = None, **options: Any) -> Future[Embedded]:
        return self.stage.submit(self.embedder, texts, kind, part=part or self.part, **options)

    def open(self) -> None:
        self.embedder.gate.set()

    def after(self, *asked: Future[Embedded]) -> list[list[str]]:
        """Open the gate and wait; return the batches after those that held the threads."""
        self.open()
        for one in asked:
            one.exception(SOON_S)
        return self.embedder.batches[len(self.held) :]


def value(asked: Future[Embedded]) -> float:
    return float(asked.result(SOON_S).vectors[0, 0])
