"""Paged KV cache, and attention over a ragged batch that reads and writes it in place.

```
kv [layers, 2, blocks, kv_heads, block_tokens, head_dim]                one batch: the chunks' tokens, end to end
        │  └ 0: K, 1: V                                                  ┌ table 3, 9 ──┬ table 0 ┬ table 5 ─┐
        └ kv[layer, 0, 9] holds positions 16..31 of a table [3, 9],      │ 40..43       │ 17      │ 0..2     │
          in blocks of 16                                                └ a b c d      ┴ e       ┴ f g h    ┘
```

The tokens of all chunks pass the linear layers as one ragged batch without padding, so no padding is ever written to
the cache. Attention is computed per sequence: single tokens of all rows in one call, reading blocks in place where
possible (`decode_attention`); chunks at position 0 need no blocks; later chunks gather their blocks into one tensor
first, which is cheap compared with the chunk's own work.

KV is float32 for the kernels "cpu", and of the weights' type otherwise; queries have the type of KV.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.nn.functional import scaled_dot_product_attention

from runtime.serving.model.model_info import Kernels
from runtime.serving.network.cpu_kernels import rotate_and_store
from runtime.serving.network.decode_attention import CpuAttention, GatheredAttention, PagedAttention

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

_PIECE_TOKENS = 64  # attention piece of a chunk on CPUs: 15 to 37% faster than whole chunks of 512

Span = tuple[Sequence[int], int, int]
"""A chunk's block table, start position and number of tokens."""


class PagedCache:
    """The tensor `kv` and its views by layer. A sequence has at most `row_blocks` blocks."""

    def __init__(self, kv: torch.Tensor, kernels: Kernels, row_blocks: int | None = None) -> None:
        """`kv`: float32 for the kernels "cpu", finite everywhere for "paged". `row_blocks`: by default all blocks."""
        self.kv = kv
        self.kernels = kernels
        self.blocks, self.kv_heads, self.block_tokens = (int(size) for size in kv.shape[2:5])
        self.row_blocks = row_blocks or self.blocks
        # K and V of each layer, as tensors [blocks, kv_heads, block_tokens, head_dim] …
        self.layers = [(layer[0], layer[1]) for layer in kv]
        # … as views [blocks, block_tokens, kv_heads, head_dim], to write tokens by (block, offset) …
        self.by_position = [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in self.layers]
        # … and in the form for decode attention.
        self.for_rows: list[tuple[Any, Any]] = self.layers
        if kernels == "cpu":
            self.for_rows = [(keys.numpy(), values.numpy()) for keys, values in self.layers]

    def rows(self, tables: torch.Tensor, visible: torch.Tensor, longest: int) -> GatheredAttention | PagedAttention:
        """Return the decode attention of single tokens for the kernels "gathered" and "paged": tables int64 [rows,
        blocks], visible positions int64 [rows], at most `longest`."""
        if self.kernels == "paged":
            return PagedAttention(tables, visible, self.row_blocks, self.kv_heads, self.block_tokens)
        return GatheredAttention(tables, visible, longest, self.block_tokens)


@dataclass(frozen=True)
class _Chunk:
    """Tokens `begin:end` of the batch. They attend to the positions in `blocks`, or only to themselves if None."""

    begin: int
    end: int
    blocks: torch.Tensor | None
    pieces: "tuple[_Piece, ...]"


@dataclass(frozen=True)
class _Piece:
    """Tokens `begin:end` attend to the first `visible` positions; `mask` [end - begin, visible], or causal if None."""

    begin: int
    end: int
    visible: int
    mask: "torch.Tensor | CausalBias | None"


