"""Chunk size of prefill: how many prompt tokens one pass computes. Configured, or measured ("auto")."""

import time
from collections.abc import Callable
from typing import Literal

from runtime.serving.model.language_model import Chunk, LanguageModel

_SIZES = (32, 64, 128, 256, 512, 1024)
_KNEE_SHARE = 0.9  # of the best rate: beyond the knee a longer pass only delays other prompts
_MEASURE_S = 5.0  # time limit of the measurement
_REPEAT = 2


def resolve_chunk_tokens(configured: int | Literal["auto"], model: LanguageModel) -> int:
    """Return the configured chunk size, or measure it. Measuring overwrites KV blocks: call it before any request."""
    if configured != "auto":
        return configured
    most = min(model.context_tokens, model.blocks * model.block_tokens)
    table = list(range(-(-most // model.block_tokens)))

    def pass_time(tokens: int) -> float:
        begin = time.perf_counter()
        model.forward([Chunk(table, 0, [0] * tokens)])
        return time.perf_counter() - begin

    return knee(pass_time, most)


def knee(pass_time: Callable[[int], float], most: int, clock: Callable[[], float] = time.perf_counter) -> int:
    """Return the smallest chunk size up to `most` whose throughput is at least 90% of the best one measured.

    `pass_time` returns the seconds of one pass over a number of tokens. Sizes are tried in ascending order, at least
    one, until the time limit. The faster of two passes counts.
    """
    end = clock() + _MEASURE_S
    rates: dict[int, float] = {}
    for size in [size for size in _SIZES if size <= most] or [most]:
        rates[size] = size / max(min(pass_time(size) for _ in range(_REPEAT)), 1e-9)
        if clock() >= end:
            break
    best = max(rates.values())
    return min(size for size, rate in rates.items() if rate >= _KNEE_SHARE * best)
