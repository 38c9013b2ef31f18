"""Llama network over the paged cache: embedding → layers of attention and gated MLP → logits of chunks' last tokens.

It does not use transformers' implementation: importing that took longer than reading the weights, and it kept every
weight twice, as read and in the packed layout. Its tokens equal transformers' `generate()`
(`tests/serving/test_model.py`). Tensor names and keys of `config.json` are transformers'.
"""

import json
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from math import sqrt
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.functional import embedding

from runtime.errors import ModelError
from runtime.files import check_regular, read_regular
from runtime.serving.model.model_info import ModelInfo, WeightsType
from runtime.serving.network.decoder import Layer, Norm, Programs, compiled_programs
from runtime.serving.network.linear import Linear, linear_layer
from runtime.serving.network.paged_cache import Angles, PagedBatch, PagedCache, attend, rotate_and_store_on_cpu

log = logging.getLogger("model")

# ---- weight files: safetensors, memory-mapped and read on use


_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_MAX_INDEX_BYTES = 256 << 20
_LOADING_THREADS = 2  # a decode worker on a CPU packs weights for longer than a prefill worker, whose core is then idle


class WeightFiles:
    """The tensors in `model.safetensors`, or in the files that `model.safetensors.index.json` names."""

    def __init__(self, directory: Path) -> None:
        """Raises `ModelError` for a missing or damaged file."""
        self._directory = directory
        self._file_of: dict[str, Path] = {}
        try:
            for path in self._paths():
                with safe_open(check_regular(path), framework="pt") as file:
                    self._file_of |= dict.fromkeys(file.keys(), path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise ModelError(f"cannot load the model in {directory}: {error}") from error

    def _paths(self) -> list[Path]:
        index = self._directory / _INDEX
        if not index.is_file():
            return [self._directory / _WHOLE]
        names = set(json.loads(read_regular(index, _MAX_INDEX_BYTES))["weight_map"].values())
        return [self._directory / Path(name).name for name in sorted(names)]

    def require(self, names: list[str]) -> None:
        """Raise `ModelError` if one of the tensors is missing."""
        if missing := sorted(set(names) - self._file_of.keys()):
            raise ModelError(f"the weights in {self._directory} lack {len(missing)} tensors, such as {missing[0]}")

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor as float32. One that is float32 in its file is memory-mapped and shared between processes.

        Raises `ModelError` for another shape.
        """
        try:
            with safe_open(self._file_of[name], framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot load the model in {self._directory}: {error}") from error
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise ModelError(
                f"{name} in {self._directory} is {tensor.dtype} {list(tensor.shape)}; config.json says {list(shape)}"
            )
        return tensor.float()


# ---- rotary position embedding (RoFormer, arXiv 2104.09864)
# Three variants, whose angles depend only on a token's position: "default", "linear" (positions divided by a factor)
# and "llama3" (only low frequencies divided, Llama 3.1). Keys as in transformers' `config.json`.


class Rope:
    """Rotation angles of queries and keys. A pair is one dimension of each half of a head, as in Llama."""

    def __init__(self, config: dict[str, Any], head_dim: int, device: str) -> None:
        """`config`: the model's `config.json`. Raises `ModelError` for missing or non-numeric parameters."""
        parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
        parameters.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
        try:
            frequencies = _frequencies(parameters, head_dim)
            if not frequencies.isfinite().all():
                raise ValueError("a frequency is not finite")
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ModelError(f"invalid RoPE parameters {parameters} in config.json: {error!r}") from error
        self._frequencies = frequencies.to(device)

    def angles(self, positions: torch.Tensor) -> Angles:
        """Return the angles of positions int64 [tokens]."""
        half = positions[:, None].float() * self._frequencies
        both = torch.cat((half, half), dim=-1)
        return both.cos(), both.sin()


def _frequencies(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Return radians per position, float32 [head_dim / 2]."""
    plain = 1.0 / float(rope["rope_theta"]) ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return plain
        case "linear":
            return plain / float(rope["factor"])
        case "llama3":
            return _llama3(plain, rope)
        case kind:
            raise ValueError(f"unknown type {kind!r}")


def _llama3(plain: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Divide low frequencies, keep high ones, and interpolate between."""
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / plain
    slowed = torch.where(wavelength > trained / low, plain / factor, plain)
    share = (trained / wavelength - low) / (high - low)
    mixed = (1 - share) * slowed / factor + share * slowed
    between = (wavelength >= trained / high) & (wavelength <= trained / low)
    return torch.where(between, mixed, slowed)


# ---- the network


class Llama:
    """A Llama network with its weights on a device."""

    def __init__(
        self, info: ModelInfo, tokens: torch.Tensor, layers: list[Layer], norm: Norm, head: Linear, rope: Rope
    ) -> None:
        """Use `load`. `tokens`: the embedding, float32 [vocabulary, hidden]."""
        self._info = info
        self._tokens, self._layers, self._norm, self._head, self._rope = tokens, layers, norm, head, rope
        self.programs = Programs()
        """What runs between attentions, except on CPUs: eager until `compile` succeeds."""

    @classmethod
    def load(
        cls, config: dict[str, Any], info: ModelInfo, files: WeightFiles, device: str, weights: WeightsType = "float32"
    ) -> Self:
        """Load the weights in `files` to `device`. `config`: the model's `config.json`, from which `info` was read.
        `weights`: data type of the matrices. Raises `ModelError` for missing tensors, other shapes and unsupported
        models, and torch's error if the device has too little memory."""
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ModelError(f"model {info.name!r} has hidden_act {config['hidden_act']!r}; only 'silu' can be served")
        loader = _Loader(config, info, files, device, weights)
        head = "model.embed_tokens" if info.tied else "lm_head"
        files.require([*loader.names(), f"{head}.weight"])
        with torch.inference_mode(), ThreadPoolExecutor(_LOADING_THREADS, "weights") as threads:
            output = threads.submit(loader.linear, (head,), (info.vocabulary,), info.hidden, bias=False)
            layers = threads.map(loader.layer, range(info.layers))
            return cls(
                info,
                loader.tensor("model.embed_tokens.weight", info.vocabulary, info.hidden),
                list(layers),
                loader.norm("model.norm"),
                output.result(),
                Rope(config, info.head_dim, device),
            )

    def compile(self, cache: PagedCache, block: int = 0) -> bool:
        """Compile the programs between attentions for `cache`, which is not of the kernels "cpu". Return whether torch
        can and the result is right; otherwise the log says why not, and they stay eager. Leaves zeros in `block`."""
        eager, tokens = self.programs, [0, 1, 2, 3]
        near = 1e-3 if cache.kv.dtype == torch.float32 else 0.1  # of the logits' norm
        try:
            with torch.inference_mode():
                expected = self.logits(PagedBatch(cache, [([block], 0, len(tokens))], tokens)).clone()
                self.programs = compiled_programs()
                computed = self.logits(PagedBatch(cache, [([block], 0, len(tokens))], tokens))
                difference = float((computed - expected).norm() / expected.norm())
            reason = "" if difference <= near else f"the logits differ by {difference:.1e} of their norm"
        except Exception as error:  # a missing compiler, another version of torch: anything
            reason = str(error)[:300]
        finally:
            cache.kv[:, :, block].zero_()
        if reason:
            self.programs = eager
            log.warning("layers run uncompiled, several times slower, on %s: %s", cache.kv.device, reason)
        return not reason

    def logits(self, batch: PagedBatch, programs: Programs | None = None) -> torch.Tensor:
        """Run the batch, which writes the K and V of its tokens. Return logits float32 [chunks, vocabulary].

        `programs`: the network's by default."""
        if batch.cache.kernels == "cpu":
            return self._logits_on_cpu(batch)
        scaling, layers, blocks = 1 / sqrt(self._info.head_dim), self._layers, batch.cache.kv
        programs = programs or self.programs
        state = programs.begin(self._tokens, self._rope, layers[0], blocks[0], batch.numbers)
        attended = attend(batch, 0, state.query, state.fresh, scaling)
        for number in range(1, len(layers)):
            programs.proceed(layers[number - 1], layers[number], blocks[number], state, attended)
            attended = attend(batch, number, state.query, state.fresh, scaling)
        logits = programs.finish(layers[-1], self._norm, self._head, state.x, attended, batch.last)
        return logits[: batch.count]

    def _logits_on_cpu(self, batch: PagedBatch) -> torch.Tensor:
        info, (tokens, positions, *_) = self._info, batch.numbers
        heads, scaling = info.heads + 2 * info.kv_heads, 1 / sqrt(info.head_dim)
        angles = self._rope.angles(positions)
        x = embedding(tokens, self._tokens)
        for number, layer in enumerate(self._layers):
            projected = layer.attention_in(layer.attention_norm.on_cpu(x)).float().view(-1, heads, info.head_dim)
            query, fresh = rotate_and_store_on_cpu(batch, number, projected, angles, info.kv_heads)
            x = x + layer.attention_out(attend(batch, number, query, fresh, scaling).flatten(1))
            x = x + layer.mlp(layer.mlp_norm.on_cpu(x))
        return self._head(self._norm.on_cpu(x[batch.last])).float()


class _Loader:
    """Builds parts of the network from the tensors of the weight files."""

    def __init__(
        self, config: dict[str, Any], info: ModelInfo, files: WeightFiles, device: str, weights: WeightsType
    ) -> None:
        self._info, self._files, self._device = info, files, device
        self._weights = weights
        self._epsilon = float(config.get("rms_norm_eps", 1e-6))
        self._attention_bias, self._mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))

    def names(self) -> list[str]:
        """Return the names of all required tensors except the output matrix."""
        attention = [f"self_attn.{part}_proj" for part in "qkvo"]
        mlp = [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
        parts = [f"{part}.weight" for part in (*attention, *mlp, "input_layernorm", "post_attention_layernorm")]
        parts += [f"{part}.bias" for part in attention if self._attention_bias]
        parts += [f"{part}.bias" for part in mlp if self._mlp_bias]
        layers = [f"model.layers.{number}.{part}" for number in range(self._info.layers) for part in parts]
        return ["model.embed_tokens.weight", "model.norm.weight", *layers]

    @torch.inference_mode()
    def layer(self, number: int) -> Layer:
        info, mlp, name = self._info, self._info.mlp, f"model.layers.{number}"
        queries, keys = info.heads * info.head_dim, info.kv_heads * info.head_dim
        attention = tuple(f"{name}.self_attn.{part}_proj" for part in "qkv")
        gated = (f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj")
        return Layer(
            self.norm(f"{name}.input_layernorm"),
            self.linear(attention, (queries, keys, keys), info.hidden, bias=self._attention_bias),
            self.linear((f"{name}.self_attn.o_proj",), (info.hidden,), queries, bias=self._attention_bias),
            self.norm(f"{name}.post_attention_layernorm"),
            self.linear(gated, (mlp, mlp), info.hidden, bias=self._mlp_bias),
            self.linear((f"{name}.mlp.down_proj",), (info.hidden,), mlp, bias=self._mlp_bias),
        )

    def norm(self, name: str) -> Norm:
        return Norm(self.tensor(f"{name}.weight", self._info.hidden).clone(), self._epsilon)

    @torch.inference_mode()
    def linear(self, names: tuple[str, ...], sizes: tuple[int, ...], inside: int, *, bias: bool) -> Linear:
        """Return one layer with the concatenated outputs of the named layers."""
        weights = [self.tensor(f"{name}.weight", size, inside) for name, size in zip(names, sizes, strict=True)]
        biases = [self.tensor(f"{name}.bias", size) for name, size in zip(names, sizes, strict=True) if bias]
        return linear_layer(_concatenated(weights), _concatenated(biases) if biases else None, self._weights)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._files.tensor(name, shape).to(self._device)


def _concatenated(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