class PagedBatch:
    """Token positions, block tables and masks of one forward pass, shared by all layers."""

    def __init__(self, cache: PagedCache, spans: Sequence[Span], tokens: Sequence[int]) -> None:
        """`spans` are validated against the cache's shape; `tokens` are their tokens, concatenated."""
        self.cache = cache
        device, size = cache.kv.device, cache.block_tokens
        uploads = Uploads()
        blocks: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        rows: list[tuple[Sequence[int], int]] = []
        row_tokens: list[int] = []
        chunks: list[tuple[int, int, int, slice | None]] = []
        for table, start, count in spans:
            begin = len(positions)
            positions += range(start, start + count)
            blocks += [table[position // size] for position in range(start, start + count)]
            last.append(begin + count - 1)
            if count == 1:
                rows.append((table, start + 1))
                row_tokens.append(begin)
            else:
                seen = uploads.add(table[: -(-(start + count) // size)]) if start else None
                chunks.append((begin, start, count, seen))
        slices = [uploads.add(values) for values in (tokens, positions, blocks, last, row_tokens)]
        longest = max((visible for _, visible in rows), default=0)
        width = -(-longest // size)
        if cache.kernels != "cpu":
            padded = uploads.add(block for table, _ in rows for block in (*table, *[0] * width)[:width])
            visible = uploads.add(visible for _, visible in rows)
        sent = uploads.send(device)
        self.tokens, self.positions, in_block, self.last, self.row_tokens = (sent[part] for part in slices)
        self.places = (in_block, self.positions % size)
        self.rows: CpuAttention | GatheredAttention | PagedAttention | None = None
        if rows and cache.kernels == "cpu":
            self.rows = CpuAttention(rows, size)
        elif rows:
            self.rows = cache.rows(sent[padded].view(len(rows), width), sent[visible], longest)
        cut = _PIECE_TOKENS if cache.kernels == "cpu" else None
        self.chunks = [
            _Chunk(
                begin,
                begin + count,
                None if seen is None else sent[seen],
                tuple(_pieces(begin, start, count, cut)),
            )
            for begin, start, count, seen in chunks
        ]

    @classmethod
    def of_rows(cls, cache: PagedCache, numbers: torch.Tensor) -> Self:
        """Return a batch of single tokens from a device tensor int64 [rows, 2 + blocks] of token, position and block
        table of each row. Not for the kernels "cpu". Never synchronizes with the device."""
        batch, size = cls.__new__(cls), cache.block_tokens
        batch.cache = cache
        batch.tokens, batch.positions, tables = numbers[:, 0], numbers[:, 1], numbers[:, 2:]
        in_block = tables.gather(1, batch.positions[:, None] // size).squeeze(1)
        batch.places = (in_block, batch.positions % size)
        batch.last = batch.row_tokens = torch.arange(len(numbers), device=numbers.device)
        batch.rows = cache.rows(tables, batch.positions + 1, size * tables.shape[1])
        batch.chunks = []
        return batch


def _pieces(begin: int, start: int, count: int, cut: int | None) -> Iterator[_Piece]:
    """Yield the pieces of one chunk, of `cut` tokens each if given, with a mask where torch's causal mask does not fit.

    torch's kernels also compute most of the masked positions, even with their own causal mask; cutting avoids that. An
    uncut chunk after earlier positions uses torch's causal bias: a GPU runs its flash kernel, without a mask in memory.
    """
    size = cut or count
    for done in range(0, count, size):
        tokens = min(size, count - done)
        visible = start + done + tokens
        mask: torch.Tensor | CausalBias | None = None
        if start + done and tokens > 1 and cut:
            mask = torch.ones(tokens, visible, dtype=torch.bool).tril_(start + done)
        elif start + done and tokens > 1:
            from torch.nn.attention.bias import (
                causal_lower_right,  # this import takes most of a second; CPUs do not need it
            )

            mask = causal_lower_right(tokens, visible)
        yield _Piece(begin + done, begin + done + tokens, visible, mask)


Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, float32 [tokens, head_dim], of the rotation of queries and keys."""


def apply_rope(heads: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Return `heads` float32 [tokens, heads, head_dim], each rotated by its token's angles."""
    cosines, sines = (side[:, None] for side in angles)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


def attend(
    batch: PagedBatch, layer: int, projected: torch.Tensor, angles: Angles, kv_heads: int, scaling: float
) -> torch.Tensor:
    """Compute one layer's attention. `projected` float32 [tokens, heads + 2 · kv_heads, head_dim] contains each token's
    queries, keys and values, and is overwritten.

    Rotates queries and keys, writes K and V to the blocks, then attends. Returns [tokens, heads, head_dim], of KV's
    type.
    """
    cache, group = batch.cache, projected.shape[1] // kv_heads - 2
    heads, head_dim = kv_heads * group, projected.shape[2]
    if cache.kernels == "cpu":
        (cosines, sines), (blocks, offsets) = angles, batch.places
        keys, values = cache.for_rows[layer]
        rotate_and_store(
            projected.numpy(), cosines.numpy(), sines.numpy(), blocks.numpy(), offsets.numpy(), keys, values
        )
    else:
        projected[:, :-kv_heads] = apply_rope(projected[:, :-kv_heads], angles)
        projected = projected.to(cache.kv.dtype)
        # A sequence's NaN must not affect later owners of its blocks: masked values are still multiplied.
        projected[:, heads:].nan_to_num_()
        for stored, new in zip(
            cache.by_position[layer], (projected[:, heads:-kv_heads], projected[:, -kv_heads:]), strict=True
        ):
            stored.index_put_(batch.places, new)
    query, key, value = projected[:, :heads], projected[:, heads:-kv_heads], projected[:, -kv_heads:]

    output = query.new_empty(*query.shape)
    if batch.rows:
        # A single token attends to all positions, so the query heads of a group can take the place of several tokens.
        alone = query[batch.row_tokens] if batch.chunks else query.contiguous()
        attended = batch.rows.attend(alone.view(-1, kv_heads, group, head_dim), *cache.for_rows[layer], scaling)
        if not batch.chunks:
            return attended.view(-1, heads, head_dim)
        output[batch.row_tokens] = attended.view(-1, heads, head_dim)
    queries, fresh = _by_head(query), (_by_head(key), _by_head(value))
    for chunk in batch.chunks:
        keys, values = _visible_kv(chunk, cache.layers[layer], *fresh)
        for piece in chunk.pieces:
            attended = scaled_dot_product_attention(
                queries[:, :, piece.begin : piece.end],
                keys[:, :, : piece.visible],
                values[:, :, : piece.visible],
                attn_mask=piece.mask,
                is_causal=piece.mask is None and piece.end - piece.begin > 1,
                scale=scaling,
                enable_gqa=heads != kv_heads,
            )
            output[piece.begin : piece.end] = attended[0].transpose(0, 1)
    return output


def _by_head(tensor: torch.Tensor) -> torch.Tensor:
    """Return [tokens, heads, head_dim] as [1, heads, tokens, head_dim], the layout of torch's kernel."""
    return tensor.transpose(0, 1).unsqueeze(0)


def _visible_kv(
    chunk: _Chunk, stored: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V that a chunk attends to: [1, kv_heads, positions, head_dim], in order."""
    if chunk.blocks is None:
        return key[:, :, chunk.begin : chunk.end], value[:, :, chunk.begin : chunk.end]
    # Select blocks first: `index_select` along another dimension would copy the whole layer.
    keys, values = (side.index_select(0, chunk.blocks).transpose(0, 1).flatten(1, 2).unsqueeze(0) for side in stored)
    return keys, values


class Uploads:
    """Collects lists of integers, and uploads them as views of one int64 tensor."""

    def __init__(self) -> None:
        self._values: list[int] = []

    def add(self, values: Iterable[int]) -> slice:
        """Add values. Return their slice of the tensor that `send` returns."""
        begin = len(self._values)
        self._values += values
        return slice(begin, len(self._values))

    def send(self, device: torch.device) -> torch.Tensor:
        """Return all values on the device. Pinned: a copy from pageable memory would wait for the device's queue."""
        values = torch.tensor(self._values, dtype=torch.int64)
        if device.type == "cpu":
            return values
        return values.pin_memory().to(device, non_blocking=True)
