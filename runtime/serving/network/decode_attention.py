"""Decode attention over paged KV: one query token per row, all rows of a batch in one call.

- `CpuAttention` reads the blocks in place, on one CPU core. torch's kernel processes one row at a time (rows differ in
  length and their blocks are not adjacent), and its matrices have only as many rows as query heads share a KV head, 2
  or 3. Two plain loops around torch's softmax take a half to a third of its time and agree with it to float32 rounding.
- `PagedAttention` reads the blocks in place with torch's FlexAttention, compiled for the device.
- `GatheredAttention` copies each row's blocks into one tensor and calls torch's attention, which moves them twice. It
  is the fallback where FlexAttention does not work.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad, scaled_dot_product_attention

from runtime.serving.network.compiler import prepare_compiler
from runtime.serving.network.cpu_kernels import attention_scores, weighted_sum


class CpuAttention:
    """Block tables and lengths of the rows of a batch, for the kernels "cpu"; shared by all layers."""

    def __init__(self, rows: Sequence[tuple[Sequence[int], int]], block_tokens: int) -> None:
        """`rows` are (block table, visible positions); a table may have more blocks than the visible positions need."""
        self._visible: NDArray[np.int64] = np.array([visible for _, visible in rows], np.int64)
        self._longest = int(self._visible.max())
        self._tables: NDArray[np.int64] = np.zeros((len(rows), -(-self._longest // block_tokens)), np.int64)
        for line, (table, visible) in zip(self._tables, rows, strict=True):
            count = -(-visible // block_tokens)
            line[:count] = table[:count]

    def attend(self, query: torch.Tensor, keys: NDArray[Any], values: NDArray[Any], scaling: float) -> torch.Tensor:
        """query [rows, kv_heads, group, head_dim], keys and values [blocks, kv_heads, block_tokens, head_dim], all
        float32 and contiguous, and written at every visible position. Returns the shape of `query`."""
        scores = query.new_empty(*query.shape[:3], self._longest)
        attention_scores(query.numpy(), keys, self._tables, self._visible, scores.numpy())
        weights = torch.softmax(scores.mul_(scaling), -1)
        output = torch.empty_like(query)
        weighted_sum(weights.numpy(), values, self._tables, self._visible, output.numpy())
        return output


class GatheredAttention:
    """Indices of the visible positions of every row, for the kernels "gathered"; shared by all layers."""

    def __init__(self, tables: torch.Tensor, visible: torch.Tensor, longest: int, block_tokens: int) -> None:
        """tables int64 [rows, blocks], padded with anything; visible int64 [rows], at most `longest`."""
        positions = torch.arange(longest, device=tables.device)
        seen = positions < visible[:, None]
        # Beyond its length a row reads its first position again: unwritten memory could be NaN, and NaN passes through
        # a mask.
        inside = torch.where(seen, positions, 0)
        self._blocks = tables.gather(1, inside // block_tokens)
        self._offsets = inside % block_tokens
        self._mask = seen[:, None, None, :]

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        """query [rows, kv_heads, group, head_dim], keys and values [blocks, kv_heads, block_tokens, head_dim], of one
        type. Returns the shape of `query`."""
        seen_keys, seen_values = (
            side.transpose(1, 2)[self._blocks, self._offsets].transpose(1, 2) for side in (keys, values)
        )
        return scaled_dot_product_attention(query, seen_keys, seen_values, attn_mask=self._mask, scale=scaling)


# ---- FlexAttention over the blocks in place
# torch sees a layer as one sequence of *pages*: block 0 of head 0, block 0 of head 1, …, each of `block_tokens`
# consecutive keys, in the cache's own order. Each KV head of a row is a sequence of its own; its queries are the heads
# that share it. A block mask lists the pages that each of them reads, so the cache is not reordered and other pages are
# not computed. Only the last page of a row is masked. All pages are declared as partly masked, because only then does
# torch's kernel split a row's pages among many thread blocks.
#
# A thread block reads one page's keys, waits, reads its values, and waits: 1.5 µs a page of 16 tokens on an H200. So
# there must be many: 16 for each multiprocessor have 43 KB in flight (pages of 32 tokens, head_dim 64,
# bfloat16, two thirds of the time), where its memory wants 24 KB (`gpu/kernels/ring.cuh`). torch by itself takes one
# block for each KV head of a row from 17 rows of 8 KV heads on.
#
# The kernel multiplies masked values by zero, so unwritten positions of the cache must be finite too (`attend`).


_BLOCKS_PER_MULTIPROCESSOR = 16
_MOST_SPLITS = 32


class PagedAttention:
    """Page lists of the rows of a batch, and the length of each row's last page, for the kernels "paged"; shared by all
    layers.

    A program is compiled for each power of two of rows from 2 on, cache shape and `row_blocks`.
    """

    def __init__(
        self, tables: torch.Tensor, visible: torch.Tensor, row_blocks: int, kv_heads: int, block_tokens: int
    ) -> None:
        """tables int64 [rows, blocks], padded with valid block numbers; visible int64 [rows], at least 1; no row has
        more than `row_blocks` blocks."""
        self._rows, self._size = len(tables), block_tokens
        count = max(2, power_of_two(self._rows))
        self._padded: torch.Tensor | None = None
        if count > self._rows:
            self._padded = torch.arange(count, device=tables.device).clamp_(max=self._rows - 1)
            tables, visible = tables[self._padded], visible[self._padded]
        tables = pad(tables, (0, row_blocks - tables.shape[1]))
        heads = torch.arange(kv_heads, device=tables.device)
        pages = (tables[:, None] * kv_heads + heads[:, None]).flatten(0, 1)
        behind = ((visible - 1) // block_tokens).repeat_interleave(kv_heads, output_size=count * kv_heads)
        self._last = pages.gather(1, behind[:, None]).squeeze(1).int()
        self._tail = (visible.repeat_interleave(kv_heads, output_size=count * kv_heads) - behind * block_tokens).int()
        self._counts = (behind + 1).int().view(-1, 1, 1)
        self._splits = splits_of(count * kv_heads, _multiprocessors(tables.device))
        self._pages = pages.int().view(-1, 1, 1, row_blocks)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        """query [rows, kv_heads, group, head_dim], keys and values [blocks, kv_heads, block_tokens, head_dim],
        contiguous, of one type and finite. Returns the shape of `query`."""
        padded = query if self._padded is None else query[self._padded]
        attended: torch.Tensor = _compiled()(
            padded.flatten(0, 1).unsqueeze(1),
            keys.view(1, 1, -1, keys.shape[-1]),
            values.view(1, 1, -1, keys.shape[-1]),
            self._counts, self._pages, self._last, self._tail, scaling, self._size, self._splits,
        )  # fmt: skip
        return attended.view(padded.shape)[: self._rows]


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def splits_of(sequences: int, multiprocessors: int) -> int:
    """Return how many thread blocks share the pages of a sequence: beyond 32, adding their parts takes longer than it
    saves."""
    return min(max(_BLOCKS_PER_MULTIPROCESSOR * multiprocessors // sequences, 1), _MOST_SPLITS)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _paged_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, counts: torch.Tensor, pages: torch.Tensor,
    last: torch.Tensor, tail: torch.Tensor, scaling: float, size: int, splits: int,
) -> torch.Tensor:  # fmt: skip
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    def seen(row: Any, head: Any, member: Any, position: Any) -> Any:
        return (position // size != last[row]) | (position % size < tail[row])

    mask = BlockMask.from_kv_blocks(
        counts, pages, BLOCK_SIZE=(128, size), mask_mod=seen, seq_lengths=(query.shape[2], keys.shape[2]),
        compute_q_blocks=False,
    )  # fmt: skip
    options: Any = {"SPLIT_KV": splits}
    attended: torch.Tensor = flex_attention(query, keys, values, block_mask=mask, scale=scaling, kernel_options=options)
    return attended


@cache
def _compiled() -> Any:
    prepare_compiler()
    return torch.compile(_paged_attention, dynamic=False, fullgraph=True)
