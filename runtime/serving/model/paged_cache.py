"""The KV cache as one tensor of blocks, and attention over a ragged batch that reads and writes it in place.

```
kv [layers, 2, blocks, kv_heads, block_tokens, head_dim] float32        one batch: the chunks' tokens, end to end
        │  └ 0: K, 1: V                                                  ┌ table 3, 9 ──┬ table 0 ┬ table 5 ─┐
        └ kv[layer, 0, 9] holds positions 16..31 of a table [3, 9],      │ 40..43       │ 17      │ 0..2     │
          in blocks of 16                                                └ a b c d      ┴ e       ┴ f g h    ┘
```

The tokens of all chunks go through the linear layers as one row without padding, so there is nothing that could be
written by mistake. Attention then goes sequence by sequence: single tokens read their blocks in place
(`row_attention.py`), chunks at position 0 need none, and later chunks gather theirs into one piece first, which is
little beside the chunk's own work.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from runtime.serving.model.row_attention import Rows

ATTENTION = "trinity_blocks"
_MASKED_TOKENS = 64  # the size of pieces with a mask: 15 to 30% faster than uncut chunks of 512

Span = tuple[Sequence[int], int, int]
"""A chunk's block table, start position and number of tokens."""


class PagedCache:
    """The tensor `kv` and its views by layer."""

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv = kv
        self.block_tokens = int(kv.shape[4])
        # K and V of each layer, as tensors [blocks, kv_heads, block_tokens, head_dim] …
        self.layers = [(layer[0], layer[1]) for layer in kv]
        # … seen as [blocks, block_tokens, kv_heads, head_dim], so that tokens can be written by (block, offset) …
        self.by_position = [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in self.layers]
        # … as [kv_heads, blocks, block_tokens, head_dim], to gather a sequence's blocks …
        self.by_head = [(keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in self.layers]
        # … and as arrays.
        self.arrays = [(keys.numpy(), values.numpy()) for keys, values in self.layers]


@dataclass(frozen=True)
class _Chunk:
    """Tokens `begin:end` of the batch see themselves, or what is in `blocks` where these are set."""

    begin: int
    end: int
    blocks: torch.Tensor | None
    pieces: "tuple[_Piece, ...]"


@dataclass(frozen=True)
class _Piece:
    """Tokens `begin:end` of the batch see the first `visible` positions; `mask` [end - begin, visible] or causal."""

    begin: int
    end: int
    visible: int
    mask: torch.Tensor | None


class PagedBatch:
    """Where the tokens of one forward pass lie: shared by all layers."""

    def __init__(self, cache: PagedCache, spans: Sequence[Span]) -> None:
        """The spans have been checked against the cache's shape."""
        self.cache = cache
        device, size = cache.kv.device, cache.block_tokens
        blocks: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        rows: list[tuple[Sequence[int], int]] = []
        row_tokens: list[int] = []
        self.chunks: list[_Chunk] = []
        for table, start, count in spans:
            begin = len(positions)
            positions += range(start, start + count)
            blocks += [table[position // size] for position in range(start, start + count)]
            last.append(begin + count - 1)
            if count == 1:
                rows.append((table, start + 1))
                row_tokens.append(begin)
            else:
                seen = torch.tensor(table[: -(-(start + count) // size)], device=device) if start else None
                pieces = tuple(_pieces(begin, start, count, device))
                self.chunks.append(_Chunk(begin, begin + count, seen, pieces))
        self.positions = torch.tensor(positions, device=device)
        self.places = (torch.tensor(blocks, device=device), self.positions % size)
        self.last = torch.tensor(last, device=device)
        self.rows = Rows(rows, size) if rows else None
        self.row_tokens = torch.tensor(row_tokens, device=device)


def _pieces(begin: int, start: int, count: int, device: torch.device) -> Iterator[_Piece]:
    """The pieces of one chunk: a single one where torch's own causal mask fits, else a few with masks of their own.

    A masked kernel computes what the mask hides too. Cutting a chunk leaves most of that out.
    """
    size = _MASKED_TOKENS if start else count
    for done in range(0, count, size):
        tokens = min(size, count - done)
        visible = start + done + tokens
        mask = None
        if start and tokens > 1:
            mask = torch.ones(tokens, visible, dtype=torch.bool, device=device).tril_(start + done)
        yield _Piece(begin + done, begin + done + tokens, visible, mask)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged_batch: PagedBatch,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention: query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim].

    Writes K and V into the blocks, then attends. Returns [1, tokens, heads, head_dim].
    """
    layer: int = module.layer_idx
    cache = paged_batch.cache
    for stored, new in zip(cache.by_position[layer], (key, value), strict=True):
        stored.index_put_(paged_batch.places, new[0].transpose(0, 1))

    heads, tokens, head_dim = query.shape[1:]
    kv_heads = key.shape[1]
    output = query.new_empty(tokens, heads, head_dim)
    if paged_batch.rows:
        # A single token sees all there is, so the query heads of a group can stand where several tokens would.
        folded = query[0].transpose(0, 1)[paged_batch.row_tokens].view(-1, kv_heads, heads // kv_heads, head_dim)
        attended = paged_batch.rows.attend(folded, *cache.arrays[layer], scaling)
        output[paged_batch.row_tokens] = attended.view(-1, heads, head_dim)
    for chunk in paged_batch.chunks:
        keys, values = _seen(chunk, cache.by_head[layer], key, value)
        for piece in chunk.pieces:
            attended = scaled_dot_product_attention(
                query[:, :, piece.begin : piece.end],
                keys[:, :, : piece.visible],
                values[:, :, : piece.visible],
                attn_mask=piece.mask,
                is_causal=piece.mask is None and piece.end - piece.begin > 1,
                scale=scaling,
                enable_gqa=heads != kv_heads,
            )
            output[piece.begin : piece.end] = attended[0].transpose(0, 1)
    return output.unsqueeze(0), None


def _seen(
    chunk: _Chunk, stored: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V that a chunk sees, [1, kv_heads, positions, head_dim], in order."""
    if chunk.blocks is None:
        return key[:, :, chunk.begin : chunk.end], value[:, :, chunk.begin : chunk.end]
    keys, values = (side.index_select(1, chunk.blocks).flatten(1, 2).unsqueeze(0) for side in stored)
    return keys, values


# No mask function is registered under this name, so transformers builds no mask of its own.
AttentionInterface.register(ATTENTION, _attend)
