"""Time of an extend by the number of active slots, for simulations and benchmarks."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.engine import Engine
from gpu.index.graph_index import GraphIndex
from gpu.params import SearchParams

ACTIVE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_REPEAT = 3
_EXTENDS = 64  # minimum of timed extends per count of active slots: few active slots need several queries

Clock = Callable[[], float]
Vector = npt.NDArray[np.float32]


class ExtendTime(NamedTuple):
    """Time of an extend of `active` slots: the minimum of several (s)."""

    active: int
    seconds: float


def measure_extends(
    engine: Engine, collection: str, index: GraphIndex, params: SearchParams, clock: Clock = time.perf_counter
) -> list[ExtendTime]:
    """Time extends of 1, 2, 4, … up to all free slots of an engine that has loaded `index` as `collection`."""
    _touch(index)
    slots = engine.free_slots
    queries = typical_queries(index, 4 * slots + 64)  # distinct ones: vectors just read are cached
    counts = [count for count in ACTIVE if count < slots] + [slots]
    query_cycle = itertools.cycle(queries)
    taken = []
    for count in counts:
        found = min(_extend_s(engine, collection, query_cycle, params, count, clock) for _ in range(_REPEAT))
        if found:  # 0: the index is so small that queries finish in one extend
            taken.append(ExtendTime(count, found))
    return taken


def _extend_s(
    engine: Engine, collection: str, queries: Iterator[Vector], params: SearchParams, count: int, clock: Clock
) -> float:
    """Return the mean time of extends of `count` slots, in seconds; 0 if none advanced all of them."""
    spent, extends = 0.0, 0
    for _ in range(_EXTENDS):
        held = [engine.admit(next(queries), params, collection) for _ in range(count)]
        engine.extend()  # untimed: the first one scores the seeds
        begin, before = clock(), extends
        while engine.active_slots == count:
            engine.extend()
            extends += 1
        spent += clock() - begin
        for slot in held:
            engine.release(slot)
        if extends == before or extends >= _EXTENDS:
            break
    return spent / extends if extends else 0.0


def typical_queries(index: GraphIndex, count: int) -> npt.NDArray[np.float32]:
    """Return realistic queries, float32 [count, dim]: stored vectors with noise of half their spread.

    Random queries, far from all vectors, make a search read several times as much.
    """
    random = np.random.default_rng(0)
    near = index.vectors(random.integers(index.size, size=count))
    noise = random.standard_normal(near.shape, np.float32) * near.std(axis=0)
    queries: npt.NDArray[np.float32] = near + np.float32(0.5) * noise
    return queries


def _touch(index: GraphIndex) -> None:
    """Read a byte of every page, so that page faults of mapped files are not timed."""
    for array in (index.data.rows.codes, index.data.graph):
        np.ascontiguousarray(array).reshape(-1).view(np.uint8)[::4096].max()
