"""Embedder that computes in this process: tokens, prefixes and batches by length, over an encoder for a CPU or GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from runtime.errors import ModelError
from runtime.retrieval.embedding.embedder import TextKind, Turn, Vectors, normalize, truncate_text
from runtime.retrieval.embedding.onnx_session import batches_by_length

Pooling = Literal["mean", "cls", "last"]


@dataclass(frozen=True)
class Encoding:
    """How a text's vector is computed. `pooling` None: the model's graph pools."""

    max_tokens: int
    pooling: Pooling | None
    scaled: bool
    lower_case: bool = False
    query_prefix: str = ""
    passage_prefix: str = ""


class Encoder(Protocol):
    """A model with its tokenizer on one device. `batch_tokens`: bound of a forward pass, padding included;
    `pass_tokens`: of its padding."""

    tokenizer: Any
    batch_tokens: int
    pass_tokens: int
    turn: Turn
    dim: int

    def encode(self, batch: Sequence[Sequence[int]]) -> Vectors:
        """Return pooled vectors float32 [rows, dim], not scaled, of token ids. Raises `ModelError`."""


class TextEmbedder:
    """An embedder over an encoder, whose tokenizer it sets up. Calls of `embed` may be concurrent if the encoder's
    may."""

    max_concurrency = 1

    def __init__(self, name: str, encoder: Encoder, encoding: Encoding) -> None:
        self.name, self.dim, self.turn, self.max_tokens = name, encoder.dim, encoder.turn, encoding.max_tokens
        self.batch_tokens, self.pass_tokens = encoder.batch_tokens, encoder.pass_tokens
        self._encoder, self._encoding = encoder, encoding
        self._tokenizer = encoder.tokenizer
        self._counter = type(self._tokenizer).from_str(self._tokenizer.to_str())
        self._tokenizer.enable_truncation(encoding.max_tokens)
        special = int(self._tokenizer.num_special_tokens_to_add(False))
        kinds: tuple[TextKind, ...] = ("query", "passage")
        self._added = {kind: special + self.count_tokens(self._prefix(kind)) for kind in kinds}

    def count_tokens(self, text: str) -> int:
        """See `Embedder.count_tokens`."""
        return len(self._counter.encode(truncate_text(text), add_special_tokens=False).ids)

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> Vectors:
        """See `Embedder.embed`."""
        return self.embed_tokens(self.tokenize(texts, kind))

    @property
    def tokenizing(self) -> "TextEmbedder":
        """See `Embedder.tokenizing`."""
        return self

    def tokenize(self, texts: Sequence[str], kind: TextKind = "query") -> list[list[int]]:
        """See `Tokenizing.tokenize`."""
        prepared = [self._prepared(text, kind) for text in texts]
        return [encoding.ids or [0] for encoding in self._tokenizer.encode_batch_fast(prepared)]

    def count(self, text: str, tokens: Sequence[int], kind: TextKind) -> int:
        """See `Tokenizing.count`."""
        return self.count_tokens(text) if len(tokens) >= self.max_tokens else len(tokens) - self._added[kind]

    def embed_tokens(self, tokens: Sequence[list[int]]) -> Vectors:
        """See `Tokenizing.embed_tokens`."""
        vectors = np.empty((len(tokens), self.dim), np.float32)
        lengths = [len(ids) for ids in tokens]
        for rows in batches_by_length(lengths, self.batch_tokens, self.pass_tokens):
            vectors[rows] = self._forward([tokens[row] for row in rows])
        return vectors

    def _prepared(self, text: str, kind: TextKind) -> str:
        text = self._prefix(kind) + truncate_text(text)
        return text.lower() if self._encoding.lower_case else text

    def _prefix(self, kind: TextKind) -> str:
        return self._encoding.query_prefix if kind == "query" else self._encoding.passage_prefix

    def _forward(self, batch: list[list[int]]) -> Vectors:
        vectors = self._encoder.encode(batch)
        if not np.isfinite(vectors).all():
            raise ModelError(f"the embedder {self.name} returns vectors with non-finite values")
        return normalize(vectors) if self._encoding.scaled else vectors
