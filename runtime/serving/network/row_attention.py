"""Attention of single decode tokens, each over its own blocks: one call for all rows.

`Rows`: in place, on one CPU core. torch's kernel takes one row at a time here (the rows are of different lengths and
lie apart) and multiplies matrices that have as many rows as query heads share a KV head, 2 or 3. Two plain loops around
torch's softmax take a half to a third of its time; they agree with it to float32 rounding.

`GatheredRows`: in torch alone, for any device, over copies of what the rows see. Keys and values are gathered into one
padded tensor, and torch's kernel takes them with a mask. That moves each of them twice, which a kernel of one's own
would not.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from ipc.memory.compiled import keep

F = TypeVar("F", bound=Callable[..., None])

# Sums may be reordered, so that they fit into vector registers; infinities and NaN keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}
# (query | weights, keys | values, tables, visible, scores | output): compiled, or read from numba's cache, on import.
_SIGNATURE = "void(float32[:,:,:,::1], float32[:,:,:,::1], int64[:,::1], int64[::1], float32[:,:,:,::1])"


def _compiled(function: F) -> F:
    dispatcher = njit(fastmath=_FAST, nogil=True, error_model="numpy")(function)
    keep(dispatcher)
    dispatcher.compile(_SIGNATURE)
    dispatcher.disable_compile()
    return cast(F, dispatcher)


@_compiled
def _score(query: Any, keys: Any, tables: Any, visible: Any, scores: Any) -> None:
    """scores[r, h, m, p] = query[r, h, m] · (head h's key at position p of table r) for p < visible[r], -inf behind."""
    rows, kv_heads, group, head_dim = query.shape
    size = keys.shape[2]
    for row in range(rows):
        # Block by block and not head by head: a block is one piece of memory, and the longer the piece, the better it
        # is fetched ahead.
        for first in range(0, visible[row], size):
            block = tables[row, first // size]
            tokens = min(size, visible[row] - first)
            for head in range(kv_heads):
                seen = keys[block, head]
                for offset in range(tokens):
                    for member in range(group):
                        total = np.float32(0.0)
                        for d in range(head_dim):
                            total += query[row, head, member, d] * seen[offset, d]
                        scores[row, head, member, first + offset] = total
        scores[row, :, :, visible[row] :] = -np.inf


@_compiled
def _mix(weights: Any, values: Any, tables: Any, visible: Any, output: Any) -> None:
    """output[r, h, m] = Σ weights[r, h, m, p] · (head h's value at position p of table r) over p < visible[r]."""
    rows, kv_heads, group, head_dim = output.shape
    size = values.shape[2]
    output[:] = 0.0
    for row in range(rows):
        for first in range(0, visible[row], size):
            block = tables[row, first // size]
            tokens = min(size, visible[row] - first)
            for head in range(kv_heads):
                seen = values[block, head]
                for offset in range(tokens):
                    for member in range(group):
                        weight = weights[row, head, member, first + offset]
                        for d in range(head_dim):
                            output[row, head, member, d] += weight * seen[offset, d]


class Rows:
    """Which blocks each of some tokens sees, and how many positions of them: shared by all layers."""

    def __init__(self, rows: Sequence[tuple[Sequence[int], int]], block_tokens: int) -> None:
        """`rows` are (block table, visible positions); a table may be longer than what is visible."""
        self._visible: NDArray[np.int64] = np.array([visible for _, visible in rows], np.int64)
        self._longest = int(self._visible.max())
        self._tables: NDArray[np.int64] = np.zeros((len(rows), -(-self._longest // block_tokens)), np.int64)
        for line, (table, visible) in zip(self._tables, rows, strict=True):
            count = -(-visible // block_tokens)
            line[:count] = table[:count]

    def attend(self, query: torch.Tensor, keys: NDArray[Any], values: NDArray[Any], scaling: float) -> torch.Tensor:
        """query [rows, kv_heads, group, head_dim], keys and values [blocks, kv_heads, block_tokens, head_dim], all
        float32 and contiguous, written at every position that is seen. Returns the shape of `query`."""
        scores = query.new_empty(*query.shape[:3], self._longest)
        _score(query.numpy(), keys, self._tables, self._visible, scores.numpy())
        weights = torch.softmax(scores.mul_(scaling), -1)
        output = torch.empty_like(query)
        _mix(weights.numpy(), values, self._tables, self._visible, output.numpy())
        return output


class GatheredRows:
    """Which positions each of some tokens sees: shared by all layers."""

    def __init__(self, tables: torch.Tensor, visible: torch.Tensor, longest: int, block_tokens: int) -> None:
        """tables int64 [rows, blocks], padded with anything; visible int64 [rows], at most `longest`."""
        positions = torch.arange(longest, device=tables.device)
        seen = positions < visible[:, None]
        # Behind what it sees a row reads its first position again: what was never written could be NaN, and NaN passes
        # through a mask.
        inside = torch.where(seen, positions, 0)
        self._blocks = tables.gather(1, inside // block_tokens)
        self._offsets = inside % block_tokens
        self._mask = seen[:, None, None, :]

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        """query [rows, kv_heads, group, head_dim], keys and values [blocks, block_tokens, kv_heads, head_dim]. Returns
        the shape of `query`."""
        seen_keys, seen_values = (side[self._blocks, self._offsets].transpose(1, 2) for side in (keys, values))
        return scaled_dot_product_attention(query, seen_keys, seen_values, attn_mask=self._mask, scale=scaling)
