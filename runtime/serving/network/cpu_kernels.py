"""Compiled CPU kernels, for operations where torch would make several passes over the data, or where call overhead
dominates, as for the few rows of a decode step. They agree with torch to float32 rounding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from ipc.native.compiled import stamp_of
from ipc.native.dispatcher import Dispatcher

F = TypeVar("F", bound=Callable[..., None])

# Allows reordered sums, for vectorization; infinities and NaN keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}
_STAMP = stamp_of(Path(__file__).parent)


def compiled_kernel(*arguments: str) -> Callable[[F], F]:
    """Return a decorator that compiles a function for these argument types on import, or loads it from the cache."""

    def compile_kernel(function: F) -> F:
        dispatcher = Dispatcher(function, {"fastmath": _FAST, "nogil": True, "error_model": "numpy"}, _STAMP)
        dispatcher.compile(f"void({', '.join(arguments)})")
        dispatcher.disable_compile()
        return cast(F, dispatcher)

    return compile_kernel


_BLOCKS = "float32[:,:,:,::1]"


@compiled_kernel(_BLOCKS, _BLOCKS, "int64[:,::1]", "int64[::1]", _BLOCKS)
def attention_scores(query: Any, keys: Any, tables: Any, visible: Any, scores: Any) -> None:
    """scores[r, h, m, p] = query[r, h, m] · (head h's key at position p of table r) for p < visible[r], else -inf."""
    rows, kv_heads, group, head_dim = query.shape
    size = keys.shape[2]
    for row in range(rows):
        # Block by block, not head by head: a block is contiguous, and longer contiguous reads prefetch better.
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


@compiled_kernel(_BLOCKS, _BLOCKS, "int64[:,::1]", "int64[::1]", _BLOCKS)
def weighted_sum(weights: Any, values: Any, tables: Any, visible: Any, output: Any) -> None:
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


@compiled_kernel(
    "float32[:,:,::1]",
    "float32[:,:]",
    "float32[:,:]",
    "int64[:]",
    "int64[:]",
    "float32[:,:,:,::1]",
    "float32[:,:,:,::1]",
)
def rotate_and_store(
    projected: Any, cosines: Any, sines: Any, blocks: Any, offsets: Any, keys: Any, values: Any
) -> None:
    """Rotate queries and keys in place (RoPE), then write keys and values to the cache.

    projected: [tokens, queries | keys | values, head_dim]. cosines, sines: [tokens, head_dim], with equal halves.
    """
    tokens, heads, head_dim = projected.shape
    kv_heads, half = keys.shape[1], head_dim // 2
    for token in range(tokens):
        for head in range(heads - kv_heads):
            for d in range(half):
                cosine, sine = cosines[token, d], sines[token, d]
                first, second = projected[token, head, d], projected[token, head, half + d]
                projected[token, head, d] = first * cosine - second * sine
                projected[token, head, half + d] = second * cosine + first * sine
        block, offset = blocks[token], offsets[token]
        for head in range(kv_heads):
            for d in range(head_dim):
                keys[block, head, offset, d] = projected[token, heads - 2 * kv_heads + head, d]
                values[block, head, offset, d] = projected[token, heads - kv_heads + head, d]
