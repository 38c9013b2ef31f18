"""Model metadata from `config.json`: sizes, data types and KV identity. Needs neither torch nor weights."""

import json
import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, Self

from runtime.errors import ConfigError, ModelError
from runtime.files import read_regular
from runtime.serving.model import smollm

# RoPE variants of Llama models whose angles depend on a token's position only. In some others (dynamic, longrope) they
# depend on the length of the whole sequence, which would invalidate cached rotated keys.
_STATIC_ROPE = {"default", "linear", "llama3"}
_MAX_SIZE = 1 << 24  # larger than any real config field; keeps products of untrusted numbers from overflowing

WeightsType = Literal["float32", "bfloat16", "float16", "int8"]
"""Data type of the large matrices. "int8" (CPU only) is used for passes of few rows, bfloat16 for the others."""
KvType = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES: dict[KvType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

Kernels = Literal["cpu", "gathered", "paged"]
"""Attention implementation: compiled CPU loops, or torch. In torch, decode attention reads copies of each row's blocks
("gathered") or the KV blocks in place ("paged")."""


def model_directory(name_or_dir: str | Path, progress: smollm.Progress | None = None) -> Path:
    """Return the directory with a model's `config.json`, weights and tokenizer. A known name is converted on first use.

    Raises `ModelError` for an unknown model.
    """
    if name_or_dir == smollm.NAME:
        return smollm.ensure_converted(progress)
    directory = Path(name_or_dir)
    if not (directory / "config.json").is_file():
        raise ModelError(f"no model {str(name_or_dir)!r}: neither {smollm.NAME!r} nor a directory with a config.json")
    return directory


def weights_type(
    configured: Literal["auto"] | WeightsType, device: str, cpuinfo: Path = Path("/proc/cpuinfo")
) -> WeightsType:
    """Resolve `model.weights` for `device`. "auto" is bfloat16 on GPUs; on CPUs int8 with AMX int8, bfloat16 with other
    bfloat16 instructions (AVX-512 or ARM), else float32. Raises `ConfigError` for int8 on a GPU."""
    if configured == "int8" and device != "cpu":
        raise ConfigError(f"model.weights 'int8' is supported on CPUs only, not on {device!r}: use 'bfloat16'")
    if configured != "auto":
        return configured
    if device != "cpu":
        return "bfloat16"
    try:
        flags = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return "float32"
    if not re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", flags):
        return "float32"
    return "int8" if re.search(r"\bamx_int8\b", flags) else "bfloat16"


def kernels_on(device: str) -> Kernels:
    """Return the default kernels of a device; "paged" falls back to "gathered" if torch cannot compile it."""
    return "cpu" if device == "cpu" else "paged"


def kv_type(weights: WeightsType, kernels: Kernels) -> KvType:
    """Return the data type of KV for these weights; the CPU kernels support float32 only."""
    return "float32" if kernels == "cpu" or weights == "int8" else weights


def model_identity(
    directory: Path, block_tokens: int, weights: WeightsType = "float32", kv: KvType = "float32"
) -> bytes:
    """Return a digest that identifies KV contents: it differs between models, block sizes, and data types of weights
    and KV.

    Weight files contribute their names, sizes and modification times: hashing gigabytes at every start is too slow.
    """
    digest = blake2b(f"kv {kv} {block_tokens} of {weights}".encode(), digest_size=16)
    digest.update(read_regular(directory / "config.json"))
    for path in sorted(directory.glob("*.safetensors")):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.digest()


def read_config(directory: Path) -> dict[str, Any]:
    """Read a model directory's `config.json`. Raises `ModelError` for a missing or damaged file."""
    try:
        config = json.loads(read_regular(directory / "config.json"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"cannot read {directory / 'config.json'}: {reason}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{directory / 'config.json'} is not a JSON object")
    return config


@dataclass(frozen=True)
class ModelInfo:
    """Sizes of a Llama model. `max_context_tokens` is its trained context length, `mlp` the width of its MLPs; with
    `tied` the embedding matrix is also the output matrix."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    max_context_tokens: int
    mlp: int
    tied: bool

    @classmethod
    def read(cls, name_or_dir: str | Path) -> Self:
        """Read a directory's `config.json`, or return the sizes of a known name without conversion.

        Raises `ModelError` for a missing or damaged file and for anything that is not a Llama.
        """
        if name_or_dir == smollm.NAME:
            return cls.from_config(smollm.NAME, smollm.CONFIG)
        directory = model_directory(name_or_dir)
        return cls.from_config(directory.resolve().name, read_config(directory))

    @classmethod
    def from_config(cls, name: str, config: dict[str, Any]) -> Self:
        """Return the sizes in a parsed `config.json`. Raises `ModelError` if it is not a transformers Llama's."""
        if config.get("model_type") != "llama":
            raise ModelError(f"model {name!r} has model_type {config.get('model_type')!r}; only 'llama' can be served")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in _STATIC_ROPE:
            raise ModelError(f"model {name!r} has RoPE type {kind!r}; one of {sorted(_STATIC_ROPE)} can be served")

        def size(key: str, default: int | None = None) -> int:
            value = config.get(key)
            value = default if value is None else value
            if not isinstance(value, int) or not 0 < value <= _MAX_SIZE:
                raise ModelError(f"model {name!r}: config.json's {key} is {value!r}, not an integer in 1..{_MAX_SIZE}")
            return value

        heads, hidden = size("num_attention_heads"), size("hidden_size")
        return cls(
            name=name,
            layers=size("num_hidden_layers"),
            heads=heads,
            kv_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim", hidden // heads),
            hidden=hidden,
            vocabulary=size("vocab_size"),
            max_context_tokens=size("max_position_embeddings"),
            mlp=size("intermediate_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def layer_weights(self) -> int:
        """Number of parameters in the matrices of all layers."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.mlp)

    def kv_shape(self, blocks: int, block_tokens: int) -> tuple[int, int, int, int, int, int]:
        """Return the shape of the KV tensor: [layers, 2 (K, V), blocks, kv_heads, block_tokens, head_dim]."""
        return (self.layers, 2, blocks, self.kv_heads, block_tokens, self.head_dim)

    def kv_bytes(self, blocks: int, block_tokens: int, kind: KvType = "float32") -> int:
        """Return the size of the KV tensor in bytes, for the data type `kind`."""
        return blocks * block_tokens * self.kv_bytes_per_token(kind)

    def kv_bytes_per_token(self, kind: KvType = "float32") -> int:
        """Return the bytes of K and V of one token in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * ITEM_BYTES[kind]
