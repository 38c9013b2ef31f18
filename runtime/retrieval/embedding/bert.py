"""BERT encoder in torch (Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers"), with pooling.

Layers are those of RoBERTa too, whose positions begin later. A batch is one integer tensor [rows, 1 + tokens]: each row
its length, its token ids, and anything behind. Padding is masked, so a text's vector does not depend on its batch.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from runtime.errors import ModelError
from runtime.retrieval.embedding.bert_files import ACTIVATIONS, BertFiles
from runtime.retrieval.embedding.text_embedder import Pooling

_PREFIXES = ("bert.", "roberta.", "")


class _Affine(NamedTuple):
    weight: Tensor
    bias: Tensor


class _Layer(NamedTuple):
    """`attention` has the rows of queries, keys and values."""

    attention: _Affine
    joined: _Affine
    joined_norm: _Affine
    inner: _Affine
    outer: _Affine
    outer_norm: _Affine


class Bert:
    """The network on a device. Raises `ModelError` for weights that do not fit the settings."""

    def __init__(
        self, files: BertFiles, weights: Mapping[str, Tensor], pooling: Pooling, device: str, dtype: torch.dtype
    ) -> None:
        self._files, self._pooling, self._dtype = files, pooling, dtype
        prefix = next((one for one in _PREFIXES if f"{one}embeddings.word_embeddings.weight" in weights), "")
        hidden, inner = files.hidden, files.inner

        def read(name: str, *shape: int) -> Tensor:
            """Return a tensor in float32 on the host; a size 0 is any."""
            weight = weights.get(prefix + name)
            if (
                weight is None
                or weight.dim() != len(shape)
                or any(size and size != has for size, has in zip(shape, weight.shape, strict=True))
            ):
                has = "is missing" if weight is None else f"has shape {list(weight.shape)}"
                raise ModelError(f"{files.whose} cannot run on a GPU: its weight {prefix + name} {has}")
            return weight.float()

        def affine(name: str, rows: int, columns: int = 0) -> _Affine:
            weight = read(f"{name}.weight", rows, columns) if columns else read(f"{name}.weight", rows)
            return placed(weight, read(f"{name}.bias", rows))

        def moved(tensor: Tensor) -> Tensor:  # converted first: nothing is left to do on the device's stream
            return tensor.to(dtype).to(device)

        def placed(weight: Tensor, bias: Tensor) -> _Affine:
            return _Affine(moved(weight), moved(bias))

        self._words = moved(read("embeddings.word_embeddings.weight", 0, hidden))
        positions = read("embeddings.position_embeddings.weight", 0, hidden)
        positions = positions + read("embeddings.token_type_embeddings.weight", 0, hidden)[0]
        self._positions = moved(positions[files.first_position :])
        self._norm = affine("embeddings.LayerNorm", hidden)
        self._layers = []
        for number in range(files.layers):
            name = f"encoder.layer.{number}"
            parts = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
            attention = placed(
                torch.cat([read(f"{part}.weight", hidden, hidden) for part in parts]),
                torch.cat([read(f"{part}.bias", hidden) for part in parts]),
            )
            self._layers.append(
                _Layer(
                    attention,
                    affine(f"{name}.attention.output.dense", hidden, hidden),
                    affine(f"{name}.attention.output.LayerNorm", hidden),
                    affine(f"{name}.intermediate.dense", inner, hidden),
                    affine(f"{name}.output.dense", hidden, inner),
                    affine(f"{name}.output.LayerNorm", hidden),
                )
            )

    @property
    def max_tokens(self) -> int:
        """Number of positions."""
        return len(self._positions)

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return len(self._words)

    def encode(self, numbers: Tensor) -> Tensor:
        """Return pooled vectors float32 [rows, hidden], not scaled, of a batch int32 [rows, 1 + tokens]."""
        lengths, ids = numbers[:, 0], numbers[:, 1:]
        rows, tokens = ids.shape
        heads, size = self._files.heads, self._files.hidden // self._files.heads
        approximate = ACTIVATIONS[self._files.activation]
        seen = torch.arange(tokens, device=ids.device) < lengths[:, None]
        mask = torch.zeros(rows, 1, 1, tokens, dtype=self._dtype, device=ids.device)
        mask = mask.masked_fill(~seen[:, None, None], -torch.inf)
        state = self._normed(functional.embedding(ids * seen, self._words) + self._positions[:tokens], self._norm)
        for layer in self._layers:
            parts = functional.linear(state, *layer.attention).view(rows, tokens, 3, heads, size)
            query, key, value = parts.permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            attended = attended.transpose(1, 2).reshape(rows, tokens, -1)
            state = self._normed(state + functional.linear(attended, *layer.joined), layer.joined_norm)
            inner = functional.gelu(functional.linear(state, *layer.inner), approximate=approximate)
            state = self._normed(state + functional.linear(inner, *layer.outer), layer.outer_norm)
        if self._pooling == "cls":
            return state[:, 0].float()
        if self._pooling == "last":
            return state[torch.arange(rows, device=ids.device), lengths - 1].float()
        return (state.float() * seen[:, :, None]).sum(1) / lengths[:, None]

    def _normed(self, state: Tensor, norm: _Affine) -> Tensor:
        return functional.layer_norm(state, (self._files.hidden,), norm.weight, norm.bias, self._files.eps)
