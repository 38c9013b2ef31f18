"""Attention of single decode tokens, each over its own slot: one call for all rows, in place, on one CPU core.

torch's kernel takes one row at a time here (the rows are of different lengths and lie apart) and multiplies matrices
that have as many rows as query heads share a KV head, 2 or 3. Two plain loops around torch's softmax take a half to
a third of its time; they agree with it to float32 rounding.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., None])

# Sums may be reordered, so that they fit into vector registers; infinities and NaN keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}
# (query | weights, keys | values, slots, visible, scores | output): compiled, or read from numba's cache, on import.
_SIGNATURE = "void(float32[:,:,:,::1], float32[:,:,:,::1], int64[::1], int64[::1], float32[:,:,:,::1])"


def _compiled(function: F) -> F:
    return cast(F, njit(_SIGNATURE, fastmath=_FAST, nogil=True, cache=True, error_model="numpy")(function))


@_compiled
def _score(query: Any, keys: Any, slots: Any, visible: Any, scores: Any) -> None:
    """scores[r, h, m, p] = query[r, h, m] · keys[slots[r], h, p] for p < visible[r], -inf behind."""
    rows, kv_heads, group, head_dim = query.shape
    for row in range(rows):
        for head in range(kv_heads):
            seen = keys[slots[row], head]
            for position in range(visible[row]):
                for member in range(group):
                    total = np.float32(0.0)
                    for d in range(head_dim):
                        total += query[row, head, member, d] * seen[position, d]
                    scores[row, head, member, position] = total
            scores[row, head, :, visible[row] :] = -np.inf


@_compiled
def _mix(weights: Any, values: Any, slots: Any, visible: Any, output: Any) -> None:
    """output[r, h, m] = Σ weights[r, h, m, p] · values[slots[r], h, p] over p < visible[r]."""
    rows, kv_heads, group, head_dim = output.shape
    for row in range(rows):
        for head in range(kv_heads):
            seen = values[slots[row], head]
            output[row, head] = 0.0
            for position in range(visible[row]):
                for member in range(group):
                    weight = weights[row, head, member, position]
                    for d in range(head_dim):
                        output[row, head, member, d] += weight * seen[position, d]


class Rows:
    """Which slot each of some tokens belongs to, and how many of its positions it sees: shared by all layers."""

    def __init__(self, slots: list[int], visible: list[int]) -> None:
        self._slots: NDArray[np.int64] = np.array(slots, np.int64)
        self._visible: NDArray[np.int64] = np.array(visible, np.int64)
        self._longest = max(visible)

    def attend(self, query: torch.Tensor, keys: NDArray[Any], values: NDArray[Any], scaling: float) -> torch.Tensor:
        """query [rows, kv_heads, group, head_dim], keys and values [slots, kv_heads, context, head_dim], all float32
        and contiguous, each slot written up to what its row sees. Returns the shape of `query`."""
        scores = query.new_empty(*query.shape[:3], self._longest)
        _score(query.numpy(), keys, self._slots, self._visible, scores.numpy())
        weights = torch.softmax(scores.mul_(scaling), -1)
        output = torch.empty_like(query)
        _mix(weights.numpy(), values, self._slots, self._visible, output.numpy())
        return output
