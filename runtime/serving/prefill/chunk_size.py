"""How many tokens of prompts go through the model in one pass: a number, or "auto" to measure it."""

import time
from collections.abc import Callable
from typing import Literal

from runtime.serving.model.language_model import Chunk, LanguageModel

_SIZES = (32, 64, 128, 256, 512, 1024)
_ENOUGH = 0.9  # of the best rate: beyond the knee a longer pass only makes others wait
_WITHIN_S = 5.0
_REPEAT = 2


def resolve_chunk_tokens(configured: int | Literal["auto"], model: LanguageModel) -> int:
    """The configured number, or the measured one. Measuring writes to the model's blocks, so do it before all else."""
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
    """The smallest of some sizes, up to `most`, at which tokens per second are nearly the best that was measured.

    `pass_time`: seconds of one pass over so many tokens. Sizes are tried from small to large until it has taken too
    long; at least one is. The faster of two passes counts.
    """
    end = clock() + _WITHIN_S
    rates: dict[int, float] = {}
    for size in [size for size in _SIZES if size <= most] or [most]:
        rates[size] = size / max(min(pass_time(size) for _ in range(_REPEAT)), 1e-9)
        if clock() >= end:
            break
    best = max(rates.values())
    return min(size for size, rate in rates.items() if rate >= _ENOUGH * best)
