"""Files of a BERT encoder for a GPU, beside those of its ONNX form: `config.json` and `model.safetensors`.

Read without torch, so that a configuration can be checked.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from runtime.errors import ModelError
from runtime.files import read_regular
from runtime.packages import require_packages, torch_cuda

WEIGHTS, SETTINGS = "model.safetensors", "config.json"
BATCH_TOKENS = 8192
"""Tokens of a forward pass on a GPU, padding included."""
_ROBERTA = ("roberta", "xlm-roberta")
ARCHITECTURES = ("bert", *_ROBERTA)
"""Values of `model_type` that are supported."""
ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
"""Supported values of `hidden_act`, with the approximation of each."""
_MAX_JSON_BYTES = 4 << 20
_LARGEST = {"num_hidden_layers": 256, "hidden_size": 1 << 14, "intermediate_size": 1 << 17, "num_attention_heads": 256}


@dataclass(frozen=True)
class BertFiles:
    """A model's settings. `first_position`: the position of a text's first token; `whose`: for errors."""

    directory: Path
    whose: str
    layers: int
    heads: int
    hidden: int
    inner: int
    eps: float
    activation: str
    first_position: int

    @classmethod
    def read(cls, directory: Path, whose: str) -> Self:
        """Read the settings. Raises `ModelError` for a model that has no form for a GPU."""
        path = directory / SETTINGS
        if not (directory / WEIGHTS).is_file():
            raise ModelError(f"{whose} cannot run on a GPU: {directory} has no {WEIGHTS}, only a form for CPUs")
        try:
            settings: Any = json.loads(read_regular(path, _MAX_JSON_BYTES))
            kind, activation = settings["model_type"], settings["hidden_act"]
            sizes = {name: int(settings[name]) for name in _LARGEST}
            eps, padding = float(settings["layer_norm_eps"]), int(settings.get("pad_token_id") or 0)
            positions = settings.get("position_embedding_type") or "absolute"
        except OSError as error:
            raise ModelError(f"{whose} cannot run on a GPU: {path}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ModelError(f"{whose} cannot run on a GPU: {path} is not a BERT model's: {error!r}") from error
        for name, value, supported in (
            ("model_type", kind, ARCHITECTURES),
            ("hidden_act", activation, tuple(ACTIVATIONS)),
            ("position_embedding_type", positions, ("absolute",)),
        ):
            if value not in supported:
                raise ModelError(
                    f"{whose} cannot run on a GPU: {path} has {name} = {str(value)[:64]!r}; supported are "
                    f"{', '.join(supported)}"
                )
        for name, size in sizes.items():
            if not 1 <= size <= _LARGEST[name]:
                raise ModelError(
                    f"{whose} cannot run on a GPU: {path} has {name} = {size}, outside 1..{_LARGEST[name]}"
                )
        layers, hidden, inner, heads = sizes.values()
        if hidden % heads:
            raise ModelError(f"{whose} cannot run on a GPU: {path} has {heads} heads of a hidden_size of {hidden}")
        return cls(
            directory, whose, layers, heads, hidden, inner, eps, activation, padding + 1 if kind in _ROBERTA else 0
        )

    @property
    def gpu_bytes(self) -> int:
        """Memory of weights in 16 bits (a file in 32 bits is assumed) and of a forward pass; CUDA's own is not
        included."""
        weights = (self.directory / WEIGHTS).stat().st_size // 2
        return weights + 2 * BATCH_TOKENS * (8 * self.hidden + 2 * self.inner)


def check_packages(whose: str) -> None:
    """Raise `ModelError` unless the packages for a GPU are installed."""
    try:
        require_packages("torch", "safetensors")
        missing = "" if torch_cuda() else "the installed torch has no CUDA (https://pytorch.org/get-started/locally)"
    except ModelError as error:
        missing = error.message
    if missing:
        raise ModelError(f"{whose} cannot run on a GPU: {missing}")
