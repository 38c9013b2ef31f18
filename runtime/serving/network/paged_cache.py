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

_MIN_TOKENS = 2  # of a compiled program: torch compiles other programs for 1
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
        # K and V of each layer [blocks, kv_heads, block_tokens, head_dim], and in the form for decode attention.
        self.layers = [(layer[0], layer[1]) for layer in kv]
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
    """Token positions, block tables and masks of one forward pass, shared by all layers.

    `numbers` int64 [5, tokens]: each token, its position, the block and the offset in it of its K and V, and itself, or
    the token that it repeats. `last`: the last tokens of the `count` chunks, padded like the tokens. `output`: memory
    for the attention of each layer, made for the first one if it is not given.
    """

    def __init__(self, cache: PagedCache, spans: Sequence[Span], tokens: Sequence[int], pad_to: int = 0) -> None:
        """`spans` are validated against the cache's shape; `tokens` are their tokens, concatenated.

        Except for the kernels "cpu", the batch is padded to `pad_to` tokens, at least 2, with copies of its last token:
        compiled programs take any number from 2 on.
        """
        self.cache = cache
        device, size, on_cpu = cache.kv.device, cache.block_tokens, cache.kernels == "cpu"
        uploads = Uploads()
        blocks: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        rows: list[tuple[Sequence[int], int]] = []
        row_tokens: list[int] = []
        chunks: list[tuple[int, int, int, Sequence[int]]] = []
        for table, start, count in spans:
            begin = len(positions)
            positions += range(start, start + count)
            blocks += [table[position // size] for position in range(start, start + count)]
            last.append(begin + count - 1)
            if count == 1:
                rows.append((table, start + 1))
                row_tokens.append(begin)
            else:
                chunks.append((begin, start, count, table[: -(-(start + count) // size)] if start else ()))
        padding = 0 if on_cpu else max(pad_to, _MIN_TOKENS) - len(positions)
        numbers = (tokens, positions, blocks, [position % size for position in positions], range(len(positions)))
        for values in numbers:
            uploads.add([*values, *[values[-1]] * padding])
        count = uploads.count // len(numbers)
        ends = uploads.add(last if on_cpu else [*last, *last[-1:] * (_MIN_TOKENS - len(last))])
        alone = uploads.add(row_tokens)
        seen = [uploads.add(table) for *_, table in chunks]
        longest = max((visible for _, visible in rows), default=0)
        width = -(-longest // size)
        if not on_cpu:
            padded = uploads.add(block for table, _ in rows for block in (*table, *[0] * width)[:width])
            visible = uploads.add(visible for _, visible in rows)
        sent = uploads.send(device)
        self.numbers = sent[: len(numbers) * count].view(len(numbers), count)
        self.output: torch.Tensor | None = None
        self.last, self.row_tokens, self.count = sent[ends], sent[alone], len(spans)
        self.rows: CpuAttention | GatheredAttention | PagedAttention | None = None
        if rows and on_cpu:
            self.rows = CpuAttention(rows, size)
        elif rows:
            self.rows = cache.rows(sent[padded].view(len(rows), width), sent[visible], longest)
        cut = _PIECE_TOKENS if on_cpu else None
        self.chunks = [
            _Chunk(begin, begin + count, sent[part] if start else None, tuple(_pieces(begin, start, count, cut)))
            for (begin, start, count, _), part in zip(chunks, seen, strict=True)
        ]

    @classmethod
    def of_rows(cls, cache: PagedCache, lines: torch.Tensor) -> Self:
        """Return a batch of single tokens from a device tensor int64 [rows, 2 + blocks] of token, position and block
        table of each row. Not for the kernels "cpu". Never synchronizes with the device."""
        batch, size = cls.__new__(cls), cache.block_tokens
        batch.cache = cache
        tokens, positions, tables = lines[:, 0], lines[:, 1], lines[:, 2:]
        blocks = tables.gather(1, positions[:, None] // size).squeeze(1)
        order = torch.arange(len(lines), device=lines.device)
        batch.numbers = torch.stack((tokens, positions, blocks, positions % size, order))
        # As in other batches a view at an offset: torch compiles another program for offset 0.
        batch.last = batch.row_tokens = batch.numbers[-1]
        batch.count, batch.output = len(lines), None
        batch.rows = cache.rows(tables, positions + 1, size * tables.shape[1])
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


def store(stored: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, fresh: torch.Tensor) -> None:
    """Write `fresh` [tokens, 2 · kv_heads, head_dim], K and V of tokens, to a layer's blocks `stored` [2, blocks,
    kv_heads, block_tokens, head_dim]."""
    by_position = stored.permute(1, 3, 0, 2, 4)
    by_position.index_put_((blocks, offsets), fresh.view(-1, *by_position.shape[2:]))


def rotate_and_store_on_cpu(
    batch: "PagedBatch", layer: int, projected: torch.Tensor, angles: Angles, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys of `projected` float32 [tokens, heads + 2 · kv_heads, head_dim], in place, and write K
    and V to the blocks of one layer. Return the views for `attend`. For the kernels "cpu"."""
    (cosines, sines), (blocks, offsets) = angles, batch.numbers[2:4]
    keys, values = batch.cache.for_rows[layer]
    rotate_and_store(projected.numpy(), cosines.numpy(), sines.numpy(), blocks.numpy(), offsets.numpy(), keys, values)
    return projected[:, : -2 * kv_heads], projected[:, -2 * kv_heads :]


def attend(batch: PagedBatch, layer: int, query: torch.Tensor, fresh: torch.Tensor, scaling: float) -> torch.Tensor:
    """Compute one layer's attention: rotated queries [tokens, heads, head_dim] and `fresh` [tokens, 2 · kv_heads,
    head_dim], the tokens' K and V, all of KV's type and already written to the blocks.

    Returns [tokens, heads, head_dim], of that type, valid until the batch's next layer; undefined for tokens that pad
    the batch.
    """
    cache, heads, head_dim = batch.cache, query.shape[1], query.shape[2]
    kv_heads = cache.kv_heads
    group, key, value = heads // kv_heads, fresh[:, :kv_heads], fresh[:, kv_heads:]
    if batch.output is None:
        batch.output = query.new_empty(*query.shape)
    output = batch.output
    if batch.rows:
        # A single token attends to all positions, so the query heads of a group can take the place of several tokens.
        only_rows = len(batch.row_tokens) == len(query)
        alone = query.contiguous() if only_rows else query[batch.row_tokens]
        attended = batch.rows.attend(alone.view(-1, kv_heads, group, head_dim), *cache.for_rows[layer], scaling)
        if only_rows:
            return attended.view(-1, heads, head_dim)
        output[batch.row_tokens] = attended.view(-1, heads, head_dim)
    queries, own = _by_head(query), (_by_head(key), _by_head(value))
    for chunk in batch.chunks:
        keys, values = _visible_kv(chunk, cache.layers[layer], *own)
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

    @property
    def count(self) -> int:
        """Number of values."""
        return len(self._values)

    def send(self, device: torch.device) -> torch.Tensor:
        """Return all values on the device. Pinned: a copy from pageable memory would wait for the device's queue."""
        values = torch.tensor(self._values, dtype=torch.int64)
        if device.type == "cpu":
            return values
        return values.pin_memory().to(device, non_blocking=True)
