"""Llama's network over the paged cache: embedding → layers of attention and gated MLP → logits of chunks' last tokens.

Our own loop over its layers, and not transformers': importing that took a worker longer than reading its weights, and
it kept every weight twice, as read and as laid out for the product. What it computes is transformers' `generate()`,
token by token (`tests/serving/test_model.py`). Names of tensors and keys of `config.json` are transformers'.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any, Self

import torch
from torch.nn.functional import embedding, silu

from runtime.errors import ModelError
from runtime.serving.model.model_info import ModelInfo
from runtime.serving.model.weight_files import WeightFiles
from runtime.serving.network.packed_linear import Linear, linear_layer
from runtime.serving.network.paged_cache import PagedBatch, attend
from runtime.serving.network.rope import Rope, turn


@dataclass(frozen=True)
class _Norm:
    """x · weight / root mean square of x, over the last dimension (arXiv 1910.07467)."""

    weight: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))


@dataclass(frozen=True)
class _Layer:
    """One decoder layer. `attention_in` gives queries, keys and values, `mlp_in` gate and up, each in one product."""

    attention_norm: _Norm
    attention_in: Linear
    attention_out: Linear
    mlp_norm: _Norm
    mlp_in: Linear
    mlp_out: Linear


class Llama:
    """The weights on their device, and one pass through them."""

    def __init__(
        self, info: ModelInfo, tokens: torch.Tensor, layers: list[_Layer], norm: _Norm, head: Linear, rope: Rope
    ) -> None:
        """Use `load`. `tokens`: the embedding, float32 [vocabulary, hidden]."""
        self._info = info
        self._tokens, self._layers, self._norm, self._head, self._rope = tokens, layers, norm, head, rope

    @classmethod
    def load(cls, config: dict[str, Any], info: ModelInfo, files: WeightFiles, device: str) -> Self:
        """`config`: the model's `config.json`, which `info` was read from. Raises `ModelError` for what is missing,
        of another shape, or not Llama's; torch's own error where `device` is too small."""
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ModelError(f"model {info.name!r} has hidden_act {config['hidden_act']!r}; only 'silu' can be served")
        loading = _Loading(config, info, files, device)
        head = "model.embed_tokens" if info.tied else "lm_head"
        files.require([*loading.names(), f"{head}.weight"])
        with torch.inference_mode():
            return cls(
                info,
                loading.tensor("model.embed_tokens.weight", info.vocabulary, info.hidden),
                [loading.layer(number) for number in range(info.layers)],
                loading.norm("model.norm"),
                loading.linear((head,), (info.vocabulary,), info.hidden, bias=False),
                Rope(config, info.head_dim, device),
            )

    def logits(self, batch: PagedBatch) -> torch.Tensor:
        """A pass over the batch's tokens, which writes their K and V; float32 [chunks, vocabulary]."""
        info = self._info
        turned, heads = info.heads + info.kv_heads, info.heads + 2 * info.kv_heads
        angles = self._rope.angles(batch.positions)
        x = embedding(batch.tokens, self._tokens)
        for number, layer in enumerate(self._layers):
            projected = layer.attention_in(layer.attention_norm(x)).view(-1, heads, info.head_dim)
            rotated = turn(projected[:, :turned], *angles)
            queries, keys = rotated[:, : info.heads], rotated[:, info.heads :]
            attended = attend(batch, number, queries, keys, projected[:, turned:], 1 / sqrt(info.head_dim))
            x = x + layer.attention_out(attended.flatten(1))
            gate, up = layer.mlp_in(layer.mlp_norm(x)).chunk(2, dim=-1)
            x = x + layer.mlp_out(silu(gate) * up)
        return self._head(self._norm(x[batch.last]))


class _Loading:
    """Tensors of the files as parts of the network."""

    def __init__(self, config: dict[str, Any], info: ModelInfo, files: WeightFiles, device: str) -> None:
        self._info, self._files, self._device = info, files, device
        self._epsilon = float(config.get("rms_norm_eps", 1e-6))
        self._attention_bias, self._mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))

    def names(self) -> list[str]:
        """Every tensor that the network needs, but for its last product."""
        attention = [f"self_attn.{part}_proj" for part in "qkvo"]
        mlp = [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
        parts = [f"{part}.weight" for part in (*attention, *mlp, "input_layernorm", "post_attention_layernorm")]
        parts += [f"{part}.bias" for part in attention if self._attention_bias]
        parts += [f"{part}.bias" for part in mlp if self._mlp_bias]
        layers = [f"model.layers.{number}.{part}" for number in range(self._info.layers) for part in parts]
        return ["model.embed_tokens.weight", "model.norm.weight", *layers]

    def layer(self, number: int) -> _Layer:
        info, mlp, name = self._info, self._info.mlp, f"model.layers.{number}"
        queries, keys = info.heads * info.head_dim, info.kv_heads * info.head_dim
        asking = tuple(f"{name}.self_attn.{part}_proj" for part in "qkv")
        gated = (f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj")
        return _Layer(
            self.norm(f"{name}.input_layernorm"),
            self.linear(asking, (queries, keys, keys), info.hidden, bias=self._attention_bias),
            self.linear((f"{name}.self_attn.o_proj",), (info.hidden,), queries, bias=self._attention_bias),
            self.norm(f"{name}.post_attention_layernorm"),
            self.linear(gated, (mlp, mlp), info.hidden, bias=self._mlp_bias),
            self.linear((f"{name}.mlp.down_proj",), (info.hidden,), mlp, bias=self._mlp_bias),
        )

    def norm(self, name: str) -> _Norm:
        return _Norm(self.tensor(f"{name}.weight", self._info.hidden).clone(), self._epsilon)

    def linear(self, names: tuple[str, ...], sizes: tuple[int, ...], inside: int, *, bias: bool) -> Linear:
        """The layers of these names as one, their outputs side by side."""
        weights = [self.tensor(f"{name}.weight", size, inside) for name, size in zip(names, sizes, strict=True)]
        biases = [self.tensor(f"{name}.bias", size) for name, size in zip(names, sizes, strict=True) if bias]
        return linear_layer(_joined(weights), _joined(biases) if biases else None)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._files.tensor(name, shape).to(self._device)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
